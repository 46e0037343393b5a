"""The self-test of Hopper's kernels over pages knows right from wrong: both kernels, simulated."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attention.gluon_simulator import load
from attention.test_hopper_decode import merged
from stairs.attention.hopper import ForwardTile
from stairs.attention.hopper_decode_check import what_is_wrong
from stairs.attention.meta import AttnMeta, LayerKV, WorkList

CPU = torch.device("cpu")


def test_the_self_test_passes_and_tells_what_is_wrong() -> None:
    decode = load("hopper_decode").attend_entries
    chunks = load("hopper_chunks", seed=5).attend_tiles

    def attend(q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, out: Tensor) -> None:
        parts = chunks if isinstance(work.tile, ForwardTile) else decode
        scale = q.shape[2] ** -0.5
        merged(work, parts(q, layer_kv, meta, work, scale=scale, out=out), out)

    def off(q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, out: Tensor) -> None:
        attend(q, layer_kv, meta, work, out)
        out[-1, -1, -1] += 0.1

    def silent(q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, out: Tensor) -> None:
        attend(q, layer_kv, meta, dataclasses.replace(work, merges=work.merges[:0]), out)

    def broken(*arguments: object) -> None:
        raise RuntimeError("no such instruction")

    assert what_is_wrong(attend, CPU) is None
    assert "off (4 heads a group, D 128" in (what_is_wrong(off, CPU) or "")
    assert "nan off" in (what_is_wrong(silent, CPU) or "")
    assert "no such instruction" in (what_is_wrong(broken, CPU) or "")

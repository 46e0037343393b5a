"""Rotation and attention in one call: the bits, the K/V and the counts of separate ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.ragged import Ragged, make_ragged
from stairs.attention.attend import attend
from stairs.models import attend_cpu
from stairs.models.fused import attend_rotated, rotate_torch
from stairs.models.glue_cpu import rotate
from stairs.models.layers import RMSNorm, Rotary

DECODES = [(1, 70), (1, 1), (1, 130)]
MIXED = [(1, 70), (9, 33), (3, 3)]


def both(batch: Ragged, rotation: tuple[torch.Tensor, torch.Tensor], *, norms=None):
    """What one call answers, and what ``rotate`` and ``attend`` do, each on its own pool."""
    heads = torch.cat((batch.q, batch.k, batch.v), dim=1)
    pools = [replace(batch.layer_kv, k=batch.layer_kv.k.clone(), v=batch.layer_kv.v.clone())
             for _ in range(2)]  # fmt: skip
    metas = [replace(batch.meta, counts=torch.zeros_like(batch.meta.counts)) for _ in range(2)]
    num_heads, kv_heads = batch.q.shape[1], batch.k.shape[1]
    found = attend_rotated(
        heads.clone(), rotation, norms, pools[0], metas[0], num_heads=num_heads, backend="auto"
    )
    if norms is None:
        rotate(heads, *rotation, num_heads + kv_heads)
        q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    else:
        q, k, v = rotate_torch(heads, rotation, norms, num_heads=num_heads)
    wanted = attend(q, k, v, pools[1], metas[1])
    return (found, wanted), pools, metas


def angles(batch: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    width = batch.q.shape[2]
    rotary = Rotary(width, 1e4, dtype=torch.float32, device=torch.device("cpu"))
    return rotary(torch.arange(len(batch.q)) + 5)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("lengths", [DECODES, MIXED, [(16, 40)]], ids=str)
def test_the_same_as_one_after_the_other(lengths: list[tuple[int, int]], invariant: bool) -> None:
    batch = make_ragged(lengths, num_heads=9, kv_heads=3)
    batch.meta = replace(batch.meta, batch_invariant=invariant)
    (found, wanted), pools, metas = both(batch, angles(batch))
    assert torch.equal(found, wanted)
    for name in ("k", "v"):
        ours, theirs = (getattr(pool, name).nan_to_num() for pool in pools)
        assert torch.equal(ours, theirs)
    assert torch.equal(metas[0].counts, metas[1].counts) and metas[0].counts.any()


def test_a_second_step_is_not_answered_with_the_first_ones_lengths() -> None:
    for lengths in ([(1, 70), (1, 9)], [(1, 71), (1, 30)]):
        batch = make_ragged(lengths, num_heads=4, kv_heads=2)
        (found, wanted), _, _ = both(batch, angles(batch))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", ["long rows", "many rows", "16-bit pool", "norms"])
def test_what_it_leaves_to_the_calls(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"long rows": [(20, 40)], "many rows": [(1, 9)] * 17}.get(case, DECODES)
    kv_dtype = torch.bfloat16 if case == "16-bit pool" else torch.float32
    batch = make_ragged(lengths, num_heads=4, kv_heads=2, kv_dtype=kv_dtype)
    norms = (RMSNorm(torch.ones(64), 1e-5),) * 2 if case == "norms" else None
    monkeypatch.delattr(attend_cpu, "_rotate_and_attend")
    (found, wanted), _, _ = both(batch, angles(batch), norms=norms)
    assert torch.equal(found, wanted)


def test_a_page_outside_the_pool_is_refused() -> None:
    batch = make_ragged(DECODES, num_heads=4, kv_heads=2)
    batch.meta.block_table[0, 0] = 10**6
    with pytest.raises(IndexError, match="page id outside the K/V pool"):
        both(batch, angles(batch))

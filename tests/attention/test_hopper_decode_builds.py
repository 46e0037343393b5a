"""The Hopper decode kernel is built for sm_90 as it should be: nothing spills but what is recorded,
no product waits for another, and as many programs as its tile says fit an SM."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles; not in the interpreter's process", allow_module_level=True)

from triton.runtime import driver

from attention.gluon_builds import HOPPER_DRIVER, IS_36, Compiled, assembled
from attention.hopper_decode_builds import DecodeBuild, served
from attention.ragged import make_ragged
from stairs.attention import hopper_decode, triton_paged
from stairs.attention.hopper import padded
from stairs.attention.tiles import hopper_tiles
from stairs.attention.work import cut_step, upload

SM_BYTES, PROGRAM_BYTES = 228 * 1024, 1024  # of shared memory; what the system takes a program
PRODUCTS = {16: ("mma.sync.aligned.m16n8k16", "ldmatrix"), 64: ("wgmma.mma_async",)}
# Bytes by rows and padded head_dim: ids of pages of 8 keys; under 3.9, which asks its ptxas for
# --regAllocOptLevel=2, loops of 64 rows too.
SPILLS = {(64, 64): 4}
if not IS_36:
    SPILLS = {(64, 64): 148, (64, 128): 60, (64, 256): 68, (16, 256): 12}
BUILDS = list(dict.fromkeys(served()))
if not IS_36:
    BUILDS = [build for build in BUILDS if build.block_size in (8, 16)]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
def test_build(build: DecodeBuild) -> None:
    kernel, found = assembled(build)
    tile, ptx = build.tile, kernel.asm["ptx"]
    assert kernel.metadata.shared <= SM_BYTES // tile.per_sm - PROGRAM_BYTES
    for name in (*PRODUCTS[tile.rows], "cp.async.bulk.tensor.2d"):
        assert name in ptx
    assert ("griddepcontrol.launch_dependents" in ptx) == tile.is_chained
    assert not found.is_serial
    assert found.spilled <= SPILLS.get((tile.rows, padded(build.head_dim)), 0)
    assert found.register_splits, "the loading warp gives its registers away"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is launched")
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 1, 128)])
def test_calls_compile_from_their_own_arguments_and_once(
    num_heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_active", HOPPER_DRIVER)
    decode = Compiled(hopper_decode.decode_kernel)
    merge = Compiled(triton_paged.merge_kernel)
    monkeypatch.setattr(hopper_decode, "decode_kernel", decode)
    monkeypatch.setattr(triton_paged, "merge_kernel", merge)
    group = num_heads // kv_heads
    tile = dataclasses.replace(hopper_tiles(head_dim, group)[0], is_chained=True)
    for lengths in ([5000, 30], [1, 900], [4096]):
        batch = make_ragged([(1, n) for n in lengths], num_heads=num_heads, kv_heads=kv_heads,
                            head_dim=head_dim, dtype=torch.bfloat16)  # fmt: skip
        cuts = cut_step(np.ones(len(lengths), dtype=np.int64), np.array(lengths), group=group,
                        kv_heads=kv_heads, tiles=(tile, tile), num_sms=132)  # fmt: skip
        (work,) = upload(cuts, torch.device("cpu"))
        meta = dataclasses.replace(batch.meta, counting=False)
        out = torch.empty_like(batch.q)
        hopper_decode.attend_short(batch.q, batch.layer_kv, meta, work, scale=0.1, out=out)
    assert len(decode.calls) == 3 and len(merge.calls) == 3
    assert len(set(map(id, decode.calls))) == 1, "compiled anew for other lengths"
    for kernel in (decode.calls[0], merge.calls[0]):
        assert kernel.metadata.launch_pdl and kernel.asm["cubin"]
    assert decode.calls[0].metadata.maxnreg == tile.max_registers

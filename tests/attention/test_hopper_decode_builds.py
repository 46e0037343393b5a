"""The Hopper decode kernel is built for sm_90 as it should be: nothing spills, no product waits for
another, and as many programs as its tile says fit an SM."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles; not in the interpreter's process", allow_module_level=True)

import triton

from attention.gluon_builds import Assembled
from attention.hopper_decode_builds import DecodeBuild, chosen, swept

SM_BYTES, PROGRAM_BYTES = 228 * 1024, 1024  # of shared memory; what the system takes a program
CHOSEN = list(chosen())
FEW = [b for b in CHOSEN if b.head_dim in (64, 128) and b.block_size in (8, 16)]
REST: list[DecodeBuild] = []
if os.environ.get("STAIRS_ALL_KERNELS"):
    REST = [b for b in dict.fromkeys((*CHOSEN, *swept())) if b not in FEW]
PRODUCTS = {16: ("mma.sync.aligned.m16n8k16", "ldmatrix"), 64: ("wgmma.mma_async",)}


def check(build: DecodeBuild) -> None:
    kernel, tile = build.compile(), build.tile
    assert kernel.metadata.shared <= SM_BYTES // tile.per_sm - PROGRAM_BYTES
    assert kernel.asm["cubin"]
    if not triton.__version__.startswith("3.6."):
        return
    ptx = kernel.asm["ptx"]
    for name in (*PRODUCTS[tile.rows], "cp.async.bulk.tensor.2d"):
        assert name in ptx
    assert ("griddepcontrol.launch_dependents" in ptx) == tile.is_chained
    assembled = Assembled.of(kernel)
    assert not assembled.spilled and not assembled.is_serial
    assert assembled.register_splits, "the loading warp gives its registers away"


@pytest.mark.parametrize("build", FEW, ids=lambda build: build.name)
def test_what_is_served(build: DecodeBuild) -> None:
    check(build)


@pytest.mark.slow
@pytest.mark.parametrize("build", REST, ids=lambda build: build.name)
def test_all(build: DecodeBuild) -> None:
    """STAIRS_ALL_KERNELS=1, or `make test-kernels`."""
    check(build)

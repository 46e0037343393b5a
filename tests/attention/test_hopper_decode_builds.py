"""The Hopper decode kernel is built for sm_90 as it should be: nothing spills, no product waits for
another, and as many programs as its tile says fit an SM."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles; not in the interpreter's process", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from attention.gluon_builds import Assembled
from attention.hopper_decode_builds import DecodeBuild, chosen
from attention.ragged import make_ragged
from stairs.attention import hopper_decode, triton_paged
from stairs.attention.tiles import hopper_tiles
from stairs.attention.work import cut_step, upload

SM_BYTES, PROGRAM_BYTES = 228 * 1024, 1024  # of shared memory; what the system takes a program
CHOSEN = list(chosen())
FEW = [b for b in CHOSEN if b.head_dim in (64, 128) and b.block_size in (8, 16)]
REST: list[DecodeBuild] = []
if os.environ.get("STAIRS_ALL_KERNELS"):
    REST = [b for b in CHOSEN if b not in FEW]
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


@dataclasses.dataclass
class Compiled:
    """A kernel that is compiled for the arguments of a launch, and not launched."""

    kernel: Any
    calls: list[Any] = dataclasses.field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append(
            self.kernel.run(*args, grid=grid, warmup=True, **kwargs)
        )


@pytest.fixture
def hopper_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton believes that there is a Hopper, as far as a compilation asks."""
    believed = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", believed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is launched")
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 1, 128)])
def test_calls_compile_from_their_own_arguments_and_once(
    num_heads: int, kv_heads: int, head_dim: int, hopper_driver: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
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

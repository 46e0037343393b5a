"""Gluon's kernels compile for Hopper without one, as everything that a call can ask for: registers
are split as told, no product waits for another, and nothing spills but what is recorded.

Under the newest Triton too, where `.ci/run` puts it in front: there more may spill.
"""

from __future__ import annotations

import ast
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles; not in the interpreter's process", allow_module_level=True)

import numpy as np
import torch
from triton.runtime.driver import driver

from attention.gluon_builds import (
    HOPPER_DRIVER,
    IS_36,
    SHARED_LIMIT,
    SPILLED_IN_LOOPS,
    SPILLS,
    Assembled,
    Build,
    Compiled,
    ForwardBuild,
    assembled,
    in_brief,
    served,
)
from attention.ragged import make_ragged
from stairs.attention import hopper_chunks, hopper_forward, hopper_order
from stairs.attention.hopper import TILES, forward_tile, padded
from stairs.attention.hopper_load import has_loader
from stairs.attention.work import cut_step, upload

ATTENTION = Path(hopper_forward.__file__).parent
KERNELS = sorted((*ATTENTION.glob("hopper_*.py"), *ATTENTION.glob("triton_*.py")))
# All of them under the Triton that is tested, some under the newest: see ``in_brief``.
BUILDS = list(dict.fromkeys(served()))
if not IS_36:
    BUILDS = [build for build in BUILDS if in_brief(build)]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
def test_build(build: Build) -> None:
    kernel, found = assembled(build)
    assert kernel.metadata.shared <= SHARED_LIMIT
    assert not found.is_serial
    may_spill = 0
    if isinstance(build, ForwardBuild):
        tile = build.tile
        registers, total = tile.registers, 504 if tile.consumers == 2 else 512
        if has_loader(build.page, tile.keys, padded(build.head_dim), tile.consumers):
            registers, total = registers - 8, 512 - 24
        # Of a thread's in each warpgroup, in eights.
        assert {registers, total - tile.consumers * registers} <= found.register_splits
        may_spill = SPILLS.get((build.head_dim, tile.consumers, build.ragged), 0)
    assert found.spilled <= may_spill
    assert found.spilled_in_loops <= SPILLED_IN_LOOPS


def test_what_ptxas_says_is_understood() -> None:
    kernel = SimpleNamespace(asm={"ptx": "setmaxnreg.inc.sync.aligned.u32 240;"})
    quiet = "ptxas info    : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert Assembled.of(kernel, quiet) == Assembled(0, 0, False, frozenset({240}))
    for code in ("C7508", "C7510", "C7512"):
        told = f"({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
        assert Assembled.of(kernel, quiet + told).is_serial


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_no_inner_loop_begins_at_a_bare_name(file: Path) -> None:
    """Triton 3.6 takes a value that an outer loop carries, and that is nothing but where an inner
    loop begins, for unused, and goes on with the first one. A sum of it is used."""
    for function in ast.walk(ast.parse(file.read_text())):
        if not isinstance(function, ast.FunctionDef) or not any(
            "jit" in ast.unparse(decorator) for decorator in function.decorator_list
        ):
            continue
        for outer in (node for node in ast.walk(function) if isinstance(node, ast.For)):
            for node in (node for child in outer.body for node in ast.walk(child)):
                if isinstance(node, ast.For) and ast.unparse(node.iter).startswith("range("):
                    assert isinstance(node.iter, ast.Call)
                    start, *rest = node.iter.args
                    told = f"{function.name}: {ast.unparse(node.iter)}"
                    assert not (rest and isinstance(start, ast.Name)), told


def test_hardware_barriers_suffice() -> None:
    for tiles in TILES.values():
        for tile in tiles:
            first, second = tile.free_barriers
            assert (first, second) == (0, 0) or 8 <= first < second <= 16 - tile.stages


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is launched")
def test_calls_compile_from_their_own_arguments_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes, 1 and multiples of 16 among them: nothing compiles after the first."""
    monkeypatch.setattr(driver, "_active", HOPPER_DRIVER)
    forward, order = Compiled(hopper_forward.forward_kernel), Compiled(hopper_order.order_kernel)
    monkeypatch.setattr(hopper_forward, "forward_kernel", forward)
    monkeypatch.setattr(hopper_order, "order_kernel", order)
    for num_q, num_kv, heads, kv_heads in ((130, 200, 4, 2), (1, 33, 1, 1), (256, 257, 16, 16)):
        q, k, v = (
            torch.empty(1, rows, n, 64, dtype=torch.bfloat16)
            for rows, n in ((num_q, heads), (num_kv, kv_heads), (num_kv, kv_heads))
        )
        ends = [torch.tensor([0, n], dtype=torch.int32) for n in (num_q, num_kv)]
        for cu_q, cu_kv in ((None, None), ends):
            hopper_forward.hopper_forward(
                q, k, v, cu_q=cu_q, cu_kv=cu_kv, max_q=num_q, scale=0.125, causal=True,
                window=(-1, -1), softcap=0.0, return_lse=True,
                tile=forward_tile(64, causal=True, window=(-1, -1)),
            )  # fmt: skip
    assert len(order.calls) == 3 and len(set(map(id, order.calls))) == 1
    assert len(forward.calls) == 6
    for calls in (forward.calls[::2], forward.calls[1::2]):
        assert len(set(map(id, calls))) == 1 and calls[0].asm["cubin"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is launched")
@pytest.mark.parametrize("counting", [False, True])
def test_chunks_compile_from_their_own_arguments_and_once(
    counting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the step's lengths, and whether keys are cut or not."""
    monkeypatch.setattr(driver, "_active", HOPPER_DRIVER)
    forward = Compiled(hopper_chunks.forward_kernel)
    monkeypatch.setattr(hopper_chunks, "forward_kernel", forward)
    tile = forward_tile(64, causal=True, window=(-1, -1))
    num_parts = []
    for step in ([(128, 128)], [(65, 4097), (128, 3000), (400, 400)], [(512, 32)] * 16):
        lengths = [(num_q, num_q + num_kv) for num_q, num_kv in step]
        batch = make_ragged(lengths, num_heads=3, kv_heads=1, dtype=torch.bfloat16)
        num_q, num_kv = (np.array([pair[i] for pair in lengths]) for i in (0, 1))
        cuts = cut_step(num_q, num_kv, group=3, kv_heads=1, tiles=(tile, tile), num_sms=132)
        (work,) = upload(cuts, torch.device("cpu"))
        meta = replace(batch.meta, counting=counting)
        out = torch.empty_like(batch.q)
        parts, _ = hopper_chunks.attend_tiles(
            batch.q, batch.layer_kv, meta, work, scale=0.1, out=out
        )
        num_parts.append(len(parts))
    assert num_parts[0] == 0 < num_parts[1]
    assert len(forward.calls) == 3 and len(set(map(id, forward.calls))) == 1
    assert forward.calls[0].asm["cubin"]

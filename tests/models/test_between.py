"""From one attention to the next: one call for few rows gives the bits of the calls it replaces."""

from __future__ import annotations

import pytest
import torch

from models.test_quantised_cpu import packed
from stairs.accounting.weights import FEW_ROWS
from stairs.models.between import Between
from stairs.models.glue_cpu import SERIAL_ROWS
from stairs.models.layers import DenseLinear, Linear, RMSNorm
from stairs.models.packed import PackedLinear

WIDTH, HEADS, VALUES, QKV = 256, 256, 512, 320


def linear(
    *kinds: str, outputs: int, inputs: int, bias: bool = False, dense: bool = False
) -> PackedLinear:
    rows = outputs // len(kinds)
    parts = tuple(packed(kind, (rows, inputs)) for kind in kinds)
    return PackedLinear(
        parts,
        torch.randn(outputs) if bias else None,
        in_registers=True,
        dense=torch.randn(outputs, inputs) if dense else None,
    )


def between(*, bias: bool, last: bool, dense: bool = False, activation: str = "silu") -> Between:
    torch.manual_seed(1)
    norms = [RMSNorm(1 + 0.1 * torch.randn(WIDTH), 1e-5 * (i + 1)) for i in range(2)]
    return Between(
        linear("Q4_1", outputs=WIDTH, inputs=HEADS, bias=bias),
        norms[0],
        linear("Q4_1", "Q6_K", outputs=2 * VALUES, inputs=WIDTH, bias=bias, dense=dense),
        linear("Q8_0", outputs=WIDTH, inputs=VALUES, bias=bias),
        activation,
        norms[1],
        None if last else linear("Q4_K", "F16", outputs=QKV, inputs=WIDTH, bias=bias),
    )


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_bits_of_the_calls_it_replaces(bias: bool, last: bool) -> None:
    both = between(bias=bias, last=last)
    assert both.few_rows is not None and both.few_rows.most_rows == SERIAL_ROWS
    for num_rows in (1, 2, 5, SERIAL_ROWS):
        attended, x = torch.randn(num_rows, HEADS), torch.randn(num_rows, WIDTH)
        before = x.clone()
        found = both.few_rows(attended, x)
        wanted = both.call_by_call(attended, x)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert found[0].shape == (num_rows, WIDTH if last else QKV) and torch.equal(x, before)


def test_threads_change_no_bit() -> None:
    both = between(bias=True, last=False)
    attended, x = torch.randn(3, HEADS), torch.randn(3, WIDTH)
    wanted = both.call_by_call(attended, x)
    num_threads = torch.get_num_threads()
    try:
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            found = both(attended, x)
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    finally:
        torch.set_num_threads(num_threads)


def test_many_rows_go_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, copied = between(bias=False, last=False), between(bias=False, last=False, dense=True)
    for both, most in ((plain, SERIAL_ROWS), (copied, FEW_ROWS)):
        called: list[int] = []
        monkeypatch.setattr(
            type(both.few_rows), "__call__", lambda _, a, x, log=called: log.append(len(x))
        )
        for num_rows in (most, most + 1):
            both(torch.randn(num_rows, HEADS), torch.randn(num_rows, WIDTH))
        assert called == [most]


@pytest.mark.parametrize("lacks", ["a kernel for its rows", "packed rows", "SiLU"])
def test_what_goes_call_by_call_always(lacks: str) -> None:
    whole = between(bias=False, last=False)
    down: Linear = whole.down
    if lacks == "a kernel for its rows":
        down = PackedLinear((packed("Q8_0", (WIDTH, VALUES)),), in_registers=False)
    elif lacks == "packed rows":
        down = DenseLinear(torch.randn(WIDTH, VALUES))
    activation = "gelu_new" if lacks == "SiLU" else "silu"
    both = Between(
        whole.output, whole.norm, whole.gate_up, down, activation, whole.next_norm, whole.qkv
    )
    assert both.few_rows is None
    fed, x = both(torch.randn(2, HEADS), torch.randn(2, WIDTH))
    assert fed.isfinite().all() and x.shape == (2, WIDTH)

"""The Hopper forward on a simulated Hopper: values, protocol, schedules; and when it is taken."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attention.dense import attention_float64
from attention.gluon_simulator import load
from stairs.attention.choose import Tile
from stairs.attention.flash import choose_contiguous, flash_attention
from stairs.attention.hopper import ForwardTile, forward_tile, hopper_lacks
from stairs.attention.hopper_check import what_is_wrong
from stairs.errors import ConfigError

SMALL = ForwardTile(64, 2, 2, 240)  # more tiles of keys in a short row
KINDS = {
    "turns": SMALL,
    "three": ForwardTile(64, 3, 3, 160, turns=False),
    "three in turn": ForwardTile(64, 2, 3, 160),
    "hardware": ForwardTile(64, 3, 2, 240, releases="hardware"),
    "spare": ForwardTile(64, 2, 2, 240, releases="hardware", spare=True),
    "wide": ForwardTile(128, 2, 2, 240, spare=True),
    "lazy": ForwardTile(64, 2, 2, 240, lazy=True),
}
kinds = pytest.mark.parametrize("tile", KINDS.values(), ids=KINDS)


def forward(q: Tensor, k: Tensor, v: Tensor, *, seed: int = 0, **options: Any) -> Any:
    call = {
        "cu_q": None, "cu_kv": None, "max_q": q.shape[1], "scale": q.shape[-1] ** -0.5,
        "causal": False, "window": (-1, -1), "softcap": 0.0, "return_lse": True, "tile": SMALL,
        "num_sms": 3,
    } | options  # fmt: skip
    return load("hopper_forward", seed=seed).hopper_forward(q, k, v, **call)


def tensors(num_q: int, num_kv: int, *, batch: int = 1, heads: int = 2, kv_heads: int = 1,
            head_dim: int = 64, dtype: torch.dtype = torch.float16) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(num_q * 1009 + num_kv)
    return [
        torch.randn(batch, rows, n, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        for rows, n in ((num_q, heads), (num_kv, kv_heads), (num_kv, kv_heads))
    ]


def check(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **rules: Any) -> None:
    """At most twice what one rounding of every weight costs, and one of the largest result."""
    exact, exact_lse = attention_float64(q, k, v, **rules)
    slack = torch.finfo(q.dtype).eps * exact.abs().max().clamp(min=1.0)
    assert (out.double() - exact).abs().max() <= 2 * slack
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@kinds
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(113, 203), (1, 300), (300, 1)], ids=str)
def test_ugly_shapes(lengths: tuple[int, int], causal: bool, tile: ForwardTile) -> None:
    q, k, v = tensors(*lengths)
    for seed in range(2):  # of the order in which partitions, copies and products go on
        check(q, k, v, *forward(q, k, v, causal=causal, tile=tile, seed=seed), causal=causal)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("window", [(2, 0), (100, -1), (-1, 30), (70, 5)], ids=str)
@pytest.mark.parametrize("lengths", [(200, 333), (333, 200), (5, 2)], ids=str)
def test_windows_and_caps(
    lengths: tuple[int, int], window: tuple[int, int], softcap: float
) -> None:
    """K10, K11, K14, K17"""
    q, k, v = tensors(*lengths)
    rules = {"window": window, "softcap": softcap, "causal": window[1] < 0}
    check(q, k, v, *forward(q, k, v, **rules), **rules)


@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    """K26: columns past head_dim are no other head's."""
    q, k, v = tensors(130, 150, batch=2, heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype)
    tile = forward_tile(head_dim, causal=True, window=(-1, -1))
    check(q, k, v, *forward(q, k, v, causal=True, tile=tile), causal=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (12, 1), (3, 3)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    """K25"""
    q, k, v = tensors(70, 70, batch=2, heads=heads, kv_heads=kv_heads)
    check(q, k, v, *forward(q, k, v, causal=True), causal=True)


def test_scores_far_below_zero() -> None:
    """K8"""
    q, k, v = tensors(64, 64)
    q, k = -(2.0**6) * q.abs(), k.abs() * 8
    check(q, k, v, *forward(q, k, v, causal=True), causal=True)


def test_views_of_a_fused_projection() -> None:
    """K24: the same bits without a copy."""
    fused = torch.randn(2, 130, 3, 4, 64).half()
    q, k, v = fused.unbind(2)
    for ours, copied in zip(
        forward(q, k, v, causal=True),
        forward(q.contiguous(), k.contiguous(), v.contiguous(), causal=True),
        strict=True,
    ):
        assert torch.equal(ours, copied)


RAGGED = [(0, 3), (150, 297), (4, 0), (0, 7), (1, 1), (300, 392), (64, 64), (1, 500), (130, 130)]


def ragged(pairs: list[tuple[int, int]], **options: Any) -> list[tuple[Tensor, ...]]:
    """q, k, v, O and LSE of each sequence; those without queries hold NaN."""
    ends_q, ends_kv = (list(itertools.accumulate((p[i] for p in pairs), initial=0)) for i in (0, 1))
    parts = [tensors(*pair) for pair in pairs]
    for (num_q, _), part in zip(pairs, parts, strict=True):
        if not num_q:
            part[1].fill_(torch.nan), part[2].fill_(torch.nan)
    q, k, v = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    cu_q, cu_kv = (torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_kv))
    longest = max(num_q for num_q, _ in pairs)
    out, lse = forward(q, k, v, cu_q=cu_q, cu_kv=cu_kv, max_q=longest, **options)
    return [
        (*part, out[:, a:b], lse[..., a:b])
        for part, (a, b) in zip(parts, itertools.pairwise(ends_q), strict=True)
    ]


@kinds
def test_ragged(tile: ForwardTile) -> None:
    """K2, K19, K20; a neighbour's NaN stays the neighbour's."""
    for rules in ({"causal": True}, {"window": (40, 3)}):
        for q, k, v, out, lse in ragged(RAGGED, tile=tile, seed=5, **rules):
            if q.numel():
                check(q, k, v, out, lse, **rules)


def test_a_sequence_has_the_same_bits_alone_and_among_others() -> None:
    """K30"""
    together = ragged(RAGGED * 3, causal=True, num_sms=5)
    for i in (1, 4, 5, 7):
        ((*_, out, lse),) = ragged(RAGGED[i : i + 1], causal=True)
        assert torch.equal(out, together[i][3]) and torch.equal(lse, together[i][4])


def test_ragged_tiles_come_longest_first() -> None:
    order = load("hopper_order").order_tiles
    for pairs in (RAGGED, RAGGED * 20, [(0, 5)]):
        cu_q, cu_kv = (
            torch.tensor(list(itertools.accumulate((p[i] for p in pairs), initial=0)))
            .to(torch.int32) for i in (0, 1)
        )  # fmt: skip
        tiles = order(
            cu_q, cu_kv, total_q=int(cu_q[-1]), rows=128, keys=64, left=2**30, right=0,
            has_right=True, has_left=False,
        )  # fmt: skip
        expected = []
        for i, (num_q, num_kv) in enumerate(pairs):
            for row0 in range(0, num_q, 128):
                seen = min(num_kv, max(0, row0 + 128 + num_kv - num_q))
                place = [row0, int(cu_q[i]), num_q, int(cu_kv[i]), num_kv]
                expected.append((max(1, -(-seen // 64)), place))
        expected.sort(key=lambda each: -each[0])  # stable: then in the sequences' order
        assert int(tiles[0]) == len(expected)
        records = tiles.view(-1, 8)[1 : 1 + len(expected), :5]
        assert records.tolist() == [place for _, place in expected]


@pytest.mark.parametrize(("heads", "most"), [(8, 1.06), (16, 1.02), (32, 1.01)])
def test_ragged_rows_are_shared_evenly(heads: int, most: float) -> None:
    """Tiles of keys, and one for what a tile of rows costs by itself, of 132 programs."""
    lengths = (1, 8192, 3, 17, 1500, 64, 128, 2500, 300, 700, 33, 1024, 900, 511, 511)
    ends = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
    tiles = load("hopper_order").order_tiles(
        ends, ends, total_q=16384, rows=128, keys=128, left=2**30, right=0, has_right=True,
        has_left=False,
    )  # fmt: skip
    work = [0] * 132
    for place in range(int(tiles[0]) * heads):
        row0, _, _, _, num_kv, *_ = tiles[8 + 8 * (place // heads) :][:8].tolist()
        turn, program = divmod(place, 132)
        work[program if turn % 2 == 0 else 131 - program] += 1 + -(-min(num_kv, row0 + 128) // 128)
    assert max(work) <= most * sum(work) / 132


def test_programs_share_the_tiles() -> None:
    """Any number of programs, more than tiles too, in either order, gives the same bits."""
    q, k, v = tensors(400, 400, batch=2)
    first, *others = (
        forward(q, k, v, causal=True, num_sms=num_sms, tile=SMALL, in_rounds=in_rounds)[0]
        for num_sms in (1, 2, 5, 64)
        for in_rounds in (False, True)
    )
    assert all(torch.equal(first, other) for other in others)


def test_the_self_test_knows_right_from_wrong() -> None:
    ours = functools.partial(load("hopper_forward").hopper_forward, num_sms=2)
    assert what_is_wrong(ours, torch.device("cpu"), [(64, True), (128, False)]) is None

    def shifted(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = ours(*args, **options)
        return out.roll(1, dims=1), lse

    assert "off (D 64" in str(what_is_wrong(shifted, torch.device("cpu")))

    def broken(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such name")

    assert "no such name" in str(what_is_wrong(broken, torch.device("cpu")))


# -- when it is taken -----------------------------------------------------------------------------


def lacks(q: Tensor, k: Tensor | None = None, **facts: Any) -> str | None:
    k = q if k is None else k
    return hopper_lacks(q, k, k, **({"capability": (9, 0), "release": "3.6.0"} | facts))


def test_what_it_lacks() -> None:
    q = torch.empty(2, 8, 4, 64, dtype=torch.bfloat16)
    assert lacks(q) is None
    assert lacks(q.half()) is None
    assert lacks(torch.empty(2, 8, 3, 4, 64, dtype=torch.float16)[:, :, 1]) is None
    assert "sm_80" in str(lacks(q, capability=(8, 0)))
    assert "older than 3.6" in str(lacks(q, release="3.5.1"))
    assert "float32" in str(lacks(q.float()))
    assert "head_dim 100" in str(lacks(torch.empty(2, 8, 4, 100, dtype=torch.float16)))
    assert "head_dim 264" in str(lacks(torch.empty(2, 8, 4, 264, dtype=torch.float16)))
    wide = torch.empty(2, 8, 4, 72, dtype=torch.float16)
    assert "16 bytes" in str(lacks(wide[..., 4:68]))
    assert "steps of 136 bytes" in str(lacks(torch.empty(2, 8, 4, 68).half()[..., :64]))
    assert "apart" in str(lacks(torch.empty(2, 8, 64, 4).half().transpose(2, 3)))
    assert "k is of shape" in str(lacks(q, q[:, :0]))
    assert "steps of 0 bytes" in str(lacks(q[:1].expand(2, -1, -1, -1)))


def test_auto_waits_for_a_measurement() -> None:
    facts = {"device": "cuda", "hopper_tile": Tile(128, 128)}
    unknown = choose_contiguous(backend="auto", **facts)
    assert unknown.implementation == "triton" and "not measured yet" in unknown.reason
    assert choose_contiguous(backend="hopper", **facts).implementation == "hopper"
    taken = choose_contiguous(backend="auto", hopper_tflops=700.0, **facts)
    assert taken.implementation == "hopper" and taken.tile == Tile(128, 128)
    other = choose_contiguous(backend="auto", hopper_tflops=700.0, hopper_lacks="no", **facts)
    assert other.implementation == "triton" and other.reason.endswith("kernel: no")
    assert (
        choose_contiguous(backend="triton", hopper_tflops=1.0, **facts).implementation == "triton"
    )
    assert choose_contiguous(backend="auto", triton_lacks="x", **facts).implementation == "online"


def test_a_backend_that_cannot_is_refused() -> None:
    for backend, device, problem in (
        ("fast", "cuda", "unknown"), ("cpu", "cuda", "does not run"), ("hopper", "cpu", "run on"),
        ("hopper", "cuda", "cannot run this: old"), ("triton", "cuda", "cannot run this: new"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=problem) as raised:
            choose_contiguous(
                backend=backend, device=device, hopper_lacks="old", triton_lacks="new"
            )
        assert raised.value.param == "backend"
    q, k, v = tensors(9, 9)
    torch.testing.assert_close(
        flash_attention(q, k, v, backend="online"), flash_attention(q, k, v), rtol=0, atol=1e-2
    )
    with pytest.raises(ConfigError, match="hopper does not run on cpu"):
        flash_attention(q, k, v, backend="hopper")

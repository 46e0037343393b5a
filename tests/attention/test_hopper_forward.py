"""The Hopper forward on a simulated Hopper: values, protocol, schedules; and when it is taken."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attention.dense import attention_float64
from attention.gluon_simulator import load
from attention.ragged import Ragged, make_ragged
from attention.test_hopper_decode import merged
from stairs.attention import hopper_decode, hopper_forward, triton_paged  # real ones first
from stairs.attention.attend import attend_paged, write_kv
from stairs.attention.choose import Tile
from stairs.attention.flash import choose_contiguous, flash_attention
from stairs.attention.hopper import ForwardTile, forward_tile, hopper_lacks
from stairs.attention.hopper_check import what_is_wrong
from stairs.attention.hopper_decode import box_layout
from stairs.attention.meta import AttnMeta
from stairs.attention.tiles import HopperTile, TritonTile
from stairs.attention.work import Cut, cut_rows, cut_step, upload
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


def simulated(seed: int) -> Any:
    """hopper_forward's module, and what it takes from others, on the simulated machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("hopper_order", "hopper_softmax"):
            patch.setitem(__import__("sys").modules, f"stairs.attention.{name}", load(name))
        return load("hopper_forward", seed=seed)


def forward(q: Tensor, k: Tensor, v: Tensor, *, seed: int = 0, **options: Any) -> Any:
    call = {
        "cu_q": None, "cu_kv": None, "max_q": q.shape[1], "scale": q.shape[-1] ** -0.5,
        "causal": False, "window": (-1, -1), "softcap": 0.0, "return_lse": True, "tile": SMALL,
        "num_sms": 3,
    } | options  # fmt: skip
    return simulated(seed).hopper_forward(q, k, v, **call)


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
    ours = functools.partial(simulated(0).hopper_forward, num_sms=2)
    assert what_is_wrong(ours, torch.device("cpu"), [(64, True), (128, False)]) is None

    def shifted(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = ours(*args, **options)
        return out.roll(1, dims=1), lse

    assert "off (D 64" in str(what_is_wrong(shifted, torch.device("cpu")))

    def broken(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such name")

    assert "no such name" in str(what_is_wrong(broken, torch.device("cpu")))


# -- pages ----------------------------------------------------------------------------------------

CHUNKS = [(128, 300), (0, 7), (1, 1), (30, 30), (128, 128), (3, 147), (100, 500)]


def listed(batch: Ragged, tile: ForwardTile, *, chosen: list[int] | None = None, target: int = 1,
           min_keys: int = 64, fixed_keys: int | None = None, num_sms: int = 3) -> Cut:  # fmt: skip
    """Of a step's sequences, or of those ``chosen``: all in tiles of queries, in about ``target``
    entries for each query head."""
    chosen = list(range(len(batch.keys))) if chosen is None else chosen
    num_q, num_kv = (
        x.numpy().astype(np.int64)[chosen] for x in (batch.meta.cu_q.diff(), batch.meta.kv_len)
    )
    cut = cut_rows(
        num_q, num_kv, group=1, tile=tile, target=target, min_keys=min_keys, fixed_keys=fixed_keys
    )
    return replace(cut, num_programs=num_sms)


def run(batch: Ragged, cut: Cut, *, seed: int = 0, counting: bool = True,
        chosen: list[int] | None = None) -> Tensor:  # fmt: skip
    """What ``cut`` lists, with K and V in the pages."""
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    (work,) = upload([cut], torch.device("cpu"))
    q, table = batch.q, batch.meta.block_table
    if chosen is not None:
        q, table = torch.cat([q[batch.rows(sequence)] for sequence in chosen]), table[chosen]
    meta = replace(batch.meta, block_table=table, counting=counting)
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    parts = simulated(seed).attend_tiles(
        q, batch.layer_kv, meta, work, scale=q.shape[2] ** -0.5, out=out
    )
    merged(work, parts, out)
    return out


def chunks(batch: Ragged, tile: ForwardTile, *, seed: int = 0, counting: bool = True,
           chosen: list[int] | None = None, **options: Any) -> Tensor:  # fmt: skip
    cut = listed(batch, tile, chosen=chosen, **options)
    return run(batch, cut, seed=seed, counting=counting, chosen=chosen)


@pytest.mark.parametrize("tile", [SMALL, KINDS["three"], KINDS["wide"]], ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 48, 64, 128, 256])
def test_pages(block_size: int, tile: ForwardTile) -> None:
    """K1, K2, K3, K15: stale pages hold NaN, stale entries of the table lie outside the pool."""
    batch = make_ragged(CHUNKS, block_size=block_size, dtype=torch.float16, tail=2**30)
    out = chunks(batch, tile, seed=block_size)
    assert (out.double() - batch.expected()).abs().max() <= 3e-3


@pytest.mark.parametrize("tile", [SMALL, KINDS["three"], KINDS["hardware"]], ids=str)
def test_counts_of_pages_are_what_was_visited(tile: ForwardTile) -> None:
    batch = make_ragged(CHUNKS, num_heads=6, kv_heads=2, dtype=torch.float16)
    uncounted = chunks(batch, tile, counting=False)
    assert not batch.meta.counts[:, : AttnMeta.KV_BYTES_WRITTEN].any()
    batch.meta.counts.zero_()
    assert torch.equal(chunks(batch, tile), uncounted)
    counts = batch.meta.counts
    pairs = [sum(range(num_kv - num_q + 1, num_kv + 1)) for num_q, num_kv in CHUNKS]
    assert counts[:, AttnMeta.PAIRS].tolist() == [6 * n for n in pairs]
    row = 2 * 64 * 2 * 2
    read = [row * num_kv if num_q else 0 for num_q, num_kv in CHUNKS]
    assert counts[:, AttnMeta.KV_BYTES_READ].tolist() == read


@pytest.mark.parametrize("tile", [SMALL, KINDS["three"], KINDS["hardware"], KINDS["lazy"]], ids=str)
def test_chunks_whose_keys_are_cut(tile: ForwardTile) -> None:
    """Parts of which some rows see nothing, of one tile of keys, and whole ones beside them."""
    batch = make_ragged(CHUNKS, dtype=torch.float16, tail=2**30)
    pairs = [sum(range(num_kv - num_q + 1, num_kv + 1)) for num_q, num_kv in CHUNKS]
    read = [2 * 64 * 2 * 2 * num_kv if num_q else 0 for num_q, num_kv in CHUNKS]
    for options in ({"target": 6}, {"target": 99}, {"fixed_keys": 128}):
        cut = listed(batch, tile, **options)
        assert len(cut.merges) and (cut.entries[:, 6] < 0).any()
        batch.meta.counts.zero_()
        out = run(batch, cut, seed=len(cut.entries))
        assert (out.double() - batch.expected()).abs().max() <= 3e-3
        assert batch.meta.counts[:, AttnMeta.PAIRS].tolist() == [6 * n for n in pairs]
        assert batch.meta.counts[:, AttnMeta.KV_BYTES_READ].tolist() == read


def test_room_of_a_list_and_the_number_of_programs_change_nothing() -> None:
    """A captured graph replays with capacities; what lies past the numbers is never read."""
    batch = make_ragged(CHUNKS, dtype=torch.float16)
    cut = listed(batch, SMALL, target=6)
    expected = run(batch, cut)
    junk = np.full((9, 8), 2**30, dtype=np.int32)
    roomy = replace(
        cut, entries=np.concatenate((cut.entries, junk)), num_partials=cut.num_partials + 3
    )
    for given in (roomy, replace(cut, num_programs=1), replace(roomy, num_programs=64)):
        assert torch.equal(run(batch, given, seed=given.num_programs), expected)
    nothing = make_ragged([(0, 9)], dtype=torch.float16)
    empty = listed(nothing, SMALL)
    assert run(nothing, empty).shape == run(nothing, replace(empty, entries=junk)).shape


def test_a_chunk_has_the_same_bits_alone_and_among_others() -> None:
    """K30: whole, and with fixed splits."""
    batch = make_ragged(CHUNKS, dtype=torch.float16)
    for fixed_keys in (None, 128):
        together = chunks(batch, SMALL, num_sms=5, fixed_keys=fixed_keys)
        for sequence in (0, 4, 6):
            alone = chunks(batch, SMALL, chosen=[sequence], fixed_keys=fixed_keys)
            assert torch.equal(alone, together[batch.rows(sequence)])


def test_queries_of_a_fused_projection_over_pages() -> None:
    """K24; rows or heads that the copy engine cannot take are copied."""
    batch = make_ragged(CHUNKS, dtype=torch.float16)
    expected, plain = chunks(batch, SMALL), batch.q
    for width, start in ((640, 128), (384 + 4, 0), (384 + 4, 4)):
        fused = torch.full((len(plain), width), torch.nan, dtype=plain.dtype)
        batch.q = fused[:, start : start + 384].view(-1, 6, 64)
        batch.q.copy_(plain)
        assert torch.equal(chunks(batch, SMALL), expected), (width, start)


def test_a_step_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, a few queries and chunks in one step: each list by its kernel, each row once."""
    lengths = [(1, 90), (70, 200), (0, 9), (16, 77), (17, 33), (128, 300), (1, 1)]
    batch = make_ragged(lengths, num_heads=8, kv_heads=2, dtype=torch.float16)
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    num_q, num_kv = (np.array([pair[i] for pair in lengths]) for i in (0, 1))
    tiles = (HopperTile(16, 64, 2, per_sm=1), HopperTile(64, 32, 3, per_sm=1),
             TritonTile(128, 64, 8, 3), SMALL)  # fmt: skip
    work = upload(
        cut_step(num_q, num_kv, group=4, kv_heads=2, tiles=tiles, num_sms=16), torch.device("cpu")
    )
    assert [each.tile for each in work] == list(tiles)
    exact = batch.expected()
    plain = batch.rows(4)  # 68 rows of 17 queries: that kernel is tested in Triton's interpreter

    def merging(parts: Any) -> Any:
        def attend(q: Tensor, layer_kv: Any, meta: Any, work: Any, *, scale: float, out: Tensor,
                   ) -> None:  # fmt: skip
            merged(work, parts(q, layer_kv, meta, work, scale=scale, out=out), out)

        return attend

    def attend_cut(*args: Any, out: Tensor, **options: Any) -> None:
        assert args[3].entries[: int(args[3].numbers[0]), 7].unique().tolist() == [4]
        out[plain] = exact[plain].half()

    decode = load("hopper_decode").attend_entries
    monkeypatch.setattr(hopper_decode, "attend_short", merging(decode))
    monkeypatch.setattr(hopper_forward, "attend_chunks", merging(simulated(0).attend_tiles))
    monkeypatch.setattr(triton_paged, "attend_cut", attend_cut)
    out = torch.full_like(batch.q, torch.nan)
    attend_paged(batch.q, batch.layer_kv, replace(batch.meta, work=work), scale=0.125, out=out)
    assert (out.double() - exact).abs().max() <= 3e-3


def test_pages_of_wide_heads_and_ids_outside_the_pool() -> None:
    """K4: clamped, as the plain kernel does."""
    batch = make_ragged([(70, 200)], num_heads=4, kv_heads=1, head_dim=80, dtype=torch.float16)
    tile = forward_tile(80, causal=True, window=(-1, -1))
    assert (chunks(batch, tile).double() - batch.expected()).abs().max() <= 3e-3
    batch.layer_kv.k.nan_to_num_(), batch.layer_kv.v.nan_to_num_()
    num_blocks = len(batch.layer_kv.k)
    for outside, inside in ((num_blocks + 5, num_blocks - 1), (2**31 - 1, num_blocks - 1), (-9, 0)):
        slots = batch.meta.slots.clone()
        batch.meta.block_table[0, 1] = inside
        expected = chunks(batch, tile)
        batch.meta.block_table[0, 1] = outside
        assert torch.equal(chunks(batch, tile), expected) and torch.equal(batch.meta.slots, slots)


def test_a_pool_is_described_once_and_as_decodes_do() -> None:
    batch = make_ragged([(128, 300)], dtype=torch.float16)
    chunks(batch, SMALL)
    (made,) = batch.layer_kv.boxes.values()
    chunks(batch, SMALL)
    assert list(batch.layer_kv.boxes.values()) == [made]
    for keys in (8, 16, 32, 64, 128):
        for head_block in (64, 128, 256):
            assert box_layout(keys, head_block, torch.float16) == hopper_forward.PAGES


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

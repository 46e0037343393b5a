"""How steps are cut: every visible pair in exactly one entry, partial results in one merge."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stairs.attention.hopper import ForwardTile, forward_tile
from stairs.attention.tiles import (
    CARDS,
    HopperTile,
    TritonTile,
    flash_tile,
    hopper_tiles,
    paged_tiles,
)
from stairs.attention.work import (
    ENTRY_FIELDS,
    FEWEST_QUERIES,
    Cut,
    Tiles,
    cut_step,
    upload,
)

SHORT, TALL = TritonTile(16, 32, 4, 3, per_sm=2), TritonTile(64, 32, 8, 3)
HOPPER = (HopperTile(16, 32, 3, 2), HopperTile(64, 32, 3, 2), TALL)
CHUNKED = (*HOPPER, ForwardTile(32, 2, 1, 240))
HEADS = [(32, 8, 128), (32, 32, 128), (64, 8, 128), (9, 3, 64), (12, 12, 64), (32, 1, 128)]
EQUAL = [(1, 8192), (1, 32768), (8, 8192), (32, 2048), (32, 8192), (128, 1024), (128, 4096),
         (256, 1024)]  # fmt: skip
MIXED = np.geomspace(17, 16384, 64).astype(int).tolist()

lengths = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 700)).map(lambda x: (min(x), max(x))),
    max_size=8,
)


def parts(one: Cut, group: int) -> Iterator[tuple[int, int, int, int, slice, slice]]:
    """Seat, token, num_q, num_kv, rows and keys of each entry that holds something."""
    each = 1 if isinstance(one.tile, ForwardTile) else group  # whose rows are one query head's
    for entry in one.entries.tolist():
        named = dict(zip(ENTRY_FIELDS, entry, strict=True))
        if not named["num_q"]:
            assert one.starts is not None, "a persistent program with nothing to do"
            continue
        rows = slice(named["row"] * group // each, (named["row"] + one.tile.rows) * group // each)
        keys = slice(named["first_key"], named["last_key"])
        yield named["seat"], named["token"], named["num_q"], named["num_kv"], rows, keys


def cut(step: list[tuple[int, int]], group: int, **options: object) -> list[Cut]:
    num_q, num_kv = (np.array([s[i] for s in step], dtype=np.int64) for i in range(2))
    defaults = {"kv_heads": 2, "tiles": (SHORT, TALL), "num_sms": 10}
    return cut_step(num_q, num_kv, group=group, **(defaults | options))  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    lengths,
    st.sampled_from([1, 3, 4, 32]),
    st.sampled_from([None, 64]),
    st.sampled_from([(SHORT, TALL), HOPPER, CHUNKED]),
)
def test_every_row_s_keys_are_covered_once(
    step: list[tuple[int, int]], group: int, fixed: int | None, tiles: Tiles
) -> None:
    seen = [np.zeros((num_q * group, num_kv), dtype=np.int64) for num_q, num_kv in step]
    for one in cut(step, group, fixed_keys=fixed, tiles=tiles):
        for seat, token, num_q, num_kv, rows, keys in parts(one, group):
            assert (num_q, num_kv) == step[seat]
            assert token == sum(q for q, _ in step[:seat])
            assert keys.stop <= num_kv
            seen[seat][rows, keys] += 1
    for counts, (num_q, num_kv) in zip(seen, step, strict=True):
        rows = np.arange(num_q * group)[:, None] // group
        visible = np.arange(num_kv) <= num_kv - num_q + rows
        assert (counts[visible] == 1).all()
        assert counts.max(initial=0) <= 1


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([1, 4]), st.sampled_from([(SHORT, TALL), HOPPER, CHUNKED]))
def test_every_partial_has_one_writer_and_one_merge(
    step: list[tuple[int, int]], group: int, tiles: Tiles
) -> None:
    for one in cut(step, group, tiles=tiles):
        written = sorted(p for p in one.entries[:, 6].tolist() if p >= 0)
        merged = [
            partial
            for _, _, _, first, count, *_ in one.merges.tolist()
            for partial in range(first, first + count)
        ]
        assert written == sorted(merged) == list(range(one.num_partials))
        assert one.most_partials == max((m[4] for m in one.merges.tolist()), default=0)
        each = 1 if isinstance(one.tile, ForwardTile) else group
        rows = [min(m[1] * each - m[2], one.tile.rows) for m in one.merges.tolist()]
        assert one.most_rows == max(rows, default=0)
        assert one.numbers.tolist() == [len(one.entries), len(one.merges)]


def test_a_lone_long_sequence_fills_the_card_and_many_short_ones_are_left_whole() -> None:
    (alone,) = cut([(1, 32768)], 4, num_sms=132)
    assert 100 <= len(alone.entries) <= 132
    assert alone.entries[:, 5].max() == 32768
    (many,) = cut([(1, 1024)] * 256, 4, num_sms=132)
    assert len(many.entries) == 256 and not len(many.merges)


def test_one_long_among_many_is_split() -> None:
    (mixed,) = cut([(1, 64)] * 63 + [(1, 16384)], 4, num_sms=132)
    assert mixed.merges[:, 4].tolist() and mixed.merges[0, 4] > 20
    assert (np.diff(mixed.entries[:, 4] - mixed.entries[:, 5]) >= 0).all(), "longest first"


def test_fixed_splits_end_at_multiples() -> None:
    (one,) = cut([(1, 1000), (1, 130)], 4, fixed_keys=256)
    assert set(one.entries[:, 4].tolist()) == {0, 256, 512, 768}


def spread(one: Cut, kv_heads: int, num_sms: int) -> float:
    """Keys of the busiest place of the card over the mean. Entries with programs of their own go
    where the least has been done, as the card's scheduler puts them."""
    keys = one.entries[:, 5] - one.entries[:, 4]
    if one.starts is not None:
        ends = zip(one.starts[:-1].tolist(), one.starts[1:].tolist(), strict=True)
        done = [int(keys[c]) + int(keys[a:b].sum()) for c, (a, b) in enumerate(ends)]
    else:
        done = [0] * (num_sms * one.tile.per_sm)
        for entry in np.repeat(keys, kv_heads).tolist():
            heapq.heapreplace(done, done[0] + entry)
    return max(done) / (sum(done) / len(done))


@pytest.mark.parametrize("kind", ["triton", "hopper"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_mixed_batch_is_spread_evenly(heads: tuple[int, int, int], kind: str) -> None:
    num_heads, kv_heads, head_dim = heads
    group = num_heads // kv_heads
    tiles: Tiles = paged_tiles(head_dim, group, itemsize=2, card=CARDS[90])
    if kind == "hopper":
        tiles = (*hopper_tiles(head_dim, group), tiles[1])
    options = {"kv_heads": kv_heads, "num_sms": 132, "tiles": tiles}
    (mixed,) = cut([(1, num_kv) for num_kv in MIXED], group, **options)
    assert spread(mixed, kv_heads, 132) < (1.25 if kind == "triton" else 1.2)
    if kind == "hopper":
        for batch, num_kv in EQUAL[2:]:
            (equal,) = cut([(1, num_kv)] * batch, group, **options)
            assert spread(equal, kv_heads, 132) < 1.13  # one tile more than others is 1/8 here


def test_persistent_programs_do_not_split_what_is_even() -> None:
    tiles = (HopperTile(16, 64, 3, 2), HopperTile(64, 64, 3, 2), TALL)
    for batch, num_merges in ((32, 0), (8, 8)):  # 33 programs
        (one,) = cut([(1, 2048)] * batch, 4, kv_heads=8, num_sms=132, tiles=tiles)
        assert one.starts is not None and len(one.starts) == 34
        assert len(one.merges) == num_merges
    assert one.num_partials <= 2 * 33


def test_persistent_programs_of_a_lone_sequence() -> None:
    """Not a piece shorter than asked for, not more parts than a merge reads well."""
    tiles = (*hopper_tiles(128, 32), TALL)
    for num_kv, most in ((1024, 8), (32768, 128), (131072, 128)):
        (one,) = cut([(1, num_kv)], 32, kv_heads=1, num_sms=132, tiles=tiles)
        assert one.most_partials == most
        assert (one.entries[:most, 5] - one.entries[:most, 4] == num_kv // most).all()


def test_rows_take_the_first_tile_that_holds_them() -> None:
    cuts = cut([(1, 50), (4, 50), (5, 50), (16, 50), (17, 50)], 4, tiles=HOPPER)
    assert [(one.tile.rows, len(set(one.entries[one.entries[:, 1] > 0, 7]))) for one in cuts] == [
        (16, 2), (64, 2), (64, 1)
    ]  # fmt: skip
    assert [one.tile for one in cuts] == list(HOPPER)


@pytest.mark.parametrize("group", [1, 4, 32])
def test_many_queries_take_tiles_of_queries_whatever_else_is_there(group: int) -> None:
    """Few queries of many heads keep a tile that holds all heads' rows."""
    step = [(num_q, 2000) for num_q in (1, 16, 17, 64, FEWEST_QUERIES - 1, FEWEST_QUERIES, 512)]

    def kinds(step: list[tuple[int, int]]) -> dict[int, type]:
        return {
            num_q: type(one.tile)
            for one in cut(step, group, tiles=CHUNKED)
            for _, _, num_q, *_ in parts(one, group)
        }

    together = kinds(step)
    for num_q, num_kv in step:
        assert kinds([(num_q, num_kv)])[num_q] == together[num_q]
        short = HopperTile if num_q * group <= 64 else TritonTile
        assert together[num_q] == (ForwardTile if num_q >= FEWEST_QUERIES else short)


def test_chunks_fill_the_card_and_their_longest_pieces_come_first() -> None:
    """Entries of all query heads, taken in turn, there and back, by as many programs as SMs."""
    tile = forward_tile(128, causal=True, window=(-1, -1))
    steps = ([(512, 4096), (128, 900), (300, 300), (512, 512), (100, 7000)], [(512, 32768)],
             [(128, num_kv) for num_kv in (300, 2000, 9000, 30000)])  # fmt: skip
    for step in steps:
        for kv_heads in (1, 2, 3, 8):
            heads = 4 * kv_heads
            (one,) = cut(step, 4, tiles=(*hopper_tiles(128, 4), TALL, tile), num_sms=132,
                         kv_heads=kv_heads)  # fmt: skip
            keys = one.entries[:, 5] - one.entries[:, 4]
            assert (np.diff(keys) <= 0).all() and one.num_programs == 132
            done = np.zeros(132)
            for place, length in enumerate(np.repeat(keys, heads).tolist()):
                turn, program = divmod(place, 132)
                done[program if turn % 2 == 0 else 131 - program] += length
            assert done.max() <= 1.7 * done.mean(), (step, heads)


def test_a_chunk_is_not_cut_where_heads_fill_the_card() -> None:
    tile = forward_tile(128, causal=True, window=(-1, -1))
    for step in ([(512, 32768)], [(128, 1000)] * 4, [(512, 512)]):
        (one,) = cut(step, 4, tiles=(TALL, tile), num_sms=132, kv_heads=8)
        assert len(one.entries) == 4 and not len(one.merges)


def test_upload_keeps_what_was_cut() -> None:
    cuts = cut([(1, 3000), (40, 90), (5, 800), (80, 99)], 4, tiles=CHUNKED)
    assert [one.tile for one in cuts] == list(CHUNKED)
    assert upload([], torch.device("cpu")) == ()
    for work, one in zip(upload(cuts, torch.device("cpu")), cuts, strict=True):
        assert np.array_equal(work.entries.numpy(), one.entries)
        assert np.array_equal(work.merges.numpy(), one.merges)
        assert work.numbers.tolist()[:2] == one.numbers.tolist()
        assert work.starts.tolist() == ([] if one.starts is None else one.starts.tolist())
        assert (work.tile, work.num_programs) == (one.tile, one.num_programs)
        assert work.entries.data_ptr() % 16 == work.numbers.data_ptr() % 16 == 0


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 256])
def test_queries_and_one_stage_fit_every_card(capability: int, head_dim: int) -> None:
    card = CARDS[capability]
    padded = max(16, 1 << (head_dim - 1).bit_length())
    for itemsize in (2, 4):
        tiles = [
            *paged_tiles(head_dim, 4, itemsize=itemsize, card=card),
            flash_tile(head_dim, causal=True, num_q=4096, itemsize=itemsize, card=card),
        ]
        for tile in tiles:
            assert (tile.rows + 2 * tile.keys) * padded * itemsize <= card.shared

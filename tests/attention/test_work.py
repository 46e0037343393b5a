"""How steps are cut: every visible pair in exactly one entry, partial results in one merge."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stairs.attention.tiles import CARDS, TritonTile, flash_tile, paged_tiles
from stairs.attention.work import Cut, cut_step, upload

SHORT, TALL = TritonTile(16, 32, 4, 3, per_sm=2), TritonTile(64, 32, 8, 3)

lengths = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 700)).map(lambda x: (min(x), max(x))),
    max_size=8,
)


def cut(step: list[tuple[int, int]], group: int, **options: object) -> list[Cut]:
    num_q, num_kv = (np.array([s[i] for s in step], dtype=np.int64) for i in range(2))
    defaults = {"kv_heads": 2, "tiles": (SHORT, TALL), "num_sms": 10}
    return cut_step(num_q, num_kv, group=group, **(defaults | options))  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([1, 3, 4, 32]), st.sampled_from([None, 64]))
def test_every_row_s_keys_are_covered_once(
    step: list[tuple[int, int]], group: int, fixed: int | None
) -> None:
    seen: Counter[tuple[int, int, int]] = Counter()  # (sequence, row, key)
    for one in cut(step, group, fixed_keys=fixed):
        for token, num_q, num_kv, row, first, last, _, seat in one.entries.tolist():
            assert (num_q, num_kv) == step[seat]
            assert token == sum(q for q, _ in step[:seat])
            for r in range(row, min(row + one.tile.rows, num_q * group)):
                visible = num_kv - num_q + r // group + 1
                for key in range(first, min(last, visible)):
                    seen[seat, r, key] += 1
    expected = {
        (s, row, key)
        for s, (num_q, num_kv) in enumerate(step)
        for row in range(num_q * group)
        for key in range(num_kv - num_q + row // group + 1)
    }
    assert set(seen) == expected
    assert set(seen.values()) <= {1}


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([1, 4]))
def test_every_partial_has_one_writer_and_one_merge(
    step: list[tuple[int, int]], group: int
) -> None:
    for one in cut(step, group):
        written = sorted(p for p in one.entries[:, 6].tolist() if p >= 0)
        merged = [
            partial
            for _, _, _, first, count, *_ in one.merges.tolist()
            for partial in range(first, first + count)
        ]
        assert written == sorted(merged) == list(range(one.num_partials))
        assert one.most_partials == max((m[4] for m in one.merges.tolist()), default=0)
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


def test_upload_keeps_what_was_cut() -> None:
    cuts = cut([(1, 3000), (40, 90)], 4)
    assert upload([], torch.device("cpu")) == ()
    for work, one in zip(upload(cuts, torch.device("cpu")), cuts, strict=True):
        assert np.array_equal(work.entries.numpy(), one.entries)
        assert np.array_equal(work.merges.numpy(), one.merges)
        assert work.numbers.tolist()[:2] == one.numbers.tolist()
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

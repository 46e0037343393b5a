"""The planner's bound on partial results, against steps as they are cut and tensors as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stairs.attention import devices
from stairs.attention.hopper import ForwardTile, forward_tile
from stairs.attention.tiles import CARDS, HopperTile, TritonTile, hopper_tiles, paged_tiles
from stairs.attention.work import Cut, Tiles, cut_step, upload
from stairs.attention.workspace import engine_tiles, partial_bytes, workspace_bytes

HEADS = [(32, 8, 128), (32, 32, 128), (64, 8, 128), (9, 3, 64), (12, 12, 64), (32, 1, 128),
         (8, 2, 256), (96, 1, 64), (6, 2, 40)]  # fmt: skip
# Few keys and many programs: pieces of a tile each. Many rows of few queries: several tiles.
SMALL = (HopperTile(16, 16, 3, 3, 16), HopperTile(64, 32, 3, 2, 32), TritonTile(128, 16, 8, 3))
lengths = st.integers(1, 40_000) | st.integers(1, 300)
steps = st.tuples(
    st.lists(lengths.map(lambda keys: (1, keys)), max_size=40),
    st.lists(st.tuples(st.integers(1, 400), lengths).map(lambda x: (x[0], sum(x))), max_size=4),
).map(lambda x: x[0] + x[1])


def bound(step: list[tuple[int, int]], heads: tuple[int, int, int], num_sms: int, tiles: Tiles,
          ) -> int:  # fmt: skip
    """Of an engine whose largest step this is."""
    num_heads, kv_heads, head_dim = heads
    return workspace_bytes(
        tiles, num_seqs=len(step), num_tokens=sum(num_q for num_q, _ in step),
        num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim, num_sms=num_sms,
    )  # fmt: skip


def cuts(step: list[tuple[int, int]], heads: tuple[int, int, int], num_sms: int, tiles: Tiles,
         ) -> list[Cut]:  # fmt: skip
    num_q, num_kv = (np.array([s[i] for s in step], dtype=np.int64) for i in range(2))
    group = heads[0] // heads[1]
    return cut_step(
        num_q, num_kv, group=group, kv_heads=heads[1], tiles=tiles, num_sms=num_sms
    )  # fmt: skip


def held(cut: Cut, heads: tuple[int, int, int]) -> int:
    num_heads, kv_heads, head_dim = heads
    each = num_heads if isinstance(cut.tile, ForwardTile) else kv_heads
    return cut.num_partials * cut.tile.rows * each * (head_dim + 1) * 4


@settings(max_examples=300, deadline=None)
@given(steps, st.sampled_from(HEADS), st.sampled_from([1, 7, 58, 132]), st.integers(0, 2))
def test_no_step_exceeds_the_bound(
    step: list[tuple[int, int]], heads: tuple[int, int, int], num_sms: int, kind: int
) -> None:
    num_heads, kv_heads, head_dim = heads
    group = num_heads // kv_heads
    plain: Tiles = paged_tiles(head_dim, group, itemsize=2, card=CARDS[90])
    chunks = forward_tile(head_dim, causal=True, window=(-1, -1))
    tiles = (plain, (*hopper_tiles(head_dim, group), plain[-1], chunks), SMALL)[kind]
    most = bound(step, heads, num_sms, tiles)
    for cut in cuts(step, heads, num_sms, tiles):
        assert held(cut, heads) <= most


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_bound_is_less_than_twice_what_happens(heads: tuple[int, int, int]) -> None:
    num_heads, kv_heads, head_dim = heads
    tiles: Tiles = paged_tiles(head_dim, num_heads // kv_heads, itemsize=2, card=CARDS[90])[:1]
    most = bound([(1, 1)] * 400, heads, 132, tiles)
    batches = ([(1, num_kv)] * batch for batch in range(1, 400) for num_kv in (700, 40_000))
    assert max(held(cut, heads) for step in batches for cut in cuts(step, heads, 132, tiles)) > (
        most / 2
    )
    (alone,) = cuts([(1, 1_000_000)], heads, 132, tiles)
    assert held(alone, heads) > 0.97 * bound([(1, 1_000_000)], heads, 132, tiles)


def test_the_bound_counts_the_tensors_that_are_allocated() -> None:
    paged = pytest.importorskip("stairs.attention.triton_paged")
    heads = (32, 8, 128)
    tiles: Tiles = (*hopper_tiles(128, 4), paged_tiles(128, 4, itemsize=2, card=CARDS[90])[1])
    found = cuts([(1, 5000), (1, 90_000), (200, 30_000)], heads, 132, tiles)
    assert len(found) == 2
    for work in upload(found, torch.device("cpu")):
        assert work.num_partials
        q = torch.empty(202, 32, 128, dtype=torch.bfloat16)
        own = sum(part.nbytes for part in paged.partials(q, work, 8))
        assert own == partial_bytes(
            work.num_partials, rows=work.tile.rows, kv_heads=8, head_dim=128
        )


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("capability", [80, 90])
def test_the_planner_knows_every_tile_that_an_engine_takes(
    heads: tuple[int, int, int], capability: int, implementation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    card = CARDS[capability]
    if implementation == "hopper" and capability != 90:
        return
    monkeypatch.setattr(devices, "card_of", lambda device: card)
    num_heads, kv_heads, head_dim = heads
    cutter = devices.cutter_for(
        num_heads, kv_heads, head_dim, dtype=torch.bfloat16, device=torch.device("cpu"),
        implementation=implementation,
    )  # fmt: skip
    known = engine_tiles(head_dim, num_heads // kv_heads, itemsize=2, card=card)
    assert set(cutter.tiles) <= set(known)


def test_nothing_is_cut_where_a_head_has_one_program_or_no_kernel_runs() -> None:
    assert bound([(1, 90_000)], (64, 64, 128), 58, (TritonTile(16, 64, 4, 5),)) == 0
    assert engine_tiles(512, 1, itemsize=2, card=CARDS[90]) == ()
    assert bound([(1, 90_000)], (4, 4, 512), 132, ()) == 0

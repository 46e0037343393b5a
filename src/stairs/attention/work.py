"""A step cut into the pieces that GPU programs run: numpy, built while the step is scheduled.

A row is a (query, query head of one kv head) pair: query i and head g of the group is row
i * group + g. An *entry* is one tile of rows over one range of keys, run once for each kv head.
Where a tile's keys are cut in several entries each writes a partial (O, LSE), and a *merge*
joins them. Sequences with few rows take tiles of 16 to 64 rows, the others tall ones; where the
kernel has tiles of one query head's queries, those with many queries take these: for them every
query head is a kv head of its own, with a group of one.

Every array can be padded to a fixed capacity (a captured graph replays with other contents):
programs past the numbers in ``Cut.numbers`` do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from stairs.attention.hopper import ForwardTile
from stairs.attention.meta import WorkList
from stairs.attention.shares import dealt, pieces
from stairs.attention.tiles import HopperTile, TritonTile, for_load
from stairs.attention.workspace import PagedTile, num_places

__all__ = [
    "ENTRY_FIELDS",
    "FEWEST_QUERIES",
    "MERGE_FIELDS",
    "Cut",
    "Cutter",
    "Tiles",
    "cut_programs",
    "cut_rows",
    "cut_step",
    "upload",
]

Ints = NDArray[np.int32]
# By rows: each takes what fits in none before. A ForwardTile is the last, and takes its own.
Tiles = tuple[PagedTile, ...]

# Of a sequence in a ForwardTile: a tile of 128 queries of one head costs the same however few they
# are, and one of 128 rows of all heads of a group holds more of few. To be measured.
FEWEST_QUERIES = 65
MIN_SPLIT = 128  # keys: below this a merge costs more than the split saves
MIN_CHUNK_SPLIT = 512  # the same where a part's rows are as many as 128 keys. To be measured.

# token: the sequence's first row of q; row: the tile's first; keys first_key .. last_key of
# ``num_kv``; partial: where it goes, -1 for straight to the output; seat: row of the block table.
ENTRY_FIELDS = ("token", "num_q", "num_kv", "row", "first_key", "last_key", "partial", "seat")
MERGE_FIELDS = ("token", "num_q", "row", "partial", "num_partials", "unused", "unused", "unused")


@dataclass(frozen=True, slots=True)
class Cut:
    """Entries and merges of the sequences that take ``tile``."""

    tile: PagedTile
    entries: Ints  # (W, 8)
    merges: Ints  # (M, 8)
    numbers: Ints  # (2,)  how many of W and of M hold something
    num_partials: int
    most_partials: int  # of one merge
    most_rows: int  # of one merge
    starts: Ints | None = None  # (C+1,)  of C programs, see cut_programs
    num_programs: int = 0  # of a ForwardTile: that take entries x query heads in turn


def cut_rows(
    num_q: NDArray[np.int64],
    num_kv: NDArray[np.int64],
    *,
    group: int,
    tile: TritonTile | ForwardTile,
    target: int,
    min_keys: int,
    fixed_keys: int | None = None,
    seats: Sequence[int] | NDArray[np.int64] | None = None,
    tokens: NDArray[np.int64] | None = None,
) -> Cut:
    """Cut sequences of ``num_q`` queries and ``num_kv`` keys (S,) into about ``target`` entries.

    Splits of at least ``min_keys`` keys, in multiples of the tile's, equal within a tile.
    ``fixed_keys``: every split ends at a multiple of it, whatever else is in the batch, so that a
    row's order of summation depends on its own sequence alone. ``seats`` and ``tokens``: where
    the sequences stand in the step, when they are a selection of it.
    """
    tile_rows, key_step = tile.rows, tile.keys
    assert fixed_keys is None or isinstance(tile, TritonTile) or fixed_keys % key_step == 0
    if tokens is None:
        tokens = np.cumsum(num_q) - num_q
    seats = np.arange(len(num_q)) if seats is None else np.asarray(seats)
    tiles = -(-(num_q * group) // tile_rows)
    sequence = np.repeat(np.arange(len(num_q)), tiles)
    row = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    # The last query of the tile sees the most keys; a tile above the staircase sees none.
    last_query = np.minimum(row + tile_rows, num_q[sequence] * group) - 1
    keys = np.maximum((num_kv - num_q)[sequence] + last_query // group + 1, 0)
    size = _split_size(keys, key_step, target, min_keys) if fixed_keys is None else fixed_keys
    splits = np.maximum(-(-keys // size), 1)
    if fixed_keys is None:  # equal parts rather than full ones and a rest
        parts = -(-keys // splits)
        each = np.maximum(-(-parts // key_step) * key_step, key_step)
        splits = np.maximum(-(-keys // each), 1)
    else:
        each = np.full(len(keys), size)

    owner = np.repeat(np.arange(len(sequence)), splits)  # the tile of each entry
    part = np.arange(len(owner)) - np.repeat(np.cumsum(splits) - splits, splits)
    first = part * each[owner]
    last = np.minimum(first + each[owner], keys[owner])
    entries, merges = _rows(
        num_q[sequence],
        num_kv[sequence],
        row,
        tokens[sequence],
        seats[sequence],
        owner,
        first,
        last,
    )
    # Longest first: what starts last then ends soon.
    entries = entries[np.argsort(entries[:, 4] - entries[:, 5], kind="stable")]
    return _cut(tile, group, entries, merges)


def _rows(
    num_q: NDArray[np.int64],
    num_kv: NDArray[np.int64],
    row: NDArray[np.int64],
    token: NDArray[np.int64],
    seat: NDArray[np.int64],
    owner: NDArray[np.int64],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
) -> tuple[Ints, Ints]:
    """Entries and merges of tiles of rows (R,), whose keys are cut in pieces (W,): the tile
    ``owner`` of each, in order, and its keys."""
    splits = np.bincount(owner, minlength=len(row))
    part = np.arange(len(owner)) - np.repeat(np.cumsum(splits) - splits, splits)
    partials = np.where(splits > 1, splits, 0)
    partial = np.cumsum(partials) - partials
    entries = np.empty((len(owner), len(ENTRY_FIELDS)), dtype=np.int32)
    entries[:, 0] = token[owner]
    entries[:, 1] = num_q[owner]
    entries[:, 2] = num_kv[owner]
    entries[:, 3] = row[owner]
    entries[:, 4] = first
    entries[:, 5] = last
    entries[:, 6] = np.where(splits[owner] > 1, partial[owner] + part, -1)
    entries[:, 7] = seat[owner]
    split = np.flatnonzero(splits > 1)
    merges = np.zeros((len(split), len(MERGE_FIELDS)), dtype=np.int32)
    merges[:, 0] = token[split]
    merges[:, 1] = num_q[split]
    merges[:, 2] = row[split]
    merges[:, 3] = partial[split]
    merges[:, 4] = splits[split]
    return entries, merges


def _cut(
    tile: PagedTile, group: int, entries: Ints, merges: Ints,
    starts: Ints | None = None,
) -> Cut:  # fmt: skip
    rows = np.minimum(merges[:, 1] * group - merges[:, 2], tile.rows)
    return Cut(
        tile=tile,
        entries=entries,
        merges=merges,
        numbers=np.array((len(entries), len(merges)), dtype=np.int32),
        num_partials=int(merges[:, 4].sum()),
        most_partials=int(merges[:, 4].max(initial=0)),
        most_rows=int(rows.max(initial=0)),
        starts=starts,
    )


def _split_size(keys: NDArray[np.int64], key_step: int, target: int, min_keys: int) -> int:
    """Keys a split may hold so that there are about ``target`` of them; what is shorter from the
    start counts by its length, because several run one after the other beside a longer one."""
    size = max(-(-int(keys.sum()) // max(target, 1)), min_keys, key_step)
    size = -(-size // key_step) * key_step
    for _ in range(4):
        count = float(np.where(keys > size, -(-keys // size), keys / size).sum())
        if count <= target:
            break
        size = -(-int(size * count) // (target * key_step)) * key_step
    return size


def cut_programs(
    num_q: NDArray[np.int64],
    num_kv: NDArray[np.int64],
    *,
    group: int,
    tile: HopperTile,
    num_programs: int,
    fixed_keys: int | None = None,
    seats: NDArray[np.int64] | None = None,
    tokens: NDArray[np.int64] | None = None,
) -> Cut:
    """Sequences (S,) of one tile of rows each, dealt to C = ``num_programs`` that run at once.

    Program c runs entry c, empty where it has none, then entries starts[c] .. starts[c + 1].
    ``fixed_keys``, ``seats``, ``tokens``: as for ``cut_rows``.
    """
    if tokens is None:
        tokens = np.cumsum(num_q) - num_q
    seats = np.arange(len(num_q)) if seats is None else np.asarray(seats)
    assert (num_q * group <= tile.rows).all()
    assert fixed_keys is None or fixed_keys % tile.keys == 0  # entries begin with a tile
    tiles = -(-num_kv // tile.keys)
    if fixed_keys is None:
        owner, first, program = pieces(
            tiles,
            num_programs,
            -(-tile.min_keys // tile.keys),
            merge_cost=tile.min_keys / tile.keys,
        )
        first = first * tile.keys
    else:
        splits = np.maximum(-(-num_kv // fixed_keys), 1)
        owner = np.repeat(np.arange(len(num_kv)), splits)
        first = (np.arange(len(owner)) - np.repeat(np.cumsum(splits) - splits, splits)) * fixed_keys
        program = dealt(np.minimum(num_kv[owner] - first, fixed_keys), num_programs)
    ends = np.append(owner[1:] != owner[:-1], True)
    last = np.where(ends, num_kv[owner], np.append(first[1:], 0))
    each, merges = _rows(
        num_q, num_kv, np.zeros(len(num_q), np.int64), tokens, seats, owner, first, last
    )
    order = np.argsort(program, kind="stable")
    program = program[order]
    leads = np.append(True, program[1:] != program[:-1])
    entries = np.zeros((num_programs + len(order) - int(leads.sum()), 8), dtype=np.int32)
    entries[:num_programs, 6] = -1
    entries[program[leads]] = each[order[leads]]
    entries[num_programs:] = each[order[~leads]]
    more = np.bincount(program[~leads], minlength=num_programs)
    starts = num_programs + np.append(0, np.cumsum(more))
    return _cut(tile, group, entries, merges, starts.astype(np.int32))


def cut_step(
    num_q: NDArray[np.int64],
    num_kv: NDArray[np.int64],
    *,
    group: int,
    kv_heads: int,
    tiles: Tiles,
    num_sms: int,
    fixed_keys: int | None = None,
) -> list[Cut]:
    """The step's sequences, each in the first of ``tiles`` that holds its rows, or in pieces in
    the last; lists that would be empty are left out."""
    tokens = np.cumsum(num_q) - num_q
    is_fixed = fixed_keys is not None
    tiles = for_load(tiles, math.inf if is_fixed else int(num_kv.sum()) * kv_heads / num_sms)
    chosen = _chosen(num_q, group, tiles)
    cuts = []
    for index, tile in enumerate(tiles):
        seats = np.flatnonzero(chosen == index)
        if not len(seats):
            continue
        if isinstance(tile, ForwardTile):
            cut = cut_rows(
                num_q[seats], num_kv[seats], group=1, tile=tile,
                target=num_places(tile, kv_heads=kv_heads * group, num_sms=num_sms),
                min_keys=MIN_CHUNK_SPLIT, fixed_keys=fixed_keys, seats=seats,
                tokens=tokens[seats],
            )  # fmt: skip
            cut = replace(cut, num_programs=num_sms)
        elif isinstance(tile, HopperTile):
            cut = cut_programs(
                num_q[seats], num_kv[seats], group=group, tile=tile,
                num_programs=num_places(tile, kv_heads=kv_heads, num_sms=num_sms),
                fixed_keys=fixed_keys, seats=seats, tokens=tokens[seats],
            )  # fmt: skip
        else:
            cut = cut_rows(
                num_q[seats], num_kv[seats], group=group, tile=tile,
                target=num_places(tile, kv_heads=kv_heads, num_sms=num_sms),
                min_keys=MIN_SPLIT, fixed_keys=fixed_keys, seats=seats, tokens=tokens[seats],
            )  # fmt: skip
        cuts.append(cut)
    return cuts


def _chosen(num_q: NDArray[np.int64], group: int, tiles: Tiles) -> NDArray[np.int64]:
    """Which of ``tiles`` each sequence (S,) takes, -1 without queries. By its own queries alone,
    so that its bits do not depend on what else is in the step."""
    by_rows = tiles[:-1] if isinstance(tiles[-1], ForwardTile) else tiles
    chosen = np.searchsorted([tile.rows for tile in by_rows[:-1]], num_q * group)
    if len(by_rows) < len(tiles):
        is_chunk = (chosen == len(by_rows) - 1) & (num_q >= FEWEST_QUERIES)
        chosen = np.where(is_chunk, len(by_rows), chosen)
    return np.where(num_q > 0, chosen, -1)


@dataclass(frozen=True, slots=True)
class Cutter:
    """How one model's steps are cut on one card."""

    group: int
    kv_heads: int
    tiles: Tiles
    num_sms: int
    device: torch.device
    fixed_keys: int | None = None  # of a split, whatever is in the batch

    def __call__(self, num_q: NDArray[np.int64], num_kv: NDArray[np.int64]) -> tuple[WorkList, ...]:
        """Sequences of ``num_q`` queries and ``num_kv`` keys (S,), in the step's order."""
        cuts = cut_step(
            num_q,
            num_kv,
            group=self.group,
            kv_heads=self.kv_heads,
            tiles=self.tiles,
            num_sms=self.num_sms,
            fixed_keys=self.fixed_keys,
        )
        return upload(cuts, self.device)


def upload(cuts: Sequence[Cut], device: torch.device) -> tuple[WorkList, ...]:
    """The cuts on ``device``, in one copy."""
    parts = [
        part
        for cut in cuts
        for part in (_in_rows(cut.numbers), cut.entries, cut.merges, _in_rows(cut.starts))
    ]
    if not parts:
        return ()
    rows = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        rows = rows.pin_memory()
    pieces = iter(torch.split(rows.to(device, non_blocking=True), [len(part) for part in parts]))
    return tuple(
        WorkList(
            tile=cut.tile,
            numbers=next(pieces)[0],
            entries=next(pieces),
            merges=next(pieces),
            starts=next(pieces).flatten()[: 0 if cut.starts is None else len(cut.starts)],
            num_partials=cut.num_partials,
            most_partials=cut.most_partials,
            most_rows=cut.most_rows,
            num_programs=cut.num_programs,
        )
        for cut in cuts
    )


def _in_rows(numbers: Ints | None) -> Ints:
    """As rows of eight, so that every part starts where a kernel may load it whole."""
    if numbers is None:
        numbers = np.empty(0, dtype=np.int32)
    return np.pad(numbers, (0, -len(numbers) % 8)).reshape(-1, 8)

"""A step cut into the pieces that GPU programs run: numpy, built while the step is scheduled.

A row is a (query, query head of one kv head) pair: query i and head g of the group is row
i * group + g. An *entry* is one tile of rows over one range of keys, run once for each kv head.
Where a tile's keys are cut in several entries each writes a partial (O, LSE), and a *merge*
joins them. Sequences with few rows take tiles of 16 to 64 rows, the others tall ones.

Every array can be padded to a fixed capacity (a captured graph replays with other contents):
programs past the numbers in ``Cut.numbers`` do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stairs.attention.meta import WorkList
from stairs.attention.tiles import TritonTile

__all__ = ["ENTRY_FIELDS", "MERGE_FIELDS", "Cut", "Cutter", "cut_rows", "cut_step", "upload"]

Ints = NDArray[np.int32]

MIN_SPLIT = 128  # keys: below this a merge costs more than the split saves

# token: the sequence's first row of q; row: the tile's first; keys first_key .. last_key of
# ``num_kv``; partial: where it goes, -1 for straight to the output; seat: row of the block table.
ENTRY_FIELDS = ("token", "num_q", "num_kv", "row", "first_key", "last_key", "partial", "seat")
MERGE_FIELDS = ("token", "num_q", "row", "partial", "num_partials", "unused", "unused", "unused")


@dataclass(frozen=True, slots=True)
class Cut:
    """Entries and merges of the sequences that take ``tile``."""

    tile: TritonTile
    entries: Ints  # (W, 8)
    merges: Ints  # (M, 8)
    numbers: Ints  # (2,)  how many of W and of M hold something
    num_partials: int
    most_partials: int  # of one merge


def cut_rows(
    num_q: NDArray[np.int64],
    num_kv: NDArray[np.int64],
    *,
    group: int,
    tile: TritonTile,
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
    partial_of = np.cumsum(np.where(splits > 1, splits, 0)) - np.where(splits > 1, splits, 0)
    first = part * each[owner]
    entries = np.empty((len(owner), len(ENTRY_FIELDS)), dtype=np.int32)
    entries[:, 0] = tokens[sequence][owner]
    entries[:, 1] = num_q[sequence][owner]
    entries[:, 2] = num_kv[sequence][owner]
    entries[:, 3] = row[owner]
    entries[:, 4] = first
    entries[:, 5] = np.minimum(first + each[owner], keys[owner])
    entries[:, 6] = np.where(splits[owner] > 1, partial_of[owner] + part, -1)
    entries[:, 7] = seats[sequence][owner]
    # Longest first: what starts last then ends soon.
    entries = entries[np.argsort(entries[:, 4] - entries[:, 5], kind="stable")]

    split = np.flatnonzero(splits > 1)
    merges = np.zeros((len(split), len(MERGE_FIELDS)), dtype=np.int32)
    merges[:, 0] = tokens[sequence[split]]
    merges[:, 1] = num_q[sequence[split]]
    merges[:, 2] = row[split]
    merges[:, 3] = partial_of[split]
    merges[:, 4] = splits[split]
    numbers = np.array((len(entries), len(merges)), dtype=np.int32)
    most = int(splits[split].max(initial=0))
    return Cut(tile, entries, merges, numbers, int(splits[split].sum()), most)


def _split_size(keys: NDArray[np.int64], key_step: int, target: int, min_keys: int) -> int:
    """Keys a split may hold so that there are about ``target`` of them."""
    size = max(-(-int(keys.sum()) // max(target, 1)), min_keys, key_step)
    size = -(-size // key_step) * key_step
    for _ in range(4):
        count = int(np.maximum(-(-keys // size), 1).sum())
        if count <= max(target, len(keys)):
            break
        size = -(-size * count // max(target, len(keys)) // key_step) * key_step
    return size


def cut_step(
    num_q: NDArray[np.int64],
    num_kv: NDArray[np.int64],
    *,
    group: int,
    kv_heads: int,
    tiles: tuple[TritonTile, TritonTile],
    num_sms: int,
    fixed_keys: int | None = None,
) -> list[Cut]:
    """The step's sequences in short and tall tiles; lists that would be empty are left out."""
    tokens = np.cumsum(num_q) - num_q
    is_short = num_q * group <= tiles[0].rows
    cuts = []
    for tile, chosen in ((tiles[0], is_short), (tiles[1], ~is_short)):
        seats = np.flatnonzero(chosen & (num_q > 0))
        if len(seats):
            target = max(1, num_sms * tile.per_sm // kv_heads)
            cuts.append(
                cut_rows(
                    num_q[seats], num_kv[seats], group=group, tile=tile, target=target,
                    min_keys=MIN_SPLIT, fixed_keys=fixed_keys, seats=seats, tokens=tokens[seats],
                )
            )  # fmt: skip
    return cuts


@dataclass(frozen=True, slots=True)
class Cutter:
    """How one model's steps are cut on one card."""

    group: int
    kv_heads: int
    tiles: tuple[TritonTile, TritonTile]
    num_sms: int
    device: torch.device

    def __call__(self, num_q: NDArray[np.int64], num_kv: NDArray[np.int64]) -> tuple[WorkList, ...]:
        """Sequences of ``num_q`` queries and ``num_kv`` keys (S,), in the step's order."""
        cuts = cut_step(
            num_q,
            num_kv,
            group=self.group,
            kv_heads=self.kv_heads,
            tiles=self.tiles,
            num_sms=self.num_sms,
        )
        return upload(cuts, self.device)


def upload(cuts: Sequence[Cut], device: torch.device) -> tuple[WorkList, ...]:
    """The cuts on ``device``, in one copy."""
    parts = [part for cut in cuts for part in (_padded_numbers(cut), cut.entries, cut.merges)]
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
            num_partials=cut.num_partials,
            most_partials=cut.most_partials,
        )
        for cut in cuts
    )


def _padded_numbers(cut: Cut) -> Ints:
    """As one row of eight, so that every part starts where a kernel may load it whole."""
    return np.pad(cut.numbers, (0, len(ENTRY_FIELDS) - len(cut.numbers)))[None]

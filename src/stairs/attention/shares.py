"""Keys of sequences shared out to programs that run at once: numpy, in tiles of keys.

A *piece* is part of one sequence's tiles, run by one program; a program may have several.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pieces", "dealt", "pieces"]

MOST_PARTS = 128  # of a sequence, for persistent programs: a merge reads 64 at a time

Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def pieces(
    tiles: NDArray[np.int64], num_programs: int, fewest: int, *, merge_cost: float
) -> Pieces:
    """The pieces that sequences of ``tiles`` (S,) are cut in: whose, its first tile, its program.

    Of whole sequences, equal parts of each, and equal parts of all in one line: where the busiest
    program is done first. No piece of a cut sequence is shorter than ``fewest`` tiles.
    """
    lone = np.arange(len(tiles))
    # A sequence that certainly shares its program costs a tile more: its queries, its results.
    cost = tiles + (tiles * num_programs < tiles.sum())
    whole = lone, np.zeros_like(tiles), dealt(cost, num_programs)
    shortest = max(fewest, -(-int(tiles.max()) // MOST_PARTS))
    used = max(1, min(num_programs, int(cost.sum()) // shortest))
    if _busiest(tiles, whole) <= cost.sum() / used + merge_cost:
        return whole
    ways = [whole, _in_line(tiles, cost, used, fewest)]
    size = max(-(-int(tiles.sum()) // used), fewest)
    splits = -(-tiles // size)
    if splits.sum() <= num_programs:
        owner = np.repeat(lone, splits)
        part = np.arange(len(owner)) - np.repeat(np.cumsum(splits) - splits, splits)
        ways.append((owner, part * (-(-tiles // splits))[owner], np.arange(len(owner))))
    costs = [_busiest(tiles, way) + merge_cost * (len(way[0]) > len(tiles)) for way in ways]
    return ways[int(np.argmin(costs))]


def _busiest(tiles: NDArray[np.int64], shared: Pieces) -> float:
    """Tiles of the program that has most, one more for each piece after its first."""
    owner, first, program = shared
    ends = np.append(owner[1:] != owner[:-1], True)
    last = np.where(ends, tiles[owner], np.append(first[1:], 0))
    return float(np.bincount(program, last - first + 1).max()) - 1


def _in_line(tiles: NDArray[np.int64], cost: NDArray[np.int64], used: int, fewest: int) -> Pieces:
    """All tiles in one line, cut in ``used`` parts of equal cost."""
    end = np.cumsum(cost)
    cuts = np.arange(1, used) * end[-1] // used
    sequence = np.searchsorted(end, cuts, side="right")
    inside = cuts - (end - tiles)[sequence]
    near_end = tiles[sequence] - inside < fewest
    sequence = sequence + near_end
    inside = np.where(near_end | (inside < fewest), 0, inside)
    # A program begins at each place (sequence, tile); whole sequences begin pieces too.
    stride = int(tiles.max()) + 1
    cuts = sequence * stride + inside
    begins = np.unique(np.append(cuts, np.arange(len(tiles)) * stride))
    begins = begins[begins < len(tiles) * stride]
    return begins // stride, begins % stride, np.searchsorted(cuts, begins, side="right")


def dealt(cost: NDArray[np.int64], num_programs: int) -> NDArray[np.int64]:
    """A program for each: the dearest first, to and fro, so that every round evens out the last."""
    order = np.argsort(-cost, kind="stable")
    turn, place = np.divmod(np.arange(len(cost)), num_programs)
    program = np.empty(len(cost), dtype=np.int64)
    program[order] = np.where(turn % 2, num_programs - 1 - place, place)
    return program

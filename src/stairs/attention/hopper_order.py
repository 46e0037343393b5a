"""The order in which programs of the forward take tiles of rows, and which keys a tile reads.

Ragged rows are put in order first: tiles of all sequences, the longest first. One small kernel and
no wait for the device, so that a captured graph replays it with other ends. A program of it places
128 tiles by counting, for each, the tiles that come before it.
"""
# ruff: noqa: RUF059  (a name _ is carried by Triton's loops like any other)

from __future__ import annotations

import torch
from torch import Tensor

from stairs.attention.gluon_api import gl, gluon

__all__ = [
    "cut_by",
    "locate",
    "num_rounds",
    "order_kernel",
    "order_tiles",
    "stretches",
]

RECORD = 8  # ints of a tile: first row, first_q, num_q, first_kv, num_kv, sequence, two not used
FIELDS = gl.constexpr(RECORD)
SLOTS = gl.constexpr(128)  # tiles a program places, and compares them with at a time
PART = gl.constexpr(32)  # sequences looked at at a time


@gluon.jit
def stretches(row0, num_q, num_kv, left, right, BM: gl.constexpr, BN: gl.constexpr,
              RIGHT: gl.constexpr, LEFT: gl.constexpr):  # fmt: skip
    """Tiles of keys that rows row0 .. row0 + BM read, first .. end, at least one: [first, clear)
    are cut by the window's left edge, [full, end) by the right edge or the sequence's end."""
    past = num_kv - num_q
    stop = num_kv
    full = num_kv // BN
    first = 0
    clear = 0
    if RIGHT:
        stop = gl.minimum(stop, gl.maximum(row0 + BM + past + right, 0))
        full = gl.minimum(full, gl.maximum(row0 + past + right + 1, 0) // BN)
    if LEFT:
        first = gl.minimum(gl.maximum(row0 + past - left, 0), num_kv) // BN
        clear = (gl.maximum(row0 + BM - 1 + past - left, 0) + BN - 1) // BN
    end = gl.maximum((stop + BN - 1) // BN, first + 1)
    full = gl.maximum(gl.minimum(full, end), first)
    clear = gl.minimum(gl.maximum(clear, first), full)
    return first, clear, full, end


@gluon.jit
def cut_by(entry, first, clear, full, end, BN: gl.constexpr):
    """Of the tiles of keys that rows read those of their entry, at least one."""
    first = gl.maximum(first, gl.load(entry + 4) // BN)
    end = gl.maximum(gl.minimum(end, (gl.load(entry + 5) + BN - 1) // BN), first + 1)
    return first, gl.maximum(clear, first), gl.maximum(gl.minimum(full, end), first), end


@gluon.jit
def num_rounds(num_tiles, programs, ORDER: gl.constexpr):
    """How many tiles of rows this program takes."""
    mine = gl.program_id(0)
    if ORDER == "pairs":
        over = num_tiles % (2 * programs) - 2 * mine
        return num_tiles // (2 * programs) * 2 + gl.minimum(gl.maximum(over, 0), 2)
    if ORDER == "rounds":
        mine = gl.where(num_tiles // programs % 2 == 0, mine, programs - 1 - mine)
    return num_tiles // programs + gl.where(num_tiles % programs > mine, 1, 0)


@gluon.jit
def locate(r, tiles, num_q, num_kv, heads, row_tiles, num_tiles, programs, BM: gl.constexpr,
           RAGGED: gl.constexpr, PAGE: gl.constexpr, ORDER: gl.constexpr):  # fmt: skip
    """The r-th tile of rows of this program: box, head, first row in its sequence, and the
    sequence's first row and number of rows in q, and in k; which it is; and its record."""
    mine = gl.program_id(0)
    if ORDER == "rounds":  # longest first, there and back: each program gets long and short ones
        mine = gl.where(r % 2 == 0, mine, programs - 1 - mine)
    t = r * programs + mine
    HEADER: gl.constexpr = 0 if PAGE else 1
    record = tiles + (HEADER + t // heads) * FIELDS
    if PAGE:
        return (0, t % heads, gl.load(record + 3), gl.load(record), gl.load(record + 1), 0,
                gl.load(record + 2), gl.load(record + 7), record)  # fmt: skip
    if RAGGED:
        return (0, t % heads, gl.load(record), gl.load(record + 1), gl.load(record + 2),
                gl.load(record + 3), gl.load(record + 4), gl.load(record + 5), record)  # fmt: skip
    if ORDER == "rounds":
        all_heads = num_tiles // row_tiles
        m = row_tiles - 1 - t // all_heads
        at = t % all_heads
    else:
        if ORDER == "pairs":
            t = (r // 2 * programs + mine) * 2 + r % 2
        m = t % row_tiles
        at = t // row_tiles
        if ORDER == "pairs":  # tiles 2i and 2i + 1 are a head's i-th longest and i-th shortest
            m = gl.where(m % 2 == 0, row_tiles - 1 - m // 2, m // 2)
    return at // heads, at % heads, m * BM, 0, num_q, 0, num_kv, 0, record


@gluon.jit
def described(
    slot, cu_q, cu_kv, num_sequences, left, right, BM: gl.constexpr, BN: gl.constexpr,
    RIGHT: gl.constexpr, LEFT: gl.constexpr, LAYOUT: gl.constexpr, SQUARE: gl.constexpr,
):  # fmt: skip
    """Of the tiles ``slot`` (SLOTS,), counted sequence by sequence: first row, sequence, tiles of
    keys to read (-1 past the last tile); and the number of all tiles."""
    lower = gl.arange(0, PART, gl.SliceLayout(1, SQUARE))
    upper = gl.arange(0, PART, gl.SliceLayout(0, SQUARE))
    sequence = gl.zeros([SLOTS], gl.int32, gl.SliceLayout(1, LAYOUT))
    begin = sequence
    count = 0
    for s in range(0, num_sequences, PART):
        there = s + lower < num_sequences
        length = gl.load(cu_q + s + lower + 1, there, 0) - gl.load(cu_q + s + lower, there, 0)
        num = (length + BM - 1) // BM
        ends = gl.sum(gl.where(lower[:, None] <= upper[None, :], num[:, None], 0), 0) + count
        ends = gl.where(s + upper < num_sequences, ends, 2147483647)
        ends = gl.convert_layout(ends, gl.SliceLayout(0, LAYOUT))
        over = ends[None, :] <= slot[:, None]
        sequence += gl.sum(gl.where(over, 1, 0), 1)
        begin = gl.maximum(begin, gl.max(gl.where(over, ends[None, :], 0), 1))
        count += gl.sum(num, 0)
    exists = sequence < num_sequences
    at = gl.where(exists, sequence, 0)
    num_q = gl.load(cu_q + at + 1) - gl.load(cu_q + at)
    num_kv = gl.load(cu_kv + at + 1) - gl.load(cu_kv + at)
    row0 = (slot - begin) * BM
    first, clear, full, end = stretches(row0, num_q, num_kv, left, right, BM, BN, RIGHT, LEFT)
    return row0, at, gl.where(exists, end - first, -1), count


@gluon.jit(do_not_specialize=["num_sequences", "num_slots", "left", "right"])
def order_kernel(
    cu_q, cu_kv, tiles, num_sequences, num_slots, left, right, BM: gl.constexpr, BN: gl.constexpr,
    RIGHT: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """tiles: the number of tiles, then from RECORD on a record for each, most keys first."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [4, 1], [1, 0])
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    slot = gl.program_id(0) * SLOTS + gl.arange(0, SLOTS, gl.SliceLayout(1, LAYOUT))
    row0, sequence, length, count = described(
        slot, cu_q, cu_kv, num_sequences, left, right, BM, BN, RIGHT, LEFT, LAYOUT, SQUARE
    )
    place = gl.zeros([SLOTS], gl.int32, gl.SliceLayout(1, LAYOUT))
    for start in range(0, num_slots, SLOTS):
        other = start + gl.arange(0, SLOTS, gl.SliceLayout(1, LAYOUT))
        row, which, their, every = described(
            other, cu_q, cu_kv, num_sequences, left, right, BM, BN, RIGHT, LEFT, LAYOUT, SQUARE
        )
        other = start + gl.arange(0, SLOTS, gl.SliceLayout(0, LAYOUT))
        their = gl.convert_layout(their, gl.SliceLayout(0, LAYOUT))
        longer = their[None, :] > length[:, None]
        earlier = (their[None, :] == length[:, None]) & (other[None, :] < slot[:, None])
        place += gl.sum(gl.where(longer | earlier, 1, 0), 1)
    exists = length >= 0
    first_q = gl.load(cu_q + sequence)
    first_kv = gl.load(cu_kv + sequence)
    record = tiles + (1 + place) * FIELDS
    gl.store(record, row0, mask=exists)
    gl.store(record + 1, first_q, mask=exists)
    gl.store(record + 2, gl.load(cu_q + sequence + 1) - first_q, mask=exists)
    gl.store(record + 3, first_kv, mask=exists)
    gl.store(record + 4, gl.load(cu_kv + sequence + 1) - first_kv, mask=exists)
    gl.store(record + 5, sequence, mask=exists)
    gl.store(tiles, count)


def order_tiles(
    cu_q: Tensor, cu_kv: Tensor, *, total_q: int, rows: int, keys: int, left: int, right: int,
    has_right: bool, has_left: bool,
) -> Tensor:  # fmt: skip
    """int32 ((1 + N) * RECORD,): the number of tiles, and for each its record."""
    num_sequences = len(cu_q) - 1
    num_slots = total_q // rows + num_sequences  # at least as many as there are tiles
    tiles = torch.empty((1 + num_slots) * RECORD, dtype=torch.int32, device=cu_q.device)
    order_kernel[((num_slots + 127) // 128,)](
        cu_q, cu_kv, tiles, num_sequences, num_slots, left, right,
        BM=rows, BN=keys, RIGHT=has_right, LEFT=has_left, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return tiles

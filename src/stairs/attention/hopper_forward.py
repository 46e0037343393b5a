"""Exact attention forward for Hopper (sm_90) in Gluon: dense batches, ragged ones, and paged.

A program is one producer partition, which copies boxes of Q, K and V to shared memory, and two or
three consumers of 64 query rows each. A consumer issues the product of the next keys before the
product with the last values, and takes the softmax while the tensor cores do both. Keys go from
the last tile of a row to the first: cut by the right edge, seen by all rows, cut by the window.
A program takes many tiles of rows, and its barriers go on counting from one to the next. Which
tile sizes: ``hopper``; in which order ragged rows: ``hopper_order``.
"""
# ruff: noqa: E741, RUF059, SIM102, SIM108  (l is the softmax denominator in this whole package; a
# name _ is carried by Triton's loops like any other, and a constant decides alone)

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stairs.attention.gluon_api import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    load_box,
    mbarrier,
    named_arrive,
    named_sync,
    numbered_arrive,
    numbered_sync,
    pack_pairs,
    partition_barrier,
    scale_rows,
    store_box,
    store_wait,
    unpack_pairs,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from stairs.attention.hopper import ForwardTile, is_in_rounds, padded
from stairs.attention.hopper_order import RECORD, order_tiles, stretches
from stairs.attention.hopper_softmax import quads_layout, weights
from stairs.attention.meta import AttnMeta, LayerKV, WorkList
from stairs.attention.triton_paged import merge_partials, partials

__all__ = [
    "BOXES",
    "PAGES",
    "attend_chunks",
    "attend_tiles",
    "box_keys",
    "constants",
    "forward_kernel",
    "hopper_forward",
]

LOG2_E = 1.4426950408889634
FAR = 2**30  # a window's side that is open
PAGES = gl.NVMMASharedLayout(128, 16, 2)
BOX = gl.constexpr(PAGES)
BOXES = gl.NVMMASharedLayout(128, 16, 4)
FIELDS = gl.constexpr(RECORD)
SIZES = ["num_q", "num_kv", "left", "right", "heads", "group", "row_tiles", "num_tiles",
         "programs", "head_dim", "total_q", "table_stride",
         "num_blocks"]  # fmt: skip


@gluon.constexpr_function
def turn(consumer, consumers):
    """The hardware barrier that says it is this consumer's turn to issue products."""
    return str(8 + consumer % consumers)


@gluon.constexpr_function
def has_loader(page, keys, head_block, consumers):
    """Whether one warp loads K and V and others Q: where tiles come in so many boxes that four
    warps, which meet before each, would be too slow, and where registers suffice for a fourth
    partition."""
    small = page > 0 and keys // box_keys(page, keys) > 2
    return small and head_block <= 128 and consumers == 2


@gluon.constexpr_function
def all_threads(consumers, loader):
    """Of the consumers and of what loads K and V."""
    return str(128 * consumers + (32 if loader else 128))


@gluon.constexpr_function
def box_keys(page, keys):
    """Of a box that lies in one page and in one tile of keys."""
    return math.gcd(page, keys)


@gluon.jit
def advanced(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def acquire(empty, stage, phase, barrier: gl.constexpr, THREADS: gl.constexpr):
    """The producer waits until every consumer has released ``stage``. A hardware barrier (from
    number ``barrier`` on, unless that is 0) spares consumers the meeting of their four warps that
    an mbarrier's one arrival a partition takes."""
    if barrier:
        numbered_sync(barrier + stage, THREADS)
    else:
        mbarrier.wait(empty.index(stage), phase ^ 1)


@gluon.jit
def release(empty, stage, barrier: gl.constexpr, THREADS: gl.constexpr):
    if barrier:
        numbered_arrive(barrier + stage, THREADS)
    else:
        mbarrier.arrive(empty.index(stage), count=1)


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
def cut_by(entry, first, clear, full, end, BN: gl.constexpr):
    """Of the tiles of keys that rows read those of their entry, at least one."""
    first = gl.maximum(first, gl.load(entry + 4) // BN)
    end = gl.maximum(gl.minimum(end, (gl.load(entry + 5) + BN - 1) // BN), first + 1)
    return first, gl.maximum(clear, first), gl.maximum(gl.minimum(full, end), first), end


@gluon.jit
def load_keys(
    source, tile, full, box, kv_head, first_kv, j, keys, sequence, pool, BN: gl.constexpr,
    BD: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Tile j of a sequence's K or V: a box of rows of its head, or, where a PAGE of keys lies by
    itself in pages (N, G, PAGE, D), a box a page. Boxes past the last key lie outside the pool:
    the copy engine writes zeros and reads nothing, nor is a stale table entry."""
    mbarrier.expect(full, BN * BD * 2)
    if PAGE:
        table, table_stride, num_blocks, kv_heads = pool
        PART: gl.constexpr = box_keys(PAGE, BN)
        places = table + sequence.to(gl.int64) * table_stride
        # Ids of a few parts at a time: their loads are under way together.
        SOME: gl.constexpr = 4 if BN // PART > 4 else BN // PART
        for begin in gl.static_range(0, BN // PART, SOME):
            rows = ()
            for part in gl.static_range(begin, begin + SOME):
                key = j * BN + part * PART
                page = gl.load(places + gl.minimum(key, gl.maximum(keys - 1, 0)) // PAGE)
                page = gl.minimum(gl.maximum(page, 0), num_blocks - 1)
                row = (page * kv_heads + kv_head) * PAGE + key % PAGE
                outside = num_blocks * kv_heads * PAGE
                rows += (gl.where(key < keys, row, outside),)  # type: ignore[assignment]
            for part in gl.static_range(begin, begin + SOME):
                load_box(source, [rows[part - begin], 0], full, tile.slice(part * PART, PART, 0))
    else:
        load_box(source, [box, kv_head, first_kv + j * BN, 0], full, tile)


@gluon.jit
def load_q(q, memory, barriers, box, head, row, phase, BD: gl.constexpr, CONSUMERS: gl.constexpr):
    q_tiles, k_tiles, v_tiles, o_tiles = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, clean = barriers
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(q_empty.index(c), phase ^ 1)
        mbarrier.expect(q_full.index(c), 64 * BD * 2)
        load_box(q, [box, head, row + c * 64, 0], q_full.index(c), q_tiles.index(c))


@gluon.jit
def load_queries(q, memory, barriers, problem, BD: gl.constexpr, CONSUMERS: gl.constexpr,
                 PAGE: gl.constexpr, RAGGED: gl.constexpr, ORDER: gl.constexpr):  # fmt: skip
    """Q alone, where a warp beside it loads K and V."""
    (number, tiles, num_q, num_kv, left, right, heads, group, row_tiles, num_tiles,
     programs) = problem  # fmt: skip
    if RAGGED:
        num_tiles = gl.load(number) * heads
    phase = 0
    for r in range(num_rounds(num_tiles, programs, ORDER)):
        box, head, row0, first_q, rows, first_kv, keys, sequence, entry = locate(
            r, tiles, num_q, num_kv, heads, row_tiles, num_tiles, programs, 64 * CONSUMERS, RAGGED,
            PAGE, ORDER,
        )  # fmt: skip
        load_q(q, memory, barriers, box, head, first_q + row0, phase, BD, CONSUMERS)
        phase ^= 1


@gluon.jit
def producer(
    q, k, v, memory, barriers, problem, pool, BN: gl.constexpr, BD: gl.constexpr,
    STAGES: gl.constexpr, PAGE: gl.constexpr,
    CONSUMERS: gl.constexpr, K_FREE: gl.constexpr, V_FREE: gl.constexpr, RAGGED: gl.constexpr,
    ORDER: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    q_tiles, k_tiles, v_tiles, o_tiles = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, clean = barriers
    (number, tiles, num_q, num_kv, left, right, heads, group, row_tiles, num_tiles,
     programs) = problem  # fmt: skip
    BM: gl.constexpr = 64 * CONSUMERS
    THREADS: gl.constexpr = all_threads(CONSUMERS, has_loader(PAGE, BN, BD, CONSUMERS))
    if RAGGED:
        num_tiles = gl.load(number) * heads
    stage = 0
    phase = 0
    q_phase = 0
    for r in range(num_rounds(num_tiles, programs, ORDER)):
        box, head, row0, first_q, rows, first_kv, keys, sequence, entry = locate(
            r, tiles, num_q, num_kv, heads, row_tiles, num_tiles, programs, BM, RAGGED, PAGE, ORDER
        )
        first, clear, full, end = stretches(row0, rows, keys, left, right, BM, BN, RIGHT, LEFT)
        if PAGE:
            first, clear, full, end = cut_by(entry, first, clear, full, end, BN)
        kv_head = head // group
        # Before Q, whose memory may be on its way out with the last tile's result.
        acquire(k_empty, stage, phase, K_FREE, THREADS)
        load_keys(k, k_tiles.index(stage), k_full.index(stage), box, kv_head, first_kv, end - 1,
                  keys, sequence, pool, BN, BD, PAGE)  # fmt: skip
        if not has_loader(PAGE, BN, BD, CONSUMERS):
            load_q(q, memory, barriers, box, head, first_q + row0, q_phase, BD, CONSUMERS)
        q_phase ^= 1
        # K is a tile ahead of V, in the order in which they are used.
        for j in range(end - 2, first - 1, -1):
            next_stage, next_phase = advanced(stage, phase, STAGES)
            acquire(k_empty, next_stage, next_phase, K_FREE, THREADS)
            load_keys(k, k_tiles.index(next_stage), k_full.index(next_stage), box, kv_head,
                      first_kv, j, keys, sequence, pool, BN, BD, PAGE)  # fmt: skip
            acquire(v_empty, stage, phase, V_FREE, THREADS)
            load_keys(v, v_tiles.index(stage), v_full.index(stage), box, kv_head, first_kv,
                      j + 1, keys, sequence, pool, BN, BD, PAGE)  # fmt: skip
            stage, phase = next_stage, next_phase
        acquire(v_empty, stage, phase, V_FREE, THREADS)
        load_keys(v, v_tiles.index(stage), v_full.index(stage), box, kv_head, first_kv, first,
                  keys, sequence, pool, BN, BD, PAGE)  # fmt: skip
        stage, phase = advanced(stage, phase, STAGES)


@gluon.jit
def step(
    q, memory, barriers, w, acc, m, l, stage, phase, j, edges, scale, inner, c: gl.constexpr,
    MASKED: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr, CAPPED: gl.constexpr,
    LAZY: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, TURNS: gl.constexpr, K_FREE: gl.constexpr, V_FREE: gl.constexpr,
    THREADS: gl.constexpr, DTYPE: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    QUADS: gl.constexpr,
):  # fmt: skip
    """Scores of tile j, the last tile's weights times its values, then the weights of tile j.

    Weights ``w`` go from step to step as whole registers of two: as halves each takes a move in
    and a move out, 64 of 508 instructions at D 128."""
    q_tiles, k_tiles, v_tiles, o_tiles = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, clean = barriers
    SUMS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, QUADS))
    p = gl.convert_layout(unpack_pairs(w, 64, BN, DTYPE), gl.DotOperandLayout(0, O_LAYOUT, 2))
    next_stage, next_phase = advanced(stage, phase, STAGES)
    mbarrier.wait(k_full.index(next_stage), next_phase)
    if TURNS:
        named_sync(turn(c, CONSUMERS), "256")
    zero = gl.zeros([64, BN], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        q, k_tiles.index(next_stage).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(stage), phase)
    product = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
    if TURNS:
        named_arrive(turn(c + 1, CONSUMERS), "256")
    s = warpgroup_mma_wait(1, deps=[scores])
    release(k_empty, next_stage, K_FREE, THREADS)
    s, m, keep, sums = weights(
        s, m, j, edges, scale, inner, BN, MASKED, RIGHT, LEFT, CAPPED, LAZY, S_LAYOUT, QUADS
    )
    kept = gl.convert_layout(keep, gl.SliceLayout(1, SUMS), assert_trivial=True)
    l = l * kept[:, None] + sums
    acc = warpgroup_mma_wait(0, deps=[product])
    release(v_empty, stage, V_FREE, THREADS)
    w = pack_pairs(s, 64, BN, DTYPE)
    keep = gl.convert_layout(keep, gl.SliceLayout(1, O_LAYOUT))
    if LAZY:
        acc = scale_rows(acc, keep, BD)
    else:
        acc = acc * keep[:, None]
    return w, acc, m, l, next_stage, next_phase


@gluon.jit
def clear_past(values, keys, c: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr,
               CONSUMERS: gl.constexpr):  # fmt: skip
    """This consumer's share of the rows of ``values`` (BN, BD) from ``keys`` on to 0: they are
    another sequence's, and a weight of 0 times NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BD, BD // 8], [4, 1], [1, 0])
    for i in gl.static_range(c, BN // 16, CONSUMERS):
        piece = values.slice(i * 16, 16, 0)
        row = i * 16 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        piece.store(gl.where((row < keys)[:, None], piece.load(LAYOUT), 0.0))


@gluon.jit
def store_rows(result, out, row0, first_q, rows, head, heads, head_dim, BD: gl.constexpr,
               O_LAYOUT: gl.constexpr):  # fmt: skip
    """The rows of ``result`` (64, BD) that are the sequence's: below are another one's."""
    row = row0 + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
    column = gl.arange(0, BD, gl.SliceLayout(0, O_LAYOUT))
    at = ((first_q + row).to(gl.int64) * heads + head) * head_dim
    inside = (row < rows)[:, None] & (column < head_dim)[None, :]
    gl.store(out + at[:, None] + column[None, :], result, mask=inside)


@gluon.jit
def count(counts, row0, rows, keys, first, end, sequence, is_last, head_dim, BN: gl.constexpr):
    """The pairs of 64 rows and the keys in tiles first .. end; and the bytes of K and V, which the
    last tile of rows (``is_last``) reads all of, for all query heads of a kv head."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    visited = gl.minimum(end * BN, keys) - first * BN
    row = row0 + gl.arange(0, 64, ONE)
    seen = gl.maximum(gl.minimum(keys - rows + row + 1 - first * BN, visited), 0)
    at = counts + sequence.to(gl.int64) * 3
    gl.atomic_add(at, gl.sum(gl.where(row < rows, seen, 0), 0).to(gl.int64))
    gl.atomic_add(at + 1, gl.where(is_last, visited.to(gl.int64) * (4 * head_dim), 0))


@gluon.jit
def consumer(
    o, out, lse, partial_out, counts, memory, barriers, problem, scale, inner, head_dim, total_q,
    c: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, TURNS: gl.constexpr, K_FREE: gl.constexpr, V_FREE: gl.constexpr,
    SPARE: gl.constexpr, LAZY: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr,
    ORDER: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr, CUT: gl.constexpr,
    CAPPED: gl.constexpr, LSE: gl.constexpr, BFLOAT: gl.constexpr, COUNTING: gl.constexpr,
):  # fmt: skip
    q_tiles, k_tiles, v_tiles, o_tiles = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, clean = barriers
    (number, tiles, num_q, num_kv, left, right, heads, group, row_tiles, num_tiles,
     programs) = problem  # fmt: skip
    DTYPE: gl.constexpr = gl.bfloat16 if BFLOAT else gl.float16
    BM: gl.constexpr = 64 * CONSUMERS
    THREADS: gl.constexpr = all_threads(CONSUMERS, has_loader(PAGE, BN, BD, CONSUMERS))
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    QUADS: gl.constexpr = quads_layout(BN)
    if RAGGED:
        num_tiles = gl.load(number) * heads
    stage = 0
    phase = 0
    q_phase = 0
    clean_phase = 0
    if TURNS and c == CONSUMERS - 1:
        named_arrive(turn(0, CONSUMERS), "256")
    if K_FREE:
        for i in range(STAGES):  # all stages are free
            numbered_arrive(K_FREE + i, THREADS)
            numbered_arrive(V_FREE + i, THREADS)
    for r in range(num_rounds(num_tiles, programs, ORDER)):
        box, head, row0, first_q, rows, first_kv, keys, sequence, entry = locate(
            r, tiles, num_q, num_kv, heads, row_tiles, num_tiles, programs, BM, RAGGED, PAGE, ORDER
        )
        first, clear, full, end = stretches(row0, rows, keys, left, right, BM, BN, RIGHT, LEFT)
        if PAGE:
            first, clear, full, end = cut_by(entry, first, clear, full, end, BN)
        if COUNTING:
            is_last = (row0 + BM >= rows) & (head % group == 0) & (c == 0)
            count(counts, row0 + c * 64, rows, keys, first, end, sequence, is_last, head_dim, BN)
        place = row0 + c * 64 + keys - rows
        # Clamped, so that no sum of a thread's row and the call's sizes lives all along.
        edges = (gl.maximum(place - left, -64), gl.minimum(place + right, keys), keys)
        q = q_tiles.index(c)

        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(q_full.index(c), q_phase)
        zero = gl.zeros([64, BN], gl.float32, S_LAYOUT)
        scores = warpgroup_mma(
            q, k_tiles.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[scores])
        release(k_empty, stage, K_FREE, THREADS)
        m = gl.full([64], float("-inf"), gl.float32, ROWS)
        s, m, keep, l = weights(
            s, m, end - 1, edges, scale, inner, BN, CUT, RIGHT, LEFT, CAPPED, LAZY, S_LAYOUT,
            QUADS,
        )  # fmt: skip
        w = pack_pairs(s, 64, BN, DTYPE)
        if RAGGED:
            if end * BN > keys:
                mbarrier.wait(v_full.index(stage), phase)
                clear_past(v_tiles.index(stage), keys - (end - 1) * BN, c, BN, BD, CONSUMERS)
                fence_async_shared()
                mbarrier.arrive(clean, count=1)
                mbarrier.wait(clean, clean_phase)
                clean_phase ^= 1
        acc = gl.zeros([64, BD], gl.float32, O_LAYOUT)
        if RIGHT:
            for j in range(end - 2, full - 1, -1):
                w, acc, m, l, stage, phase = step(
                    q, memory, barriers, w, acc, m, l, stage, phase, j, edges, scale,
                    inner, c, True, RIGHT, LEFT, CAPPED, LAZY, BN, BD, STAGES, CONSUMERS, TURNS,
                    K_FREE, V_FREE, THREADS, DTYPE, S_LAYOUT, O_LAYOUT, QUADS,
                )  # fmt: skip
        for j in range(gl.minimum(full, end - 1) - 1, clear - 1, -1):
            w, acc, m, l, stage, phase = step(
                q, memory, barriers, w, acc, m, l, stage, phase, j, edges, scale, inner,
                c, False, RIGHT, LEFT, CAPPED, LAZY, BN, BD, STAGES, CONSUMERS, TURNS, K_FREE,
                V_FREE, THREADS, DTYPE, S_LAYOUT, O_LAYOUT, QUADS,
            )  # fmt: skip
        if LEFT:
            for j in range(gl.minimum(clear, end - 1) - 1, first - 1, -1):
                w, acc, m, l, stage, phase = step(
                    q, memory, barriers, w, acc, m, l, stage, phase, j, edges, scale,
                    inner, c, True, RIGHT, LEFT, CAPPED, LAZY, BN, BD, STAGES, CONSUMERS, TURNS,
                    K_FREE, V_FREE, THREADS, DTYPE, S_LAYOUT, O_LAYOUT, QUADS,
                )  # fmt: skip
        if SPARE:
            mbarrier.arrive(q_empty.index(c), count=1)
        p = gl.convert_layout(unpack_pairs(w, 64, BN, DTYPE), gl.DotOperandLayout(0, O_LAYOUT, 2))
        mbarrier.wait(v_full.index(stage), phase)
        product = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
        total = gl.convert_layout(gl.sum(l, 1), ROWS)
        saw = total != 0.0
        total = gl.where(saw, total, 1.0)
        # Rounded to nearest: Triton's own division may be two units off.
        inverse = gl.div_rn(gl.full([64], 1.0, gl.float32, ROWS), total)
        acc = warpgroup_mma_wait(0, deps=[product])
        release(v_empty, stage, V_FREE, THREADS)
        stage, phase = advanced(stage, phase, STAGES)
        result = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
        row = row0 + c * 64 + gl.arange(0, 64, ROWS)
        if PAGE:
            partial = gl.load(entry + 6)
            if partial >= 0:
                place = (partial * heads + head) * BM
                log2 = gl.where(saw, m * scale + gl.log2(total), float("-inf"))
                gl.store(lse + place + c * 64 + gl.arange(0, 64, ROWS), log2, mask=row < rows)
                store_rows(result, partial_out, c * 64, place, rows - row0, 0, 1, head_dim, BD,
                           O_LAYOUT)  # fmt: skip
            rows = gl.where(partial >= 0, 0, rows)  # none of a part's go out
        result = result.to(DTYPE)
        if LSE:
            natural = (m * scale + gl.log2(total)) * 0.6931471805599453
            natural = gl.where(saw, natural, float("-inf"))
            at = (box * heads + head).to(gl.int64) * total_q + first_q + row
            gl.store(lse + at, natural, mask=row < rows)
        whole = row0 + c * 64 + 64 <= rows
        if RAGGED:
            if not whole:
                store_rows(result, out, row0 + c * 64, first_q, rows, head, heads, head_dim, BD,
                           O_LAYOUT)  # fmt: skip
        if SPARE:
            store_wait(0)  # for the last tile's copy out
            partition_barrier()
        o_tiles.index(c).store(result)
        fence_async_shared()
        partition_barrier()
        if RAGGED:
            if whole:
                store_box(o, [0, head, first_q + row0 + c * 64, 0], o_tiles.index(c))
        else:
            store_box(o, [box, head, row0 + c * 64, 0], o_tiles.index(c))
        if not SPARE:
            store_wait(0)
            mbarrier.arrive(q_empty.index(c), count=1)
        q_phase ^= 1
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, o, out, lse, partial_out, number, tiles, table, counts, scale, inner, num_q, num_kv,
    left, right, heads, group, row_tiles, num_tiles, programs, head_dim, total_q, table_stride,
    num_blocks,
    BN: gl.constexpr, BD: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr, TURNS: gl.constexpr, K_FREE: gl.constexpr,
    V_FREE: gl.constexpr, SPARE: gl.constexpr, LAZY: gl.constexpr, RAGGED: gl.constexpr,
    ORDER: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr, CUT: gl.constexpr,
    CAPPED: gl.constexpr, LSE: gl.constexpr, BFLOAT: gl.constexpr, COUNTING: gl.constexpr,
):  # fmt: skip
    """O (B, rows, H, D) as boxes of ``o`` and rows of ``out``, LSE (B, H, rows), natural log.
    Of parts (PAGE): O (P, H, 64 * CONSUMERS, D) to ``partial_out``, LSE in log2 units to ``lse``.

    Weights are exp2(s * scale - ...) of scores s, or of tanh(s * inner) where CAPPED. Key j is
    visible to query i when i + past - left <= j <= i + past + right, past = num_kv - num_q.
    """
    DTYPE: gl.constexpr = gl.bfloat16 if BFLOAT else gl.float16
    q_tiles = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 64, BD], BOX)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BN, BD], BOX)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BN, BD], BOX)
    o_tiles = q_tiles
    if SPARE:
        o_tiles = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 64, BD], BOX)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    clean = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=CONSUMERS)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=CONSUMERS)
    mbarrier.init(clean, count=CONSUMERS)
    fence_async_shared()
    memory = (q_tiles, k_tiles, v_tiles, o_tiles)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, clean)
    problem = (
        number,
        tiles,
        num_q,
        num_kv,
        left,
        right,
        heads,
        group,
        row_tiles,
        num_tiles,
        programs,
    )
    pool = (table, table_stride, num_blocks, heads // group)
    C0: gl.constexpr = 0
    C1: gl.constexpr = 1
    C2: gl.constexpr = 2
    if has_loader(PAGE, BN, BD, CONSUMERS):
        gl.warp_specialize(
            [
                (load_queries, (q, memory, barriers, problem, BD, CONSUMERS, PAGE, RAGGED, ORDER)),
                (consumer, (o, out, lse, partial_out, counts, memory, barriers, problem, scale,
                            inner, head_dim, total_q, C0, BN, BD, STAGES, CONSUMERS, TURNS, K_FREE,
                            V_FREE, SPARE, LAZY, RAGGED, PAGE, ORDER, RIGHT, LEFT, CUT, CAPPED,
                            LSE, BFLOAT, COUNTING)),
                (consumer, (o, out, lse, partial_out, counts, memory, barriers, problem, scale,
                            inner, head_dim, total_q, C1, BN, BD, STAGES, CONSUMERS, TURNS, K_FREE,
                            V_FREE, SPARE, LAZY, RAGGED, PAGE, ORDER, RIGHT, LEFT, CUT, CAPPED,
                            LSE, BFLOAT, COUNTING)),
                (producer, (q, k, v, memory, barriers, problem, pool, BN, BD, STAGES, PAGE,
                            CONSUMERS, K_FREE, V_FREE, RAGGED, ORDER, RIGHT, LEFT)),
            ],
            [4, 4, 1],
            [REGISTERS - 8, REGISTERS - 8, 24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (producer, (q, k, v, memory, barriers, problem, pool, BN, BD, STAGES, PAGE,
                            CONSUMERS, K_FREE, V_FREE, RAGGED, ORDER, RIGHT, LEFT)),
                (consumer, (o, out, lse, partial_out, counts, memory, barriers, problem, scale,
                            inner, head_dim, total_q, C0, BN, BD, STAGES, CONSUMERS, TURNS, K_FREE,
                            V_FREE, SPARE, LAZY, RAGGED, PAGE, ORDER, RIGHT, LEFT, CUT, CAPPED,
                            LSE, BFLOAT, COUNTING)),
                (consumer, (o, out, lse, partial_out, counts, memory, barriers, problem, scale,
                            inner, head_dim, total_q, C1, BN, BD, STAGES, CONSUMERS, TURNS, K_FREE,
                            V_FREE, SPARE, LAZY, RAGGED, PAGE, ORDER, RIGHT, LEFT, CUT, CAPPED,
                            LSE, BFLOAT, COUNTING)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (producer, (q, k, v, memory, barriers, problem, pool, BN, BD, STAGES, PAGE,
                            CONSUMERS, K_FREE, V_FREE, RAGGED, ORDER, RIGHT, LEFT)),
                (consumer, (o, out, lse, partial_out, counts, memory, barriers, problem, scale,
                            inner, head_dim, total_q, C0, BN, BD, STAGES, CONSUMERS, TURNS, K_FREE,
                            V_FREE, SPARE, LAZY, RAGGED, PAGE, ORDER, RIGHT, LEFT, CUT, CAPPED,
                            LSE, BFLOAT, COUNTING)),
                (consumer, (o, out, lse, partial_out, counts, memory, barriers, problem, scale,
                            inner, head_dim, total_q, C1, BN, BD, STAGES, CONSUMERS, TURNS, K_FREE,
                            V_FREE, SPARE, LAZY, RAGGED, PAGE, ORDER, RIGHT, LEFT, CUT, CAPPED,
                            LSE, BFLOAT, COUNTING)),
                (consumer, (o, out, lse, partial_out, counts, memory, barriers, problem, scale,
                            inner, head_dim, total_q, C2, BN, BD, STAGES, CONSUMERS, TURNS, K_FREE,
                            V_FREE, SPARE, LAZY, RAGGED, PAGE, ORDER, RIGHT, LEFT, CUT, CAPPED,
                            LSE, BFLOAT, COUNTING)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip


def constants(
    tile: ForwardTile, *, head_dim: int, dtype: torch.dtype, is_ragged: bool, has_right: bool,
    has_left: bool, is_cut: bool, is_capped: bool, returns_lse: bool, in_rounds: bool = False,
    page: int = 0, counting: bool = False,
) -> dict[str, int | str]:  # fmt: skip
    """What a launch compiles in. ``is_cut``: the last tile of keys may hold hidden ones;
    ``counting``: of causal rows over pages."""
    k_free, v_free = tile.free_barriers
    order = "pairs" if has_right else "alike"
    if is_ragged or (has_right and in_rounds):
        order = "rounds"
    return {
        "BN": tile.keys,
        "BD": padded(head_dim),
        "PAGE": page,
        "STAGES": tile.stages,
        "CONSUMERS": tile.consumers,
        "REGISTERS": tile.registers,
        "TURNS": tile.turns,
        "K_FREE": k_free,
        "V_FREE": v_free,
        "SPARE": tile.spare,
        "LAZY": tile.lazy,
        "RAGGED": is_ragged,
        "ORDER": order,
        "RIGHT": has_right,
        "LEFT": has_left,
        "CUT": is_cut or is_ragged or has_right or has_left,
        "CAPPED": is_capped,
        "LSE": returns_lse,
        "BFLOAT": dtype == torch.bfloat16,
        "COUNTING": counting,
    }


def hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, *, cu_q: Tensor | None, cu_kv: Tensor | None, max_q: int,
    scale: float, causal: bool, window: tuple[int, int], softcap: float, return_lse: bool,
    tile: ForwardTile, num_sms: int = 132, in_rounds: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, Sq, H, D), k and v (B, Sk, G, D) dense; or ragged with B = 1 and the sequences' ends
    in cu_q and cu_kv, none longer than ``max_q``. LSE (B, H, Sq), or (1, H, Sq) ragged; empty
    unless asked for. ``window``: keys to the left and right, -1 for no bound.

    Only what ``hopper.hopper_lacks`` finds nothing against. Programs: one an SM at most.
    ``in_rounds``: the order of a dense batch's tiles, ``is_in_rounds`` of its shape by default.
    """
    batch, num_q, heads, head_dim = q.shape
    num_kv, kv_heads = k.shape[1:3]
    out = torch.empty((batch, num_q, heads, head_dim), dtype=q.dtype, device=q.device)
    lse_shape = (batch, heads, num_q) if return_lse else (0,)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    row_tiles = -(-max_q // tile.rows)
    left, right = (side if side >= 0 else FAR for side in window)
    if causal:
        right = 0 if right == FAR else min(right, 0)
    has_right, has_left = right < FAR, left < FAR
    if cu_q is None or cu_kv is None:
        tiles, num_tiles = lse, batch * heads * row_tiles
    else:
        tiles = order_tiles(
            cu_q, cu_kv, total_q=num_q, rows=tile.rows, keys=tile.keys, left=left, right=right,
            has_right=has_right, has_left=has_left,
        )  # fmt: skip
        num_tiles = (num_q // tile.rows + len(cu_q) - 1) * heads
    if not num_tiles:
        return out, lse
    programs = min(num_sms, num_tiles)
    if in_rounds is None:
        in_rounds = is_in_rounds(num_heads=batch * heads, num_q=num_q, num_programs=programs)
    fixed = constants(
        tile, head_dim=head_dim, dtype=q.dtype, is_ragged=cu_q is not None, has_right=has_right,
        has_left=has_left, is_cut=num_kv % tile.keys > 0, is_capped=softcap > 0,
        returns_lse=return_lse, in_rounds=in_rounds,
    )  # fmt: skip
    forward_kernel[(programs,)](
        _boxes(q, 64), _boxes(k, tile.keys), _boxes(v, tile.keys), _boxes(out, 64), out, lse,
        lse, tiles, tiles, tiles, tiles, (softcap or scale) * LOG2_E,
        scale / softcap if softcap else 0.0, num_q, num_kv, left, right, heads, heads // kv_heads,
        row_tiles, num_tiles, programs, head_dim, num_q, 0, 0, **fixed, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse


def attend_chunks(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, *, scale: float, out: Tensor
) -> None:
    """What ``work`` holds of q (T, H, D), D side by side, into ``out`` (T, H, D) contiguous.

    hopper_decode_lacks() has said that nothing is against it; q whose steps the copy engine cannot
    take is copied.
    """
    partial = attend_tiles(q, layer_kv, meta, work, scale=scale, out=out)
    merge_partials(work, *partial, out, batch_invariant=meta.batch_invariant)


def attend_tiles(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, *, scale: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """The entries of ``work``: whole rows into ``out``, parts of others into what is returned,
    O (P, H, rows, D) and LSE (P, H, rows). As many programs as SMs, or as entries and heads."""
    tile = work.tile
    assert isinstance(tile, ForwardTile)
    total_q, heads, head_dim = q.shape
    num_blocks, kv_heads, page = layer_kv.k.shape[:3]
    partial_out, partial_lse = partials(q, work, heads)
    programs = min(work.num_programs, len(work.entries) * heads)
    if not programs or not total_q:
        return partial_out, partial_lse
    steps = [stride * q.element_size() for stride in q.stride()[:2]]
    if q.data_ptr() % 16 or any(step % 16 or not step for step in steps):
        q = q.contiguous()
    fixed = constants(
        tile, head_dim=head_dim, dtype=q.dtype, is_ragged=True, has_right=True, has_left=False,
        is_cut=True, is_capped=False, returns_lse=False, page=page, counting=meta.counting,
    )  # fmt: skip
    k_boxes, v_boxes = _pages(layer_kv, box_keys(page, tile.keys))
    forward_kernel[(programs,)](
        _boxes(q[None], 64), k_boxes, v_boxes, _boxes(out[None], 64), out, partial_lse,
        partial_out, work.numbers, work.entries, meta.block_table, meta.counts, scale * LOG2_E,
        0.0, total_q, 0, FAR, 0, heads, heads // kv_heads, 0, 0, programs, head_dim, total_q,
        meta.block_table.stride(0), num_blocks, **fixed, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return partial_out, partial_lse


def _pages(layer_kv: LayerKV, keys: int) -> tuple[Any, Any]:
    """K and V seen as (N * G * B, D), in boxes of ``keys`` rows; outside is 0. Made once a layer,
    for whichever kernel asks first: pools never move."""
    rows, head_dim = layer_kv.k.numel() // layer_kv.k.shape[3], layer_kv.k.shape[3]
    box = keys, padded(head_dim)
    if box not in layer_kv.boxes:
        k_boxes, v_boxes = (
            TensorDescriptor(pool, [rows, head_dim], [head_dim, 1], list(box), PAGES)
            for pool in (layer_kv.k, layer_kv.v)
        )
        layer_kv.boxes[box] = k_boxes, v_boxes
    return layer_kv.boxes[box]


def _boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """x (B, S, G, D) as (B, G, S, D), in boxes of (1, 1, rows, padded D). What lies outside a
    sequence or a head is 0 on the way in and dropped on the way out."""
    batch, length, heads, head_dim = x.shape
    # The stride of a single batch or head may be anything; the copy engine wants 16-byte steps.
    batch_step = x.stride(0) if batch > 1 else length * x.stride(1)
    head_step = x.stride(2) if heads > 1 else x.stride(1)
    shape = [batch, heads, length, head_dim]
    strides = [batch_step, head_step, x.stride(1), 1]
    return TensorDescriptor(x, shape, strides, [1, 1, rows, padded(head_dim)], BOXES)

"""The producer of the Hopper forward: copies boxes of Q, K and V to shared memory, for as many
tiles of rows as its program takes.

K and V have rings of stages, K a tile ahead of V; an mbarrier or a hardware barrier says that
a stage is free again.
"""
# ruff: noqa: RUF059  (a name _ is carried by Triton's loops like any other)

from __future__ import annotations

from stairs.attention.gluon_api import gl, gluon, load_box, mbarrier, numbered_arrive, numbered_sync
from stairs.attention.hopper_boxes import box_keys
from stairs.attention.hopper_order import cut_by, locate, num_rounds, stretches

__all__ = [
    "acquire",
    "advanced",
    "all_threads",
    "has_loader",
    "load_queries",
    "producer",
    "release",
]


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

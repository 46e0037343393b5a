"""The kernel of the Hopper forward (sm_90) in Gluon, over contiguous K and V and over pages.

A program is one producer partition (``hopper_load``), which copies boxes of Q, K and V to shared
memory, and two or three consumers of 64 query rows each. A consumer issues the product of the next
keys before the product with the last values, and takes the softmax while the tensor cores do both.
Keys go from the last tile of a row to the first: cut by the right edge, seen by all rows, cut by
the window. A program takes many tiles of rows (``hopper_order`` says which), and its barriers go
on counting from one to the next.
"""
# ruff: noqa: E741, RUF059, SIM102, SIM108  (l is the softmax denominator in this whole package; a
# name _ is carried by Triton's loops like any other, and a constant decides alone)

from __future__ import annotations

from stairs.attention.gluon_api import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_arrive,
    named_sync,
    numbered_arrive,
    pack_pairs,
    partition_barrier,
    scale_rows,
    store_box,
    store_wait,
    unpack_pairs,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from stairs.attention.hopper_boxes import TILE
from stairs.attention.hopper_load import (
    advanced,
    all_threads,
    has_loader,
    load_queries,
    producer,
    release,
)
from stairs.attention.hopper_order import cut_by, locate, num_rounds, stretches
from stairs.attention.hopper_softmax import quads_layout, weights

__all__ = ["forward_kernel"]

SIZES = ["num_q", "num_kv", "left", "right", "heads", "group", "row_tiles", "num_tiles",
         "programs", "head_dim", "total_q", "table_stride",
         "num_blocks"]  # fmt: skip


@gluon.constexpr_function
def turn(consumer, consumers):
    """The hardware barrier that says it is this consumer's turn to issue products."""
    return str(8 + consumer % consumers)


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
    q_tiles = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 64, BD], TILE)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BN, BD], TILE)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BN, BD], TILE)
    o_tiles = q_tiles
    if SPARE:
        o_tiles = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 64, BD], TILE)
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

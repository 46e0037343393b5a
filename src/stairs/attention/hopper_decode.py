"""Paged attention of short tiles on Hopper, in Gluon: decode and a few new tokens a sequence.

Persistent programs: program (c, head) runs the entries that work.py dealt to c, for one kv head.
One warp copies pages into a ring of K and V tiles, a box a page, and is already at the next entry
while four warps finish the last. Rows up to 16 take mma.sync, where each warp keeps the softmax of
its own quarter of every tile and the four are merged at the end; more rows take wgmma of 64.
Keys past an entry's end never count: scores are masked by a choice, their values are made 0.
"""
# ruff: noqa: E741  (l is the softmax denominator everywhere in this package)

from __future__ import annotations

from torch import Tensor

from stairs.attention.gluon_api import (
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    load_box,
    mbarrier,
    mma_v2,
    partition_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from stairs.attention.hopper import padded
from stairs.attention.hopper_boxes import TILE, box_keys, page_boxes
from stairs.attention.meta import AttnMeta, LayerKV, WorkList
from stairs.attention.tiles import HopperTile
from stairs.attention.triton_paged import merge_partials, partials
from stairs.attention.triton_softmax import LOG2_E

__all__ = ["attend_entries", "attend_short", "constants", "decode_kernel"]


@gluon.jit
def read_entry(entry, exists):
    """(token, num_q, num_kv, row, first_key, last_key, partial, seat); nothing where not."""
    return (
        gl.load(entry, exists, 0),
        gl.load(entry + 1, exists, 0),
        gl.load(entry + 2, exists, 0),
        gl.load(entry + 3, exists, 0),
        gl.load(entry + 4, exists, 0),
        gl.load(entry + 5, exists, 0),
        gl.load(entry + 6, exists, 0),
        gl.load(entry + 7, exists, 0),
    )


@gluon.jit
def num_steps(first_key, last_key, BN: gl.constexpr):
    """Tiles of an entry. Loops count them and do not begin at ``first_key``: Triton 3.6 carries on
    the first entry's where a value that changes is nothing but the start of an inner loop."""
    return (last_key - first_key + BN - 1) // BN


@gluon.jit
def load_tiles(
    k_boxes, v_boxes, table, entries, starts, k_tiles, v_tiles, full, empty, first, head,
    table_stride, num_blocks,
    KV_HEADS: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr, BN: gl.constexpr,
    BD: gl.constexpr, STAGES: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """The producer: every tile of every entry into the ring, in boxes of BOX keys of one page.

    Boxes past the last page that holds a key lie outside the pool, where the copy engine writes
    zeros and reads nothing.
    """
    turn = 0
    _, _, _, _, first_key, last_key, _, seat = read_entry(entries + first * 8, True)
    begin = gl.load(starts + first)
    num = gl.load(starts + first + 1) - begin + 1
    for i in range(num):
        pages = table + seat.to(gl.int64) * table_stride
        for step in range(num_steps(first_key, last_key, BN)):
            start = first_key + step * BN
            stage = turn % STAGES
            # All ids before the wait and the copies: their loads are under way together.
            rows = ()
            for part in gl.static_range(BN // BOX):
                key = start + part * BOX
                page = gl.load(pages + gl.minimum(key, last_key - 1) // BLOCK)
                page = gl.minimum(gl.maximum(page, 0), num_blocks - 1)
                row = (page * KV_HEADS + head) * BLOCK + key % BLOCK
                outside = num_blocks * KV_HEADS * BLOCK
                rows += (gl.where(key < last_key, row, outside),)  # type: ignore[assignment]
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            if CHAINED and turn == 0:  # K and V may have been written just now
                gdc_wait()
            mbarrier.expect(full.index(stage), 4 * BN * BD)
            for part in gl.static_range(BN // BOX):
                to_k = k_tiles.index(stage).slice(part * BOX, BOX, 0)
                load_box(k_boxes, [rows[part], 0], full.index(stage), to_k)
            for part in gl.static_range(BN // BOX):
                to_v = v_tiles.index(stage).slice(part * BOX, BOX, 0)
                load_box(v_boxes, [rows[part], 0], full.index(stage), to_v)
            turn += 1
        following = entries + (begin + i) * 8
        _, _, _, _, first_key, last_key, _, seat = read_entry(following, i + 1 < num)


@gluon.jit
def blank_tail(v_tile, num_keys, BN: gl.constexpr, BD: gl.constexpr):
    """Values from the tile's key ``num_keys`` on become 0: what a page held before may be NaN,
    and 0 x NaN is NaN."""
    SOME: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BD // 8), BD // 8], [4, 1], [1, 0])
    for part in gl.static_range(BN // 16):
        if num_keys < part * 16 + 16:
            values = v_tile.slice(part * 16, 16, 0)
            key = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, SOME))
            values.store(gl.where((key < num_keys)[:, None], values.load(SOME), 0.0))
    fence_async_shared()
    partition_barrier()


@gluon.jit
def store_rows(
    result, lse, out, partial_out, partial_lse, token, num_q, first_row, partial, head,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, BD: gl.constexpr,
    ROWS: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """result (M, BD) and lse (M,) in log2 units, to the output or to their partial."""
    place = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, BD, gl.SliceLayout(0, LAYOUT))
    row = first_row + place
    valid = (row < num_q * GROUP) & (place < ROWS)
    inside = valid[:, None] & (d < D)[None, :]
    if partial < 0:
        at = ((token.to(gl.int64) + row // GROUP) * KV_HEADS + head) * GROUP + row % GROUP
        gl.store(out + at[:, None] * D + d[None, :], result.to(out.dtype.element_ty), inside)
    else:
        at = (partial.to(gl.int64) * KV_HEADS + head) * ROWS + place
        gl.store(partial_out + at[:, None] * D + d[None, :], result, inside)
        gl.store(partial_lse + at, lse, valid)


@gluon.jit
def count(
    counts, seat, num_q, num_kv, first_row, first_key, last_key,
    GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The pairs that an entry visits for one kv head, and the bytes of K and V it reads."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = first_row + gl.arange(0, ROWS, ONE)
    last_seen = gl.minimum(num_kv - num_q + row // GROUP, last_key - 1)
    seen = gl.where(row < num_q * GROUP, gl.maximum(last_seen - first_key + 1, 0), 0)
    at = counts + seat.to(gl.int64) * 3
    gl.atomic_add(at, gl.sum(seen, 0).to(gl.int64))
    keys = gl.maximum(last_key - first_key, 0).to(gl.int64)
    gl.atomic_add(at + 1, gl.where(first_row + ROWS >= num_q * GROUP, keys * (4 * D), 0))


@gluon.jit
def attend_narrow(
    q, out, partial_out, partial_lse, counts, entries, starts, k_tiles, v_tiles, full,
    empty, first, head, scale, q_token, q_head,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, BD: gl.constexpr,
    ROWS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, COUNTING: gl.constexpr,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """The consumer of up to 16 rows. Axes (warp, row, key or d): warp w has keys w * BN / 4 on of
    each tile, so that no warp waits for another's maximum."""
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    ROW: gl.constexpr = gl.SliceLayout(2, S)
    KEYS: gl.constexpr = BN // 4
    element: gl.constexpr = q.dtype.element_ty
    turn = 0
    fields = read_entry(entries + first * 8, True)
    begin = gl.load(starts + first)
    num = gl.load(starts + first + 1) - begin + 1
    if CHAINED:
        gdc_wait()
    for i in range(num):
        token, num_q, num_kv, first_row, first_key, last_key, partial, seat = fields
        if COUNTING:
            count(counts, seat, num_q, num_kv, first_row, first_key, last_key, GROUP, D, ROWS)

        row = first_row + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))
        d = gl.arange(0, BD, gl.SliceLayout(0, gl.SliceLayout(1, A)))
        at = (token.to(gl.int64) + row // GROUP) * q_token + (head * GROUP + row % GROUP) * q_head
        at = at[None, :, None] + d[None, None, :] + gl.zeros([4, 1, 1], gl.int32, A)
        inside = (row < num_q * GROUP)[None, :, None] & (d < D)[None, None, :]
        queries = gl.load(q + at, inside, 0.0)
        row = first_row + gl.arange(0, 16, gl.SliceLayout(0, ROW))
        last_seen = gl.minimum(num_kv - num_q + row // GROUP, last_key - 1)[None, :, None]
        key = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, S)))[:, None, None] * KEYS
        key += gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, S)))[None, None, :]

        m = gl.full([4, 16], float("-inf"), gl.float32, ROW)
        l = gl.zeros([4, 16], gl.float32, ROW)
        acc = gl.zeros([4, 16, BD], gl.float32, S)
        for step in range(num_steps(first_key, last_key, BN)):
            start = first_key + step * BN
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            if last_key - start < BN:
                blank_tail(v_tiles.index(stage), last_key - start, BN, BD)
            k = k_tiles.index(stage).reshape([4, KEYS, BD]).permute([0, 2, 1]).load(B)
            s = mma_v2(queries, k, gl.zeros([4, 16, KEYS], gl.float32, S))
            s = gl.where(start + key <= last_seen, s, float("-inf"))
            peak = gl.maximum(m, gl.max(s, 2) * scale)
            base = gl.where(peak == float("-inf"), 0.0, peak)
            p = gl.exp2(s * scale - base[:, :, None])
            keep = gl.exp2(m - base)
            l = l * keep + gl.sum(p, 2)
            acc = acc * keep[:, :, None]
            m = peak
            v = v_tiles.index(stage).reshape([4, KEYS, BD]).load(B)
            mbarrier.arrive(empty.index(stage), count=1)
            acc = mma_v2(gl.convert_layout(p.to(element), A), v, acc)
            turn += 1

        fields = read_entry(entries + (begin + i) * 8, i + 1 < num)
        # The four warps' states merge, each thread taking one place of all four.
        FOUR: gl.constexpr = gl.BlockedLayout([4, 1, 4], [1, 4, 8], [1, 4, 1], [2, 1, 0])
        FLAT: gl.constexpr = gl.SliceLayout(0, FOUR)
        m = gl.convert_layout(m, gl.SliceLayout(2, FOUR))
        l = gl.convert_layout(l, gl.SliceLayout(2, FOUR))
        peak = gl.max(m, 0)
        base = gl.where(peak == float("-inf"), 0.0, peak)
        weight = gl.exp2(m - base[None, :])
        l = gl.sum(l * weight, 0)
        result = gl.sum(gl.convert_layout(acc, FOUR) * weight[:, :, None], 0)
        seen = l != 0.0
        total = gl.where(seen, l, 1.0)
        inverse = gl.convert_layout(gl.div_rn(1.0, total), gl.SliceLayout(1, FLAT))
        lse = gl.where(seen, peak + gl.log2(total), float("-inf"))
        store_rows(
            result * inverse[:, None], gl.convert_layout(lse, gl.SliceLayout(1, FLAT)), out,
            partial_out, partial_lse, token, num_q, first_row, partial, head,
            GROUP, KV_HEADS, D, BD, ROWS, 16, FLAT,
        )  # fmt: skip


@gluon.jit
def attend_wide(
    q, out, partial_out, partial_lse, counts, entries, starts, k_tiles, v_tiles, full,
    empty, first, head, scale, q_token, q_head,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, BD: gl.constexpr,
    ROWS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, COUNTING: gl.constexpr,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """The consumer of up to 64 rows: one warpgroup's product, its queries in registers."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    QA: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    PA: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    element: gl.constexpr = q.dtype.element_ty
    turn = 0
    fields = read_entry(entries + first * 8, True)
    begin = gl.load(starts + first)
    num = gl.load(starts + first + 1) - begin + 1
    if CHAINED:
        gdc_wait()
    for i in range(num):
        token, num_q, num_kv, first_row, first_key, last_key, partial, seat = fields
        if COUNTING:
            count(counts, seat, num_q, num_kv, first_row, first_key, last_key, GROUP, D, ROWS)

        row = first_row + gl.arange(0, 64, gl.SliceLayout(1, QA))
        d = gl.arange(0, BD, gl.SliceLayout(0, QA))
        at = (token.to(gl.int64) + row // GROUP) * q_token + (head * GROUP + row % GROUP) * q_head
        inside = (row < num_q * GROUP)[:, None] & (d < D)[None, :]
        queries = gl.load(q + at[:, None] + d[None, :], inside, 0.0)
        row = first_row + gl.arange(0, 64, ROW)
        last_seen = gl.minimum(num_kv - num_q + row // GROUP, last_key - 1)
        key = gl.arange(0, BN, gl.SliceLayout(0, S))

        m = gl.full([64], float("-inf"), gl.float32, ROW)
        l = gl.zeros([64], gl.float32, ROW)
        acc = gl.zeros([64, BD], gl.float32, O)
        for step in range(num_steps(first_key, last_key, BN)):
            start = first_key + step * BN
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            s = warpgroup_mma(
                queries, k_tiles.index(stage).permute([1, 0]), gl.zeros([64, BN], gl.float32, S),
                use_acc=False, is_async=True,
            )  # fmt: skip
            if last_key - start < BN:
                blank_tail(v_tiles.index(stage), last_key - start, BN, BD)
            s = warpgroup_mma_wait(0, deps=[s])
            s = gl.where((start + key)[None, :] <= last_seen[:, None], s, float("-inf"))
            peak = gl.maximum(m, gl.max(s, 1) * scale)
            base = gl.where(peak == float("-inf"), 0.0, peak)
            p = gl.exp2(s * scale - base[:, None])
            keep = gl.exp2(m - base)
            l = l * keep + gl.sum(p, 1)
            acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, O))[:, None]
            m = peak
            p = gl.convert_layout(p.to(element), PA)
            acc = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)
            turn += 1

        fields = read_entry(entries + (begin + i) * 8, i + 1 < num)
        seen = l != 0.0
        total = gl.where(seen, l, 1.0)
        inverse = gl.convert_layout(gl.div_rn(1.0, total), gl.SliceLayout(1, O))
        lse = gl.where(seen, m + gl.log2(total), float("-inf"))
        store_rows(
            acc * inverse[:, None], gl.convert_layout(lse, gl.SliceLayout(1, O)), out, partial_out,
            partial_lse, token, num_q, first_row, partial, head,
            GROUP, KV_HEADS, D, BD, ROWS, 64, O,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["table_stride", "num_blocks"])
def decode_kernel(
    k_boxes, v_boxes, q, table, entries, starts, out, partial_out, partial_lse, counts,
    scale, q_token, q_head, table_stride, num_blocks,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr,
    D: gl.constexpr, BD: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, LOADER_REGISTERS: gl.constexpr, COUNTING: gl.constexpr,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """Program (c, head) of C x KV_HEADS: entry c, then entries starts[c] .. starts[c + 1].

    ``scale`` is in log2 units; q (T, H, D), out (T, H, D) dense. CHAINED: launched while the
    kernel before may still run, and the merge while this one does. Both read their lists and the
    block table at once, which are copied to the card and never written by a kernel, and wait
    before they read anything else.
    """
    first = gl.program_id(0) // KV_HEADS
    head = gl.program_id(0) % KV_HEADS
    element: gl.constexpr = q.dtype.element_ty
    k_tiles = gl.allocate_shared_memory(element, [STAGES, BN, BD], TILE)
    v_tiles = gl.allocate_shared_memory(element, [STAGES, BN, BD], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    if CHAINED:
        gdc_launch_dependents()
    if ROWS == 16:
        gl.warp_specialize(
            [
                (attend_narrow, (q, out, partial_out, partial_lse, counts, entries, starts,
                                 k_tiles, v_tiles, full, empty, first, head, scale, q_token, q_head,
                                 GROUP, KV_HEADS, D, BD, ROWS, BN, STAGES, COUNTING,
                                 CHAINED)),
                (load_tiles, (k_boxes, v_boxes, table, entries, starts, k_tiles, v_tiles, full,
                              empty, first, head, table_stride, num_blocks, KV_HEADS, BLOCK, BOX,
                              BN, BD, STAGES, CHAINED)),
            ],
            [1],
            [LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_wide, (q, out, partial_out, partial_lse, counts, entries, starts,
                               k_tiles, v_tiles, full, empty, first, head, scale, q_token, q_head,
                               GROUP, KV_HEADS, D, BD, ROWS, BN, STAGES, COUNTING,
                               CHAINED)),
                (load_tiles, (k_boxes, v_boxes, table, entries, starts, k_tiles, v_tiles, full,
                              empty, first, head, table_stride, num_blocks, KV_HEADS, BLOCK, BOX,
                              BN, BD, STAGES, CHAINED)),
            ],
            [1],
            [LOADER_REGISTERS],
        )  # fmt: skip


def constants(
    tile: HopperTile, *, group: int, kv_heads: int, block_size: int, head_dim: int, counting: bool
) -> dict[str, int]:  # fmt: skip
    """What ``decode_kernel`` is compiled for."""
    box = box_keys(block_size, tile.keys)
    return {
        "GROUP": group, "KV_HEADS": kv_heads, "BLOCK": block_size, "BOX": box, "D": head_dim,
        "BD": padded(head_dim), "ROWS": tile.rows, "BN": tile.keys, "STAGES": tile.num_stages,
        "COUNTING": counting, "CHAINED": tile.is_chained,
        # The ids of a tile's pages are held at one time.
        "LOADER_REGISTERS": 40 if tile.keys // box > 4 else 32,
    }  # fmt: skip


def attend_short(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, *, scale: float, out: Tensor
) -> None:
    """What ``work`` holds of q (T, H, D), D side by side, into ``out`` (T, H, D) contiguous.

    hopper_decode_lacks() has said that nothing is against it.
    """
    partial = attend_entries(q, layer_kv, meta, work, scale=scale, out=out)
    merge_partials(work, *partial, out, batch_invariant=meta.batch_invariant)


def attend_entries(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, *, scale: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """The entries of ``work``: whole rows into ``out``, parts of others into what is returned."""
    tile = work.tile
    assert isinstance(tile, HopperTile)
    num_blocks, kv_heads, block_size, head_dim = layer_kv.k.shape
    constant = constants(
        tile, group=q.shape[1] // kv_heads, kv_heads=kv_heads, block_size=block_size,
        head_dim=head_dim, counting=meta.counting,
    )  # fmt: skip
    k_boxes, v_boxes = page_boxes(layer_kv, constant["BOX"])
    partial_out, partial_lse = partials(q, work, kv_heads)
    num_programs = (work.starts.shape[0] - 1) * kv_heads
    decode_kernel[(num_programs,)](
        k_boxes, v_boxes, q, meta.block_table, work.entries, work.starts, out, partial_out,
        partial_lse, meta.counts, scale * LOG2_E, q.stride(0), q.stride(1),
        meta.block_table.stride(0), num_blocks, **constant, num_warps=4,
        maxnreg=tile.max_registers, enable_fp_fusion=True, launch_pdl=tile.is_chained,
    )  # fmt: skip
    return partial_out, partial_lse

"""Paged attention in plain Triton: the K/V write, ragged attention over ``work``, the merge.

Chunk and decode rows run the same kernel with other tiles. Query heads of a kv head are packed as
rows of one product, so K and V are read once for the group. Exactly the keys of an entry are
loaded: the end of a page and the table past it never are. Page ids and slots outside the pool
cannot leave it (ids are clamped, slots dropped): on a GPU nothing can raise.
"""
# ruff: noqa: E741  (l is the softmax denominator everywhere in this package)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stairs.attention.meta import AttnMeta, LayerKV, WorkList
from stairs.attention.tiles import HopperTile, TritonTile
from stairs.attention.triton_softmax import LOG2_E, finish, tile_update

__all__ = [
    "attend_cut",
    "merge_kernel",
    "merge_partials",
    "paged_kernel",
    "partials",
    "write_kernel",
    "write_pages",
]


@triton.jit(do_not_specialize=["num_slots"])
def write_kernel(
    k, v, k_pool, v_pool, slots, num_slots, k_token, k_head, v_token, v_head, page_stride,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """Rows k, v (T, G, D) to page slot // BLOCK, place slot % BLOCK of the pools; a token each."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, BH)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (head < KV_HEADS) & (d < D) & (slot >= 0) & (slot < num_slots)
    place = (slot // BLOCK) * page_stride + (head * BLOCK + slot % BLOCK) * D + d
    row = tl.load(k + token * k_token + head * k_head + d, inside)
    tl.store(k_pool + place, row.to(k_pool.dtype.element_ty), inside)
    row = tl.load(v + token * v_token + head * v_head + d, inside)
    tl.store(v_pool + place, row.to(v_pool.dtype.element_ty), inside)


@triton.jit
def locate(
    table, columns, last_key, head, d, num_blocks, page_stride,
    BLOCK: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Offsets (N, BD) of keys ``columns`` in a pool, and which of them exist (WHOLE: all)."""
    inside = columns < last_key
    if WHOLE:
        page = tl.load(table + columns // BLOCK)
    else:
        page = tl.load(table + columns // BLOCK, inside, 0)
    page = tl.minimum(tl.maximum(page, 0), num_blocks - 1).to(tl.int64)
    rows = page * page_stride + (head * BLOCK + columns % BLOCK) * D
    return rows[:, None] + d[None, :], inside


@triton.jit(do_not_specialize=["table_stride", "num_blocks"])
def paged_kernel(
    q, k_pool, v_pool, table, entries, numbers, out, partial_out, partial_lse, counts,
    scale, q_token, q_head, page_stride, table_stride, num_blocks,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TALL: tl.constexpr,
    COUNTING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One entry for one kv head. ``scale`` is in log2 units; q (T, H, D), out (T, H, D) dense.

    TALL: keys that all rows see take a loop without masks, the diagonal one with. Short tiles
    keep one masked loop, because a second would drain the pipeline of loads once more.
    """
    work = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    if work >= tl.load(numbers):
        return
    entry = entries + work * 8
    token = tl.load(entry).to(tl.int64)
    num_q = tl.load(entry + 1)
    num_kv = tl.load(entry + 2)
    first_row = tl.load(entry + 3)
    first_key = tl.load(entry + 4)
    last_key = tl.load(entry + 5)
    partial = tl.load(entry + 6)
    seat = tl.load(entry + 7).to(tl.int64)

    row = first_row + tl.arange(0, BM)
    query = row // GROUP
    q_heads = head * GROUP + row % GROUP
    d = tl.arange(0, BD)
    valid = (row < num_q * GROUP)[:, None] & (d < D)[None, :]
    q_at = (token + query)[:, None] * q_token + q_heads[:, None] * q_head + d[None, :]
    queries = tl.load(q + q_at, valid, 0.0)
    last_seen = tl.minimum(num_kv - num_q + query, last_key - 1)

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    pages = table + seat * table_stride
    in_head = (d < D)[None, :]
    masked_from = first_key
    if TALL:
        # Keys up to the first row's staircase need no mask.
        shared = tl.minimum(num_kv - num_q + first_row // GROUP + 1, last_key)
        masked_from = first_key + tl.maximum(shared - first_key, 0) // BN * BN
        for start in range(first_key, masked_from, BN):
            columns = start + tl.arange(0, BN)
            at, inside = locate(
                pages, columns, last_key, head, d, num_blocks, page_stride, BLOCK, D, True
            )
            if D == BD:
                k = tl.load(k_pool + at)
                v = tl.load(v_pool + at)
            else:
                k = tl.load(k_pool + at, in_head, 0.0)
                v = tl.load(v_pool + at, in_head, 0.0)
            m, l, acc = tile_update(
                queries, k.to(q.dtype.element_ty), v.to(q.dtype.element_ty), m, l, acc, columns,
                last_seen, last_seen, scale, 0.0, False, False, False, PRECISION,
            )  # fmt: skip
    for start in range(masked_from, last_key, BN):
        columns = start + tl.arange(0, BN)
        at, inside = locate(
            pages, columns, last_key, head, d, num_blocks, page_stride, BLOCK, D, False
        )
        k = tl.load(k_pool + at, inside[:, None] & in_head, 0.0)
        v = tl.load(v_pool + at, inside[:, None] & in_head, 0.0)
        m, l, acc = tile_update(
            queries, k.to(q.dtype.element_ty), v.to(q.dtype.element_ty), m, l, acc, columns,
            last_seen, last_seen, scale, 0.0, True, False, False, PRECISION,
        )  # fmt: skip

    if COUNTING:
        seen = tl.maximum(last_seen - first_key + 1, 0)
        pairs = tl.sum(tl.where(row < num_q * GROUP, seen, 0).to(tl.int64))
        tl.atomic_add(counts + seat * 3, pairs)
        # Bytes from memory: the tiles of one sequence and head read the same keys, and all but
        # one find them in the cache. The last tile sees the most.
        itemsize: tl.constexpr = k_pool.dtype.element_ty.primitive_bitwidth // 8
        keys = tl.maximum(last_key - first_key, 0).to(tl.int64)
        if first_row + BM >= num_q * GROUP:
            tl.atomic_add(counts + seat * 3 + 1, keys * (2 * D * itemsize))

    result, lse = finish(m, l, acc)
    if partial < 0:
        o_at = (token + query)[:, None] * (KV_HEADS * GROUP * D) + q_heads[:, None] * D + d[None, :]
        tl.store(out + o_at, result.to(out.dtype.element_ty), valid)
    else:
        slot = (partial.to(tl.int64) * KV_HEADS + head) * BM + tl.arange(0, BM)
        tl.store(partial_out + slot[:, None] * D + d[None, :], result, valid)
        tl.store(partial_lse + slot, lse, row < num_q * GROUP)


MANY_ROWS = 1024  # of results to merge: from here on one program takes all columns of a row


@triton.jit(do_not_specialize=["most_rows"])
def merge_kernel(
    partial_out, partial_lse, merges, numbers, out, most_rows,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """COLUMNS of one row of one merge: O = sum O_i exp2(LSE_i) / sum exp2(LSE_i), PARTS at a
    time, always in the order of the keys. CHAINED: launched while the partials are being made."""
    slices: tl.constexpr = BD // COLUMNS
    first = tl.program_id(0) % slices * COLUMNS
    place = tl.program_id(0) // slices % most_rows
    head = tl.program_id(0) // slices // most_rows % KV_HEADS
    index = tl.program_id(0) // slices // most_rows // KV_HEADS
    num_merges = tl.load(numbers + 1)
    merge = merges + index * 8
    token = tl.load(merge).to(tl.int64)
    num_q = tl.load(merge + 1)
    row = tl.load(merge + 2) + place
    partial = tl.load(merge + 3).to(tl.int64)
    num_partials = tl.load(merge + 4)
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()  # also where nothing is merged: what follows us must not overtake the partials
    if (index >= num_merges) | (row >= num_q * GROUP):
        return
    d = first + tl.arange(0, COLUMNS)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, num_partials, PARTS):
        part = start + tl.arange(0, PARTS)
        present = part < num_partials
        slot = ((partial + part) * KV_HEADS + head) * BM + place
        lse = tl.load(partial_lse + slot, present, float("-inf"))
        rows = tl.load(
            partial_out + slot[:, None] * D + d[None, :], present[:, None] & (d < D)[None, :], 0.0
        )
        peak = tl.maximum(m, tl.max(lse, 0))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(lse - base)
        keep = tl.exp2(m - base)
        l = l * keep + tl.sum(weight, 0)
        acc = acc * keep + tl.sum(rows * weight[:, None], 0)
        m = peak
    o_at = ((token + row // GROUP) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP) * D + d
    result = acc * tl.div_rn(tl.full([1], 1.0, tl.float32), tl.where(l == 0.0, 1.0, l))
    tl.store(out + o_at, result.to(out.dtype.element_ty), d < D)


def write_pages(k: Tensor, v: Tensor, layer_kv: LayerKV, meta: AttnMeta) -> None:
    """Put rows k, v (T, G, D) at ``meta.slots``; a slot outside the pool is dropped."""
    num_tokens, kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    if k.stride(2) != 1 or v.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    num_blocks, _, block_size, _ = layer_kv.k.shape
    write_kernel[(num_tokens,)](
        k, v, layer_kv.k, layer_kv.v, meta.slots, num_blocks * block_size,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), layer_kv.k.stride(0),
        KV_HEADS=kv_heads, BLOCK=block_size, D=head_dim, BD=triton.next_power_of_2(head_dim),
        BH=triton.next_power_of_2(kv_heads), num_warps=1 if kv_heads * head_dim <= 512 else 4,
    )  # fmt: skip
    if meta.counting:
        row_bytes = 2 * kv_heads * head_dim * layer_kv.k.element_size()
        meta.counts[:, AttnMeta.KV_BYTES_WRITTEN] += meta.cu_q.diff() * row_bytes


def partials(q: Tensor, work: WorkList, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Room for the partial results of ``work``: O (P, G, rows, D) and LSE (P, G, rows).

    Allocated a call: the caching allocator orders its reuse by stream, so that two streams never
    share a workspace.
    """
    shape = (work.num_partials, kv_heads, work.tile.rows)
    out = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
    return out, torch.empty(shape, dtype=torch.float32, device=q.device)


def attend_cut(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, *, scale: float, out: Tensor
) -> None:
    """What ``work`` holds of q (T, H, D), D side by side, into ``out`` (T, H, D) contiguous."""
    tile = work.tile
    assert isinstance(tile, TritonTile)
    num_entries = work.entries.shape[0]
    if not num_entries:
        return
    num_blocks, kv_heads, block_size, head_dim = layer_kv.k.shape
    partial_out, partial_lse = partials(q, work, kv_heads)
    paged_kernel[(num_entries * kv_heads,)](
        q, layer_kv.k, layer_kv.v, meta.block_table, work.entries, work.numbers, out, partial_out,
        partial_lse, meta.counts, scale * LOG2_E, q.stride(0), q.stride(1), layer_kv.k.stride(0),
        meta.block_table.stride(0), num_blocks, GROUP=q.shape[1] // kv_heads, KV_HEADS=kv_heads,
        BLOCK=block_size, D=head_dim, BD=max(16, triton.next_power_of_2(head_dim)), BM=tile.rows,
        BN=tile.keys, TALL=tile.tall, COUNTING=meta.counting,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    merge_partials(
        work, partial_out, partial_lse, out, batch_invariant=meta.batch_invariant
    )  # fmt: skip


def merge_partials(
    work: WorkList, partial_out: Tensor, partial_lse: Tensor, out: Tensor,
    *, batch_invariant: bool,
) -> None:  # fmt: skip
    """Join the parts of the rows of ``out`` (T, H, D) that were cut; in an order that depends on
    the row's own number of parts alone if ``batch_invariant``."""
    _, kv_heads, rows, head_dim = partial_out.shape
    num_merges = work.merges.shape[0]
    if not num_merges:
        return
    is_chained = isinstance(work.tile, HopperTile) and work.tile.is_chained
    head_block = max(16, triton.next_power_of_2(head_dim))
    num_rows = num_merges * kv_heads * work.most_rows
    if num_rows < MANY_ROWS or batch_invariant:
        columns, num_warps = min(head_block, 32), 2  # narrow, so that few rows still fill the card
    else:
        columns, num_warps = min(head_block, 128), 1
    parts = 16
    if work.most_partials > 16 and not batch_invariant:
        parts = 64
    elif work.most_partials <= 4 and num_warps == 1:
        parts = 4
    merge_kernel[(num_rows * (head_block // columns),)](
        partial_out, partial_lse, work.merges, work.numbers, out, work.most_rows,
        GROUP=out.shape[1] // kv_heads, KV_HEADS=kv_heads, D=head_dim, BD=head_block, BM=rows,
        PARTS=parts, COLUMNS=columns, CHAINED=is_chained, num_warps=num_warps,
        launch_pdl=is_chained,
    )  # fmt: skip

"""Attention over contiguous K and V in plain Triton: dense batches and ragged ones.

One program is one tile of queries of one head of one sequence. Keys come in three stretches: cut
by the window's left edge, seen by all rows, cut by the staircase; only the middle one is without
masks. Offsets of tiles are 64-bit, those inside a tile 32-bit.
"""
# ruff: noqa: E741  (l is the softmax denominator everywhere in this package)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stairs.attention.tiles import TritonTile
from stairs.attention.triton_softmax import LN2, LOG2_E, finish, tile_update

__all__ = ["flash_forward", "flash_kernel"]

FAR = 2**30  # a window's side that is open


@triton.jit
def flash_stretch(
    q, k, v, m, l, acc, start, stop, num_kv, k_row, v_row, batch, first_kv, column, d,
    first_seen, last_seen, scale, cap, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    BOXES: tl.constexpr, RAGGED: tl.constexpr, MASKED: tl.constexpr, LEFT: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys start .. stop in tiles of BN; all of them exist where not MASKED.

    k and v point at the sequence's first row of its head, or are descriptors of all sequences
    (BOXES), in which it begins at row ``first_kv`` of ``batch`` and its head at ``column``.
    """
    place = tl.arange(0, BN)
    for first in range(start, stop, BN):
        columns = first + place
        if BOXES:
            k_tile = k.load([batch, first_kv + first, column]).reshape(BN, BD)
            v_tile = v.load([batch, first_kv + first, column]).reshape(BN, BD)
            if MASKED and RAGGED:  # what follows is another sequence's, and may be NaN
                v_tile = tl.where((columns < num_kv)[:, None], v_tile, 0.0)
        else:
            k_at = tl.cast(first, tl.int64) * k_row + place[:, None] * k_row + d[None, :]
            v_at = tl.cast(first, tl.int64) * v_row + place[:, None] * v_row + d[None, :]
            if MASKED:
                inside = (columns < num_kv)[:, None] & (d < D)[None, :]
                k_tile = tl.load(k + k_at, inside, 0.0)
                v_tile = tl.load(v + v_at, inside, 0.0)
            elif D == BD:
                k_tile = tl.load(k + k_at)
                v_tile = tl.load(v + v_at)
            else:
                k_tile = tl.load(k + k_at, (d < D)[None, :], 0.0)
                v_tile = tl.load(v + v_at, (d < D)[None, :], 0.0)
        m, l, acc = tile_update(
            q, k_tile, v_tile, m, l, acc, columns, first_seen, last_seen, scale, cap,
            MASKED, LEFT, CAPPED, PRECISION,
        )  # fmt: skip
    return m, l, acc


@triton.jit(do_not_specialize=["num_q", "num_kv", "row_tiles", "left", "right", "total_q"])
def flash_kernel(
    q, k, v, out, lse, cu_q, cu_kv, scale, cap, num_q, num_kv, row_tiles, left, right, total_q,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BOXES: tl.constexpr, RAGGED: tl.constexpr,
    RIGHT: tl.constexpr, LEFT: tl.constexpr, CAPPED: tl.constexpr, LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (rows, H, D) dense, lse (H, rows) natural log. Key j is visible to query i when
    i + past - left <= j <= i + past + right, past = num_kv - num_q; the last tile comes first,
    for under a staircase it is the longest."""
    tile = row_tiles - 1 - tl.program_id(0) % row_tiles
    head = tl.program_id(0) // row_tiles % HEADS
    batch = (tl.program_id(0) // (row_tiles * HEADS)).to(tl.int64)
    first_q = batch * num_q
    first_kv = 0
    box = batch.to(tl.int32)
    column = head // GROUP * D
    if RAGGED:
        first_q = tl.load(cu_q + batch).to(tl.int64)
        num_q = (tl.load(cu_q + batch + 1) - first_q).to(tl.int32)
        first_kv = tl.load(cu_kv + batch)
        num_kv = tl.load(cu_kv + batch + 1) - first_kv
        box = 0
        q += first_q * q_row
        if not BOXES:
            k += first_kv.to(tl.int64) * k_row
            v += first_kv.to(tl.int64) * v_row
    else:
        q += batch * q_batch
        if not BOXES:
            k += batch * k_batch
            v += batch * v_batch
    row0 = tile * BM
    if row0 >= num_q:
        return
    row = row0 + tl.arange(0, BM)
    d = tl.arange(0, BD)
    valid = (row < num_q)[:, None] & (d < D)[None, :]
    q_at = (
        tl.cast(row0, tl.int64) * q_row
        + tl.arange(0, BM)[:, None] * q_row
        + head * q_head
        + d[None, :]
    )
    queries = tl.load(q + q_at, valid, 0.0)
    if not BOXES:
        k += (head // GROUP) * k_head
        v += (head // GROUP) * v_head

    past = num_kv - num_q
    last_seen = tl.zeros([BM], tl.int32) + num_kv - 1
    start = 0
    clear = 0  # where every row's window has begun
    full = num_kv // BN * BN  # up to where every row sees all
    stop = num_kv
    if RIGHT:
        last_seen = tl.minimum(last_seen, row + past + right)
        full = tl.minimum(full, tl.maximum(row0 + past + right + 1, 0) // BN * BN)
        stop = tl.minimum(stop, tl.maximum(row0 + BM + past + right, 0))
    first_seen = row + past - left
    if LEFT:
        start = tl.maximum(row0 + past - left, 0) // BN * BN
        clear = tl.maximum(row0 + BM - 1 + past - left, 0)
        clear = tl.minimum((clear + BN - 1) // BN * BN, full)
        full = tl.maximum(full, clear)
        clear = tl.maximum(clear, start)
        full = tl.maximum(full, clear)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    if LEFT:
        m, l, acc = flash_stretch(
            queries, k, v, m, l, acc, start, clear, num_kv, k_row, v_row, box, first_kv, column,
            d, first_seen, last_seen, scale, cap, D, BD, BN, BOXES, RAGGED, True, True, CAPPED,
            PRECISION,
        )  # fmt: skip
    m, l, acc = flash_stretch(
        queries, k, v, m, l, acc, clear, full, num_kv, k_row, v_row, box, first_kv, column, d,
        first_seen, last_seen, scale, cap, D, BD, BN, BOXES, RAGGED, False, False, CAPPED,
            PRECISION,
    )  # fmt: skip
    m, l, acc = flash_stretch(
        queries, k, v, m, l, acc, full, stop, num_kv, k_row, v_row, box, first_kv, column, d,
        first_seen, last_seen, scale, cap, D, BD, BN, BOXES, RAGGED, True, LEFT, CAPPED,
            PRECISION,
    )  # fmt: skip

    result, log2_sum = finish(m, l, acc)
    o_at = ((first_q + row)[:, None] * HEADS + head) * D + d[None, :]
    tl.store(out + o_at, result.to(out.dtype.element_ty), valid)
    if LSE:
        at = (batch * HEADS + head) * num_q + row
        if RAGGED:
            at = head.to(tl.int64) * total_q + first_q + row
        tl.store(lse + at, log2_sum * LN2, row < num_q)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, cu_q: Tensor | None, cu_kv: Tensor | None, max_q: int,
    scale: float, causal: bool, window: tuple[int, int], softcap: float, return_lse: bool,
    tile: TritonTile, uses_boxes: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, Sq, H, D), k and v (B, Sk, G, D) dense; or ragged with B = 1 and the sequences'
    ends in cu_q and cu_kv, none longer than ``max_q``. LSE (B, H, Sq), or (1, H, Sq) ragged;
    empty unless asked for. ``window``: keys to the left and right, -1 for no bound.
    ``uses_boxes``: the card copies K and V in boxes (TMA, sm_90 on), where their layout allows.
    """
    q, k, v = (x if x.stride(-1) == 1 or not x.numel() else x.contiguous() for x in (q, k, v))
    batch, num_q, heads, head_dim = q.shape
    num_kv, kv_heads = k.shape[1:3]
    out = torch.empty((batch, num_q, heads, head_dim), dtype=q.dtype, device=q.device)
    lse_shape = (batch, heads, num_q) if return_lse else (0,)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    sequences = batch if cu_q is None else len(cu_q) - 1
    row_tiles = triton.cdiv(max_q, tile.rows)
    if not sequences * row_tiles or not out.numel():
        return out, lse
    left, right = (side if side >= 0 else FAR for side in window)
    if causal:
        right = 0 if right == FAR else min(right, 0)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    boxes = uses_boxes and _fits_boxes(k) and _fits_boxes(v)
    keys, values = (_boxes(x, tile.keys) if boxes else x for x in (k, v))
    flash_kernel[(row_tiles * heads * sequences,)](
        q, keys, values, out, lse, cu_q, cu_kv, scale if softcap else scale * LOG2_E, softcap,
        num_q, num_kv, row_tiles, left, right, num_q,
        *strides,
        HEADS=heads, GROUP=heads // kv_heads, D=head_dim,
        BD=max(16, triton.next_power_of_2(head_dim)), BM=tile.rows, BN=tile.keys,
        BOXES=boxes, RAGGED=cu_q is not None, RIGHT=right < FAR, LEFT=left < FAR,
        CAPPED=softcap > 0, LSE=return_lse,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out, lse


def _fits_boxes(x: Tensor) -> bool:
    """Whether a copy engine can take boxes of (rows, D) from x (B, S, G, D): 16-byte steps, heads
    side by side, D a power of two of at least 32 bytes."""
    batch, rows, heads, head_dim = x.shape
    size = x.element_size()
    steps = (x.data_ptr(), x.stride(0) * size if batch > 1 else 0, x.stride(1) * size)
    return (
        min(batch, rows) > 0
        and head_dim & (head_dim - 1) == 0
        and head_dim * size >= 32
        and (heads == 1 or x.stride(2) == head_dim)
        and all(step % 16 == 0 for step in steps)
        and rows < 2**31
    )


def _boxes(x: Tensor, keys: int) -> TensorDescriptor:
    """x (B, S, G, D) as (B, S, G * D), read in boxes of (1, keys, D); what lies outside is 0."""
    batch, rows, heads, head_dim = x.shape
    strides = [x.stride(0) if batch > 1 else rows * x.stride(1), x.stride(1), 1]
    return TensorDescriptor(x, [batch, rows, heads * head_dim], strides, [1, keys, head_dim])

"""The attention kernel of CPUs, in Numba: chunks and decodes alike.

Pages are read in place, once for all queries and query heads of a group, with float32
accumulation (float64 for float64 inputs). The work is cut into tiles of ``KEY_TILE`` keys; every
thread takes an equal run of tiles over all (sequence, kv head) pairs, so that one long context
uses all threads, and partial states are merged by the law of ``online``. One thread calls it.
"""
# ruff: noqa: E741  (l is the softmax denominator everywhere in this package)

from __future__ import annotations

import math

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from stairs.attention.choose import KEY_TILE
from stairs.attention.cpu_tiles import largest, score_tile, value_tile
from stairs.attention.cpu_vectors import pointer, shifted
from stairs.attention.jit import exp_float32, njit, prange, use_torch_threads
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.reference import compute_dtype

__all__ = ["attend_pages", "write_and_attend"]


SHARED_ROWS = 64  # of a sequence: from here on waking threads costs less than merging its rows

# Sums may be reordered and contracted. No flag here lets the compiler assume finite values:
# -inf, inf and NaN keep their meaning.
_SUMS = {"reassoc", "contract", "nsz"}


def _exp(value):
    raise NotImplementedError


@overload(_exp)
def _exp_overload(value):
    if value == types.float32:
        return lambda value: exp_float32(value)
    return lambda value: math.exp(value)


@njit
def _exponentials(scores, row, num, largest):
    for j in range(num):
        scores[row, j] = _exp(scores[row, j] - largest)


@njit(fastmath=_SUMS)
def _total(weights, row, num):
    total = weights.dtype.type(0)
    for j in range(num):
        total += weights[row, j]
    return total


@njit(error_model="numpy")
def _attend_tile(
    q, num_q, group, past, k_pool, v_pool, pages, page_stride, block_size, head_dim, start, end,
    scores, parts,
):  # fmt: skip
    """Add the tile of keys at ``start`` to every row that sees some of them; the pairs it visited.

    Rows are (query, head of the group); ``end`` is where this thread's run of keys ends. q, pools,
    pages and parts are pointers as in ``cpu_tiles``.
    """
    width, stride = head_dim + 2, scores.shape[1]
    stop, weights = min(start + stride, end), pointer(scores)
    score_tile(
        q, num_q, group, past, k_pool, v_pool, pages, page_stride, block_size, head_dim, start,
        stop, weights, stride,
    )  # fmt: skip
    num_pairs = 0
    for row in range(num_q * group):
        seen = min(stop, past + row // group + 1) - start
        if seen > 0:
            part = shifted(parts, row * width)
            m, l = part[head_dim], part[head_dim + 1]
            most = largest(shifted(weights, row * stride), seen, m)
            kept = _exp(m - most)
            _exponentials(scores, row, seen, most)
            part[head_dim] = most
            part[head_dim + 1] = l * kept + _total(scores, row, seen)
            for e in range(head_dim):
                part[e] *= kept
            num_pairs += seen
    value_tile(
        weights, stride, num_q, group, past, k_pool, v_pool, pages, page_stride, block_size,
        head_dim, start, stop, end, parts, width,
    )  # fmt: skip
    return num_pairs


@njit
def _check_ids(cu_q, kv_len, block_table, slots, num_pages, block_size):
    """Raise before anything is read or written through an id that is not in the pool."""
    for slot in slots:
        if slot < 0 or slot >= num_pages * block_size:
            raise IndexError("slot outside the K/V pool")
    for seat in range(kv_len.shape[0]):
        if cu_q[seat] < cu_q[seat + 1]:
            for column in range((kv_len[seat] + block_size - 1) // block_size):
                if block_table[seat, column] < 0 or block_table[seat, column] >= num_pages:
                    raise IndexError("page id outside the K/V pool")


@njit
def _write(rows, pool, slots):
    _, kv_heads, block_size, head_dim = pool.shape
    for token in range(rows.shape[0]):
        page, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(kv_heads):
            for e in range(head_dim):
                pool[page, head, offset, e] = rows[token, head, e]


@njit
def _plan(cu_q, kv_len, group, key_tile, plan):
    """Fill plan (S, 2) with rows and tiles; the largest number of rows."""
    most_rows = 0
    for seat in range(kv_len.shape[0]):
        rows = (cu_q[seat + 1] - cu_q[seat]) * group
        plan[seat, 0] = rows
        plan[seat, 1] = (kv_len[seat] + key_tile - 1) // key_tile if rows else 0
        most_rows = max(most_rows, rows)
    return most_rows


@njit
def _slots(plan, kv_heads, num_threads, first_rows):
    """Fill first_rows with where each slot's rows of the partial states begin, and their number
    last: thread t leaves what it did of a task at slot task + t."""
    num_tasks = plan.shape[0] * kv_heads
    first_rows[0] = 0
    for slot in range(first_rows.shape[0] - 1):
        rows = 0
        for task in range(max(0, slot - num_threads + 1), min(slot + 1, num_tasks)):
            rows = max(rows, plan[task // kv_heads, 0])
        first_rows[slot + 1] = first_rows[slot] + rows


@njit
def _cost(tile, num_q, past, group, key_tile):
    """The rows that see a key of each tile before ``tile``, summed: an estimate that only balances
    threads. A single query's tile costs its bytes too."""
    if num_q == 1:
        return tile * max(group, 4)
    full = min(tile, past // key_tile + 1)  # tiles that every query sees
    rest = tile - full
    lost = key_tile * (rest * (full + tile - 1) // 2)
    return group * (full * num_q + rest * (num_q + past) - lost)


@njit
def _tile_at(cost, tiles, num_q, past, group, key_tile):
    """The first tile before which there is a cost of at least ``cost``, or ``tiles``."""
    low, high = 0, tiles
    while low < high:
        middle = (low + high) // 2
        if _cost(middle, num_q, past, group, key_tile) >= cost:
            high = middle
        else:
            low = middle + 1
    return low


@njit
def _attend_part(
    thread, num_threads, key_tile, whole, q, k_pool, v_pool, cu_q, kv_len, table, scale, plan,
    most_rows, first_rows, parts, visits,
):  # fmt: skip
    """One thread's run of tiles, an equal share of the cost over all (sequence, kv head) tasks.

    Its part of a task lies at slot task + thread: no two parts share a slot, because a thread
    enters a task only where the thread before it left it. ``whole``: no task is cut.
    """
    _, kv_heads, block_size, head_dim = k_pool.shape
    page_stride = kv_heads * block_size * head_dim
    group = q.shape[1] // kv_heads
    total = 0
    for seat in range(kv_len.shape[0]):
        num_q = plan[seat, 0] // group
        past = kv_len[seat] - num_q
        total += _cost(plan[seat, 1], num_q, past, group, key_tile) * kv_heads
    first, last = total * thread // num_threads, total * (thread + 1) // num_threads
    queries = np.empty((most_rows, head_dim), q.dtype)
    scores = np.empty((most_rows, key_tile), q.dtype)
    base = 0
    for task in range(kv_len.shape[0] * kv_heads):
        seat, head = task // kv_heads, task % kv_heads
        tiles, num_q = plan[seat, 1], plan[seat, 0] // group
        past = kv_len[seat] - num_q
        # A tile belongs to the thread in whose range its first unit of cost lies.
        if whole:
            low, high = 0, tiles if first <= base < last else 0
        else:
            low = _tile_at(first - base, tiles, num_q, past, group, key_tile)
            high = _tile_at(last - base, tiles, num_q, past, group, key_tile)
        base += _cost(tiles, num_q, past, group, key_tile)
        if low >= high:
            continue
        slot = task + thread
        first_row = first_rows[slot]
        for row in range(num_q * group):
            query, column = cu_q[seat] + row // group, head * group + row % group
            for e in range(head_dim):
                queries[row, e] = scale * q[query, column, e]
                parts[first_row + row, e] = 0
            parts[first_row + row, head_dim] = -np.inf
            parts[first_row + row, head_dim + 1] = 0
        end = min(high * key_tile, kv_len[seat])
        pages = shifted(pointer(table), seat * table.shape[1])
        part = shifted(pointer(parts), first_row * parts.shape[1])
        first_of_head = head * block_size * head_dim
        visits[slot, 0] = task
        for start in range(low * key_tile, end, key_tile):
            visits[slot, 1] += _attend_tile(
                pointer(queries), num_q, group, past, shifted(pointer(k_pool), first_of_head),
                shifted(pointer(v_pool), first_of_head), pages, page_stride, block_size, head_dim,
                start, end, scores, part,
            )  # fmt: skip
        visits[slot, 2] += end - low * key_tile


@njit
def _count(num_threads, kv_heads, key_bytes, visits, counts):
    for slot in range(visits.shape[0]):
        if visits[slot, 0] >= 0:
            seat = visits[slot, 0] // kv_heads
            counts[seat, 0] += visits[slot, 1]
            counts[seat, 1] += visits[slot, 2] * key_bytes


@njit(error_model="numpy")  # a quotient that may raise is not vectorised
def _finish(
    share, num_shares, num_threads, cu_q, plan, first_rows, parts, visits, kv_heads, out
):  # fmt: skip
    """Merge the parts of a share of every task's rows and divide by the denominator."""
    head_dim = out.shape[2]
    group = out.shape[1] // kv_heads
    m, l = head_dim, head_dim + 1
    for task in range(plan.shape[0] * kv_heads):
        seat, head = task // kv_heads, task % kv_heads
        rows = plan[seat, 0]
        for row in range(rows * share // num_shares, rows * (share + 1) // num_shares):
            query, column = cu_q[seat] + row // group, head * group + row % group
            largest = -parts.dtype.type(np.inf)
            for slot in range(task, task + num_threads):
                if visits[slot, 0] == task:
                    largest = max(largest, parts[first_rows[slot] + row, m])
            total = parts.dtype.type(0)
            out[query, column] = 0
            for slot in range(task, task + num_threads):
                part = first_rows[slot] + row
                if visits[slot, 0] == task and parts[part, l] != 0:
                    kept = _exp(parts[part, m] - largest)
                    total += kept * parts[part, l]
                    for e in range(head_dim):
                        out[query, column, e] += kept * parts[part, e]
            if total != 0:  # true for NaN, which must arrive
                for e in range(head_dim):
                    out[query, column, e] /= total


@njit(parallel=True, nogil=True, cache=True)
def write_and_attend(
    q, k, v, k_pool, v_pool, cu_q, kv_len, block_table, slots, scale, out, counts, num_threads,
    key_tile, whole,
):  # fmt: skip
    """``attend_pages`` on arrays, q of the compute dtype, k and v of the pool's. What
    needs no threads is compiled without them."""
    num_pages, kv_heads, block_size, head_dim = k_pool.shape
    _check_ids(cu_q, kv_len, block_table, slots, num_pages, block_size)
    _write(k, k_pool, slots)
    _write(v, v_pool, slots)
    key_bytes = head_dim * (k_pool.itemsize + v_pool.itemsize)
    for seat in range(kv_len.shape[0]):
        counts[seat, 2] += (cu_q[seat + 1] - cu_q[seat]) * kv_heads * key_bytes
    plan = np.empty((kv_len.shape[0], 2), np.int64)
    most_rows = _plan(cu_q, kv_len, q.shape[1] // kv_heads, key_tile, plan)
    if most_rows:
        num_slots = kv_len.shape[0] * kv_heads + num_threads
        first_rows = np.empty(num_slots + 1, np.int64)
        _slots(plan, kv_heads, num_threads, first_rows)
        parts = np.empty((first_rows[num_slots], head_dim + 2), q.dtype)  # acc, m, l
        visits = np.empty((num_slots, 3), np.int64)  # owning task, pairs, keys
        for slot in range(num_slots):
            visits[slot, 0], visits[slot, 1], visits[slot, 2] = -1, 0, 0
        for thread in prange(num_threads):
            _attend_part(
                thread, num_threads, key_tile, whole, q, k_pool, v_pool, cu_q, kv_len, block_table,
                scale, plan, most_rows, first_rows, parts, visits,
            )  # fmt: skip
        _count(num_threads, kv_heads, key_bytes, visits, counts)
        if most_rows < SHARED_ROWS:
            _finish(
                0, 1, num_threads, cu_q, plan, first_rows, parts, visits, kv_heads, out
            )  # fmt: skip
        else:
            for thread in prange(num_threads):
                _finish(
                    thread, num_threads, num_threads, cu_q, plan, first_rows, parts, visits,
                    kv_heads, out,
                )  # fmt: skip


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, layer_kv: LayerKV, meta: AttnMeta, *, scale: float, out: Tensor
) -> None:
    """Write k, v (T, G, D) at ``meta.slots``; then q (T, H, D) over the pages, into out (T, H, D).

    If the step is ``batch_invariant``, in one order of sums whatever the other rows and sequences:
    tiles of keys begin at multiples of KEY_TILE, and none are merged.
    """
    dtype = compute_dtype(q.dtype, layer_kv.k.dtype)
    queries = q.to(dtype).contiguous()
    result = out if out.dtype == dtype and out.is_contiguous() else torch.empty_like(queries)
    pool_dtype = layer_kv.k.dtype
    num_threads = use_torch_threads()
    write_and_attend(
        queries.numpy(),
        _bits(k.to(pool_dtype).contiguous()),
        _bits(v.to(pool_dtype).contiguous()),
        _bits(layer_kv.k),
        _bits(layer_kv.v),
        meta.cu_q.numpy(),
        meta.kv_len.numpy(),
        meta.block_table.contiguous().numpy(),  # another layout would compile another kernel
        meta.slots.numpy(),
        queries.numpy().dtype.type(scale),
        result.numpy(),
        meta.counts.numpy(),
        num_threads,
        KEY_TILE,  # an argument: what is compiled and cached must not depend on another file
        meta.batch_invariant,
    )
    if result is not out:
        out.copy_(result)


def _bits(tensor: Tensor) -> np.ndarray:
    """The tensor as an array; 16-bit floats as their bits, bfloat16 unsigned, float16 signed."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.float16:
        return tensor.view(torch.int16).numpy()
    return tensor.numpy()

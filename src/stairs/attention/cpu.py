"""The Numba kernel for sequences with few queries (fewer than ``SHORT_ROWS``), on a CPU.

Pages are read in place, once for all queries and query heads of a group, with float32
accumulation (float64 for float64 inputs). The work is cut into tiles of ``KEY_TILE`` keys; every
thread takes an equal run of tiles over all (sequence, kv head) pairs, so that one long context
uses all threads, and partial states are merged by the law of ``online``. One thread calls it.
"""
# ruff: noqa: E741  (l is the softmax denominator everywhere in this package)

from __future__ import annotations

import math
import os
from pathlib import Path

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload
from torch import Tensor

from stairs.attention.choose import KEY_TILE, SHORT_ROWS
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.reference import compute_dtype

__all__ = ["write_and_attend_short"]


def _cache_folder() -> str:
    root = os.environ.get("STAIRS_CACHE")
    if root:
        return str(Path(root) / "numba")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(home).expanduser() / "stairs" / "numba")


# Read when a function is decorated, so before the first of them. torch was imported first: its
# OpenMP is then the one Numba's omp layer binds to, and both share one pool of threads.
if "NUMBA_CACHE_DIR" not in os.environ:
    numba.config.CACHE_DIR = _cache_folder()
if "NUMBA_THREADING_LAYER" not in os.environ:
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# Sums may be reordered and contracted. No flag here lets the compiler assume finite values:
# -inf, inf and NaN keep their meaning.
_SUMS = {"reassoc", "contract", "nsz"}


@intrinsic
def _as_int(typing_context, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def _as_float(typing_context, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _prefetch(typing_context, array, index):
    """Ask for the cache line of flat element ``index`` of a C-contiguous array."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        declare = builder.module.declare_intrinsic(
            "llvm.prefetch",
            (pointer.type,),
            ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag]),
        )
        builder.call(declare, [pointer, flag(0), flag(2), flag(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


def _widen(value):
    """A stored K/V element as a float: uint16 holds bfloat16 bits, int16 float16 bits."""
    raise NotImplementedError


@overload(_widen)
def _widen_overload(value):
    if value == types.uint16:
        return lambda value: _as_float(np.int32(np.uint32(value) << np.uint32(16)))
    if value == types.int16:

        def from_half(value):
            magnitude = np.int32(value & 0x7FFF)
            # The exponent's bias differs by 112; the product also makes subnormals right.
            number = _as_float(np.int32(magnitude << 13)) * np.float32(2.0**112)
            if magnitude >= 0x7C00:
                number = _as_float(np.int32((magnitude << 13) | 0x7F800000))
            return -number if value < 0 else number

        return from_half
    return lambda value: value


def _exp(value):
    raise NotImplementedError


@njit(fastmath={"contract"})
def _exp_float32(x):
    """exp for x <= 0 within 1 ulp, in straight-line code that vectorises.

    x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by its series to r^7 / 7! (the next term is 5e-9).
    Adding 1.5 * 2^23 rounds to an integer and leaves n in the low bits; below exp(-87) it is 0.
    """
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    r = x - n * np.float32(0.693145751953125)  # ln 2 in two parts, the first exact in 16 bits
    r = r - n * np.float32(1.4286068203094172e-06)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    power = _as_float(np.int32((_as_int(shifted) + np.int32(127)) << 23))
    return np.float32(0) if x < np.float32(-87) else p * power


@overload(_exp)
def _exp_overload(value):
    if value == types.float32:
        return lambda value: _exp_float32(value)
    return lambda value: math.exp(value)


@njit
def _prefetch_tile(pool, table, seat, head, start, stop):
    """Ask for keys start .. stop, so that their pages arrive during the arithmetic before them."""
    _, kv_heads, block_size, head_dim = pool.shape
    line = 64 // pool.itemsize
    key = start
    while key < stop:
        page = np.int64(table[seat, key // block_size])
        offset = key % block_size
        num = min(block_size - offset, stop - key)
        first = ((page * kv_heads + head) * block_size + offset) * head_dim
        for element in range(first, first + num * head_dim, line):
            _prefetch(pool, element)
        key += num


@njit(fastmath=_SUMS)
def _dot_keys(scores, row, column, queries, pool, page, head, offset, num):
    """scores[row, column + j] = queries[row] . pool[page, head, offset + j], four keys a time."""
    head_dim = pool.shape[3]
    zero = scores.dtype.type(0)
    whole = num // 4 * 4
    for j in range(0, whole, 4):
        a, b, c, d = zero, zero, zero, zero
        key = offset + j
        for e in range(head_dim):
            x = queries[row, e]
            a += x * _widen(pool[page, head, key, e])
            b += x * _widen(pool[page, head, key + 1, e])
            c += x * _widen(pool[page, head, key + 2, e])
            d += x * _widen(pool[page, head, key + 3, e])
        scores[row, column + j] = a
        scores[row, column + j + 1] = b
        scores[row, column + j + 2] = c
        scores[row, column + j + 3] = d
    for j in range(whole, num):
        a = zero
        for e in range(head_dim):
            a += queries[row, e] * _widen(pool[page, head, offset + j, e])
        scores[row, column + j] = a


@njit(fastmath=_SUMS)
def _add_values(acc, row, column, weights, pool, page, head, offset, num):
    """acc[row] += sum over j of weights[row, column + j] * pool[page, head, offset + j]."""
    head_dim = pool.shape[3]
    whole = num // 4 * 4
    for j in range(0, whole, 4):
        a, b = weights[row, column + j], weights[row, column + j + 1]
        c, d = weights[row, column + j + 2], weights[row, column + j + 3]
        key = offset + j
        for e in range(head_dim):
            acc[row, e] += (
                a * _widen(pool[page, head, key, e])
                + b * _widen(pool[page, head, key + 1, e])
                + c * _widen(pool[page, head, key + 2, e])
                + d * _widen(pool[page, head, key + 3, e])
            )
    for j in range(whole, num):
        a = weights[row, column + j]
        for e in range(head_dim):
            acc[row, e] += a * _widen(pool[page, head, offset + j, e])


@njit
def _largest(scores, row, num, largest):
    for j in range(num):
        if scores[row, j] > largest:
            largest = scores[row, j]
    return largest


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


@njit
def _attend_tile(
    queries,
    rows,
    group,
    past,
    k_pool,
    v_pool,
    table,
    seat,
    head,
    start,
    stop,
    end,
    scores,
    m,
    l,
    acc,
):
    """Add keys start .. stop to every row that sees some of them; the pairs it visited.

    Rows are (query, head of the group): queries (R, D), state m, l (R,), acc (R, D).
    """
    block_size = k_pool.shape[2]
    num_pairs = 0
    key = start
    while key < stop:
        page = table[seat, key // block_size]
        offset = key % block_size
        num = min(block_size - offset, stop - key)
        ahead = key + KEY_TILE
        _prefetch_tile(k_pool, table, seat, head, ahead, min(ahead + num, end))
        for row in range(rows):
            seen = min(num, past + row // group + 1 - key)
            if seen > 0:
                _dot_keys(scores, row, key - start, queries, k_pool, page, head, offset, seen)
                num_pairs += seen
        key += num
    for row in range(rows):
        seen = min(stop, past + row // group + 1) - start
        if seen > 0:
            largest = _largest(scores, row, seen, m[row])
            kept = _exp(m[row] - largest)
            m[row] = largest
            _exponentials(scores, row, seen, largest)
            l[row] = l[row] * kept + _total(scores, row, seen)
            for e in range(acc.shape[1]):
                acc[row, e] *= kept
    key = start
    while key < stop:
        page = table[seat, key // block_size]
        offset = key % block_size
        num = min(block_size - offset, stop - key)
        ahead = key + KEY_TILE
        _prefetch_tile(v_pool, table, seat, head, ahead, min(ahead + num, end))
        for row in range(rows):
            seen = min(num, past + row // group + 1 - key)
            if seen > 0:
                _add_values(acc, row, key - start, scores, v_pool, page, head, offset, seen)
        key += num
    return num_pairs


@njit
def _check_pages(cu_q, kv_len, block_table, slots, num_pages, block_size):
    """Raise before anything is read or written through an id that is not in the pool."""
    for slot in slots:
        if slot < 0 or slot >= num_pages * block_size:
            raise IndexError("slot outside the K/V pool")
    for seat in range(kv_len.shape[0]):
        if cu_q[seat] < cu_q[seat + 1]:
            for column in range((kv_len[seat] + block_size - 1) // block_size):
                page = block_table[seat, column]
                if page < 0 or page >= num_pages:
                    raise IndexError("page id outside the K/V pool")


@njit
def _write(rows, pool, slots):
    block_size, head_dim = pool.shape[2], pool.shape[3]
    for token in range(rows.shape[0]):
        page, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(pool.shape[1]):
            for e in range(head_dim):
                pool[page, head, offset, e] = rows[token, head, e]


@njit
def _plan(cu_q, kv_len, group, short_rows):
    """Where each sequence's work starts, in units; the last entry is the total.

    A tile of one kv head costs its bytes plus its rows: max(rows, 4) units, by eye.
    """
    num_sequences = kv_len.shape[0]
    tiles = np.zeros(num_sequences, np.int64)
    cost = np.ones(num_sequences, np.int64)
    for seat in range(num_sequences):
        num_q = cu_q[seat + 1] - cu_q[seat]
        if 0 < num_q < short_rows:
            tiles[seat] = (kv_len[seat] + KEY_TILE - 1) // KEY_TILE
            cost[seat] = max(num_q * group, 4)
    return tiles, cost


@njit(parallel=True, nogil=True, cache=True)
def _write_and_attend(
    q, k, v, k_pool, v_pool, cu_q, kv_len, block_table, slots, scale, out, counts, num_threads
):
    """See write_and_attend_short; arrays instead of tensors."""
    num_pages, kv_heads, block_size, head_dim = k_pool.shape
    group = q.shape[1] // kv_heads
    num_sequences = kv_len.shape[0]
    _check_pages(cu_q, kv_len, block_table, slots, num_pages, block_size)
    _write(k, k_pool, slots)
    _write(v, v_pool, slots)
    row_bytes = kv_heads * head_dim * (k_pool.itemsize + v_pool.itemsize)
    tiles, cost = _plan(cu_q, kv_len, group, SHORT_ROWS)
    most_rows = 0
    total = 0
    for seat in range(num_sequences):
        num_q = cu_q[seat + 1] - cu_q[seat]
        counts[seat, 2] += num_q * row_bytes
        if tiles[seat]:
            most_rows = max(most_rows, num_q * group)
        elif num_q < SHORT_ROWS:
            out[cu_q[seat] : cu_q[seat + 1]] = 0  # no key to see
        total += tiles[seat] * cost[seat] * kv_heads

    # Thread t's part of task (seat, head) lies at slot task + t: no two parts share a slot,
    # because a thread enters a task only where the thread before it left it.
    num_slots = num_sequences * kv_heads + num_threads
    owner = np.full(num_slots, -1, np.int64)
    visited = np.zeros((num_slots, 2), np.int64)  # pairs, bytes
    part_m = np.empty((num_slots, most_rows), q.dtype)
    part_l = np.empty((num_slots, most_rows), q.dtype)
    part_acc = np.empty((num_slots, most_rows, head_dim), q.dtype)
    for thread in prange(num_threads):
        first, last = total * thread // num_threads, total * (thread + 1) // num_threads
        queries = np.empty((most_rows, head_dim), q.dtype)
        scores = np.empty((most_rows, KEY_TILE), q.dtype)
        base = 0
        for task in range(num_sequences * kv_heads):
            seat, head = task // kv_heads, task % kv_heads
            # A tile belongs to the thread in whose range its first unit lies.
            low = max(0, (first - base + cost[seat] - 1) // cost[seat])
            high = min(tiles[seat], (last - base + cost[seat] - 1) // cost[seat])
            base += tiles[seat] * cost[seat]
            if low >= high:
                continue
            num_q = cu_q[seat + 1] - cu_q[seat]
            rows = num_q * group
            for row in range(rows):
                for e in range(head_dim):
                    queries[row, e] = (
                        scale * q[cu_q[seat] + row // group, head * group + row % group, e]
                    )
            slot = task + thread
            owner[slot] = task
            m, l, acc = part_m[slot, :rows], part_l[slot, :rows], part_acc[slot, :rows]
            m[:] = -np.inf
            l[:] = 0
            acc[:] = 0
            past = kv_len[seat] - num_q
            end = min(high * KEY_TILE, kv_len[seat])
            for tile in range(low, high):
                start = tile * KEY_TILE
                stop = min(start + KEY_TILE, kv_len[seat])
                visited[slot, 0] += _attend_tile(
                    queries,
                    rows,
                    group,
                    past,
                    k_pool,
                    v_pool,
                    block_table,
                    seat,
                    head,
                    start,
                    stop,
                    end,
                    scores,
                    m,
                    l,
                    acc,
                )
                visited[slot, 1] += (stop - start) * row_bytes // kv_heads

    for task in prange(num_sequences * kv_heads):
        seat, head = task // kv_heads, task % kv_heads
        if tiles[seat]:
            for row in range((cu_q[seat + 1] - cu_q[seat]) * group):
                _finish(
                    task,
                    row,
                    owner,
                    part_m,
                    part_l,
                    part_acc,
                    out[cu_q[seat] + row // group, head * group + row % group],
                    num_threads,
                )
    for task in range(num_sequences * kv_heads):
        for slot in range(task, task + num_threads):
            if owner[slot] == task:
                counts[task // kv_heads, 0] += visited[slot, 0]
                counts[task // kv_heads, 1] += visited[slot, 1]


@njit
def _finish(task, row, owner, part_m, part_l, part_acc, out, num_threads):
    """Merge the parts of one row and divide by the denominator."""
    m = -part_m.dtype.type(np.inf)
    for slot in range(task, task + num_threads):
        if owner[slot] == task:
            m = max(m, part_m[slot, row])
    l = part_l.dtype.type(0)
    out[:] = 0
    for slot in range(task, task + num_threads):
        if owner[slot] == task and part_l[slot, row] != 0:
            kept = _exp(part_m[slot, row] - m)
            l += kept * part_l[slot, row]
            for e in range(out.shape[0]):
                out[e] += kept * part_acc[slot, row, e]
    if l != 0:
        for e in range(out.shape[0]):
            out[e] /= l


def _share_threads(num_threads: int) -> int:
    """Let Numba run on as many threads as torch does."""
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != num_threads:
        # Numba's first launch sets the process's OpenMP width, which is torch's too.
        torch.set_num_threads(num_threads)
    return num_threads


def write_and_attend_short(
    q: Tensor, k: Tensor, v: Tensor, layer_kv: LayerKV, meta: AttnMeta, *, scale: float, out: Tensor
) -> None:
    """Write k, v (T, G, D) at ``meta.slots``; attend for every sequence of fewer than SHORT_ROWS
    queries, q (T, H, D) into the same rows of out (T, H, D). Other rows of out are left alone."""
    dtype = compute_dtype(q.dtype, layer_kv.k.dtype)
    queries = q.to(dtype).contiguous()
    result = out if out.dtype == dtype and out.is_contiguous() else torch.empty_like(queries)
    pool_dtype = layer_kv.k.dtype
    num_threads = _share_threads(torch.get_num_threads())
    _write_and_attend(
        queries.numpy(),
        _bits(k.to(pool_dtype).contiguous()),
        _bits(v.to(pool_dtype).contiguous()),
        _bits(layer_kv.k),
        _bits(layer_kv.v),
        meta.cu_q.numpy(),
        meta.kv_len.numpy(),
        meta.block_table.numpy(),
        meta.slots.numpy(),
        queries.numpy().dtype.type(scale),
        result.numpy(),
        meta.counts.numpy(),
        num_threads,
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

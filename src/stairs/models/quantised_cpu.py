"""Products of few rows with packed weights on a CPU: values are made in registers, never stored.

x (T, in) float32 times rows as they lie in the file, accumulated in float32. The order of a sum
depends on the matrix alone, so a row of x gives the same bits whatever stands beside it. Threads
take equal runs of output rows; one thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.errors import ForceLiteralArg
from numba.extending import intrinsic
from torch import Tensor

from stairs.attention.jit import njit, prange, use_torch_threads
from stairs.checkpoints.tensors import PackedRows
from stairs.models.block_values import BLOCKS, FLOATS, LANES, Emitter

__all__ = ["PackedMatrices", "has_wide_vectors", "packed_matrices", "supports"]

TILE = 32  # output rows whose packed values stay in the first cache while rows of x come by
_KINDS = tuple(BLOCKS)
# Bytes of rows asked for before their turn. One row of x times 66 MB, one thread: 9.8 ms without,
# 6.6 at 2048, 5.1 at 4096 and at 8192.
AHEAD = 4096
# Columns of a table, one line a matrix.
_ADDRESS, _NUM_ROWS, _BLOCKS, _ROW_BYTES, _COLUMN, _HALF = range(6)


def _dots_of(num_tokens: int, num_rows: int):
    """Dot products of ``num_rows`` neighbouring packed rows with as many rows of x, left at
    ``place`` as (num_rows, num_tokens): one loop over blocks, all sums in registers."""

    @intrinsic(prefer_literal=True)
    def dots(typing, kind, address, row_bytes, num_blocks, x, x_bytes, place):
        if not isinstance(kind, types.IntegerLiteral):
            raise ForceLiteralArg({0})  # the type chooses the code, so it is known when compiling
        block = BLOCKS[_KINDS[kind.literal_value]]

        def codegen(context, builder, signature, args):
            _, address, row_bytes, num_blocks, x, x_bytes, place = args
            i8 = ir.IntType(8).as_pointer()
            rows, x = builder.inttoptr(address, i8), builder.inttoptr(x, i8)
            place = builder.inttoptr(place, ir.FloatType().as_pointer())
            sums = _sums(builder, block, rows, row_bytes, num_blocks, x, x_bytes)
            for i, total in enumerate(sums):
                target = builder.gep(place, [ir.IntType(64)(i)])
                builder.store(_across(builder, total), target)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 6), codegen

    def _sums(builder, block, rows, row_bytes, num_blocks, x, x_bytes):
        i64 = ir.IntType(64)
        before, loop = builder.block, builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(i64)
        index.add_incoming(i64(0), before)
        totals = [builder.phi(FLOATS) for _ in range(num_rows * num_tokens)]
        emit, sums = Emitter(builder), list(totals)
        here = builder.mul(index, i64(block.num_bytes))
        values = []
        for row in range(num_rows):
            start = builder.add(builder.mul(row_bytes, i64(row)), here)
            values.append(block.values(emit, builder.gep(rows, [start])))
        column = builder.mul(index, i64(4 * block.size))
        x_rows = [
            builder.gep(x, [builder.add(builder.mul(x_bytes, i64(token)), column)])
            for token in range(num_tokens)
        ]
        for part, weights in enumerate(zip(*values, strict=True)):
            for token in range(num_tokens):
                factor = emit.load(x_rows[token], 4 * LANES * part, FLOATS)
                for row, weight in enumerate(weights):
                    i = row * num_tokens + token
                    sums[i] = emit.fma(weight, factor, sums[i])
        following = builder.add(index, i64(1))
        index.add_incoming(following, builder.block)
        for phi, total in zip(totals, sums, strict=True):
            phi.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
            phi.add_incoming(total, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, num_blocks), loop, after)
        builder.position_at_end(after)
        return sums

    return dots


def _across(builder, vector):
    """The sum of all lanes, halves upon halves."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                vector,
                vector,
                ir.Constant(
                    ir.VectorType(ir.IntType(32), width), list(range(start, start + width))
                ),
            )
            for start in (0, width)
        )
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.IntType(32)(0))


@intrinsic
def _prefetch(typing, address):
    """Ask for the cache line at ``address``; one that is not there to read is ignored."""

    def codegen(context, builder, signature, args):
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        builder.call(function, [builder.inttoptr(args[0], pointer), flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


# At most eight sums at a time: they and what makes the values fit in sixteen wide registers.
_dots_1, _dots_2, _dots_4, _dots_8 = (
    _dots_of(1, 4),
    _dots_of(2, 4),
    _dots_of(4, 2),
    _dots_of(8, 2),
)


@njit
def _place(row, half):
    """Where row 2i + j of a head goes: i + j * half of it. ``half`` 0: rows are in order."""
    if half == 0:
        return row
    within = row % (2 * half)
    return row - within + within // 2 + within % 2 * half


@njit
def _rows(kind, x, line, out, column, first, last, scratch):
    """out[:, column + place] for rows ``first`` .. ``last`` of the matrix of ``line``."""
    num_tokens, half, row_bytes, blocks = x.shape[0], line[_HALF], line[_ROW_BYTES], line[_BLOCKS]
    x_bytes, place = x.shape[1] * 4, scratch.ctypes.data
    for tile in range(first, last, TILE):
        stop, token = min(tile + TILE, last), 0
        while token < num_tokens:
            left, here = num_tokens - token, x.ctypes.data + token * x_bytes
            if left >= 8:
                tokens, rows = 8, 2
            elif left >= 4:
                tokens, rows = 4, 2
            elif left >= 2:
                tokens, rows = 2, 4
            else:
                tokens, rows = 1, 4
            for row in range(tile, stop, rows):
                start = max(min(row, stop - rows), 0)  # the last ones may be done twice
                address = line[_ADDRESS] + start * row_bytes
                if token == 0:
                    begin = address + AHEAD
                    for ahead in range(begin, begin + rows * row_bytes, 64):
                        _prefetch(ahead)
                if tokens == 8:
                    _dots_8(kind, address, row_bytes, blocks, here, x_bytes, place)
                elif tokens == 4:
                    _dots_4(kind, address, row_bytes, blocks, here, x_bytes, place)
                elif tokens == 2:
                    _dots_2(kind, address, row_bytes, blocks, here, x_bytes, place)
                else:
                    _dots_1(kind, address, row_bytes, blocks, here, x_bytes, place)
                for i in range(rows):
                    target = column + _place(start + i, half)
                    for j in range(tokens):
                        out[token + j, target] = scratch[i * tokens + j]
            token += tokens


@njit
def _part(kind, thread, num_threads, x, table, out):
    """One thread's run of output rows over all matrices, cut where cache lines of ``out`` end."""
    total = 0
    for index in range(table.shape[0]):
        total += table[index, _NUM_ROWS]
    first = total * thread // num_threads // TILE * TILE
    last = total * (thread + 1) // num_threads // TILE * TILE
    if thread + 1 == num_threads:
        last = total
    scratch = np.empty(16, np.float32)
    seen = 0
    for index in range(table.shape[0]):
        line = table[index]
        low, high = max(first - seen, 0), min(last - seen, line[_NUM_ROWS])
        if low < high:
            _rows(kind, x, line, out, line[_COLUMN], low, high, scratch)
        seen += line[_NUM_ROWS]


@cache
def _product_of(kind: int):
    """The kernel of one type of blocks, compiled when the first matrix of that type comes."""

    @njit(parallel=True, nogil=True, cache=True)
    def product(x, table, out, num_threads):
        for thread in prange(num_threads):
            _part(kind, thread, num_threads, x, table, out)

    return product


def has_wide_vectors() -> bool:
    """Whether sums of eight rows of x stay in registers: then the kernel is 1.7 times as quick as
    BLAS at any number of rows, else two and a half times slower from eight on."""
    return bool(llvm.get_host_cpu_features().get("avx512f"))


def supports(rows: PackedRows) -> bool:
    """Whether the kernel reads this type, in whole blocks, for at least four outputs."""
    block = BLOCKS.get(rows.type)
    return block is not None and rows.shape[1] % block.size == 0 and rows.shape[0] >= 4


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Matrices under each other, read in place: ``parts`` stay alive with the addresses.

    ``tables``: for each type of blocks its kernel, and a line for each of its matrices.
    """

    parts: tuple[PackedRows, ...]
    tables: tuple[tuple[Callable[..., None], np.ndarray], ...]
    num_outputs: int

    def product(self, x: Tensor) -> Tensor:
        """x (T, in) float32 -> (T, out)."""
        out = torch.empty((x.shape[0], self.num_outputs))
        rows, results, num_threads = x.contiguous().numpy(), out.numpy(), use_torch_threads()
        for product, table in self.tables:
            product(rows, table, results, num_threads)
        return out


def packed_matrices(parts: tuple[PackedRows, ...]) -> PackedMatrices:
    lines: dict[int, list[list[int]]] = {}
    column = 0
    for part in parts:
        assert part.rows.is_contiguous() and supports(part)
        block, heads, kind = BLOCKS[part.type], part.rotated_heads, _KINDS.index(part.type)
        num_rows, num_blocks = part.shape[0], part.shape[1] // block.size
        half = num_rows // heads // 2 if heads else 0
        row_bytes = part.rows.shape[1]
        assert row_bytes == num_blocks * block.num_bytes
        address = part.rows.data_ptr()
        lines.setdefault(kind, []).append([address, num_rows, num_blocks, row_bytes, column, half])
        column += num_rows
    tables = ((_product_of(kind), np.array(rows, np.int64)) for kind, rows in lines.items())
    return PackedMatrices(parts, tuple(tables), column)

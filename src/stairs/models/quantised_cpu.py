"""Products of few rows with packed weights on a CPU: values are made in registers, never stored.

x (T, in) float32 times rows as they lie in the file, accumulated in float32. The order of a sum
depends on the matrix alone, so a row of x gives the same bits whatever stands beside it. Threads
take equal runs of output rows; one thread calls it.

Each type of blocks has code of its own, compiled when its first matrix comes; a matrix is a line
of numbers, that code's address among them, so what multiplies is compiled once for all types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, types
from numba.core.errors import ForceLiteralArg
from numba.extending import intrinsic
from torch import Tensor

from stairs.attention.jit import njit, prange, use_torch_threads
from stairs.checkpoints.tensors import PackedRows
from stairs.models.block_values import BLOCKS, FLOATS, LANES, Emitter

__all__ = ["PackedMatrices", "multiply", "packed_matrices", "supports"]

TILE = 32  # output rows whose packed values stay in the first cache while rows of x come by
_KINDS = tuple(BLOCKS)
# Bytes of rows asked for before their turn. The default model's layers and head, one row, one
# thread, ms: 3.81 and 1.22 at 4096, 3.60 and 0.99 at 8192, 3.79 and 1.01 at 16384, because a
# matrix's first rows are not asked for.
AHEAD = 8192
_FLOAT_POINTER = types.CPointer(types.float32)
# Columns of a table, one line a matrix.
_CODE, _ADDRESS, _NUM_ROWS, _BLOCKS, _ROW_BYTES, _COLUMN, _HALF = range(7)


def _dots_of(num_tokens: int, num_rows: int):
    """Dot products of ``num_rows`` neighbouring packed rows with as many rows of x, left at
    ``place`` as (num_rows, num_tokens): one loop over blocks, all sums in registers. Rows
    ``ahead`` bytes further are asked for, a few lines a block: all at once would fill the queue
    of misses."""

    @intrinsic(prefer_literal=True)
    def dots(typing, kind, address, row_bytes, num_blocks, ahead, x, x_bytes, place):
        if not isinstance(kind, types.IntegerLiteral):
            raise ForceLiteralArg({0})  # the type chooses the code, so it is known when compiling
        block = BLOCKS[_KINDS[kind.literal_value]]

        def codegen(context, builder, signature, args):
            _, address, row_bytes, num_blocks, ahead, x, x_bytes, place = args
            i8 = ir.IntType(8).as_pointer()
            rows, x = builder.inttoptr(address, i8), builder.inttoptr(x, i8)
            sums = _sums(builder, block, rows, row_bytes, num_blocks, ahead, x, x_bytes)
            total = _across(builder, sums)
            target = builder.bitcast(place, total.type.as_pointer())
            builder.store(total, target, align=4)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 6, _FLOAT_POINTER), codegen

    def _sums(builder, block, rows, row_bytes, num_blocks, ahead, x, x_bytes):
        i64 = ir.IntType(64)
        before, loop = builder.block, builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(i64)
        index.add_incoming(i64(0), before)
        totals = [builder.phi(FLOATS) for _ in range(num_rows * num_tokens)]
        emit, sums = Emitter(builder), list(totals)
        # The rows lie one behind the other: this block's share of what comes after them.
        span = num_rows * block.num_bytes
        coming = builder.gep(rows, [builder.add(builder.mul(index, i64(span)), ahead)])
        for line in range(0, span, 64):
            emit.prefetch(builder.gep(coming, [i64(line)]))
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


def _across(builder, vectors):
    """Each vector's sum of all lanes, halves upon halves, as one vector of their number.

    Two vectors are halved together: their halves side by side are one vector again.
    """

    def picked(a, b, lanes):
        kind = ir.VectorType(ir.IntType(32), len(lanes))
        return builder.shuffle_vector(a, b, ir.Constant(kind, lanes))

    # Lanes of a vector: the partial sums of one row, then of the next; ``rows`` says whose.
    parts, width = [(vector, [row]) for row, vector in enumerate(vectors)], LANES
    while width > 1:
        half, halved = width // 2, []
        pairs = zip(parts[::2], parts[1::2], strict=True) if len(parts) > 1 else [(parts[0], None)]
        for (a, rows), other in pairs:
            b, more = other or (a, [])
            starts = [width * i for i in range(len(rows))]
            starts += [LANES + start for start in starts[: len(more)]]
            low = [start + i for start in starts for i in range(half)]
            total = builder.fadd(picked(a, b, low), picked(a, b, [lane + half for lane in low]))
            halved.append((total, rows + more))
        parts, width = halved, half
    ((total, rows),) = parts
    return picked(total, total, [rows.index(row) for row in range(len(rows))])


@intrinsic
def _call(typing, code, line, x, x_bytes, num_tokens, out, out_width, first, last):
    """Run the code of a type of blocks, see ``_code_of``, at its address."""
    i64 = ir.IntType(64)

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [i64] * (len(args) - 1))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@intrinsic
def _stack(typing):
    """Room for sixteen floats."""

    def codegen(context, builder, signature, args):
        with builder.goto_entry_block():
            room = builder.alloca(FLOATS)
        return builder.bitcast(room, ir.FloatType().as_pointer())

    return _FLOAT_POINTER(), codegen


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


@njit(error_model="numpy")
def _rows(kind, line, x, x_bytes, num_tokens, out, out_width, first, last):
    """out[:, column + place] for rows ``first`` .. ``last`` of the matrix of ``line``."""
    half, row_bytes, blocks, sums = line[_HALF], line[_ROW_BYTES], line[_BLOCKS], _stack()
    for tile in range(first, last, TILE):
        stop, token = min(tile + TILE, last), 0
        while token < num_tokens:
            left, here = num_tokens - token, x + token * x_bytes
            if left >= 8:
                tokens, rows = 8, 2
            elif left >= 4:
                tokens, rows = 4, 2
            elif left >= 2:
                tokens, rows = 2, 4
            else:
                tokens, rows = 1, 4
            ahead = AHEAD if token == 0 else 0
            for row in range(tile, stop, rows):
                start = max(min(row, stop - rows), 0)  # the last ones may be done twice
                address = line[_ADDRESS] + start * row_bytes
                if tokens == 8:
                    _dots_8(kind, address, row_bytes, blocks, ahead, here, x_bytes, sums)
                elif tokens == 4:
                    _dots_4(kind, address, row_bytes, blocks, ahead, here, x_bytes, sums)
                elif tokens == 2:
                    _dots_2(kind, address, row_bytes, blocks, ahead, here, x_bytes, sums)
                else:
                    _dots_1(kind, address, row_bytes, blocks, ahead, here, x_bytes, sums)
                for i in range(rows):
                    target = line[_COLUMN] + _place(start + i, half)
                    for j in range(tokens):
                        out[(token + j) * out_width + target] = sums[i * tokens + j]
            token += tokens


@cache
def _code_of(kind: int):
    """The code of one type of blocks, compiled when the first matrix of that type comes."""
    numbers, i64 = types.CPointer(types.int64), types.int64

    @cfunc(types.void(numbers, i64, i64, i64, _FLOAT_POINTER, i64, i64, i64), cache=True)
    def code(line, x, x_bytes, num_tokens, out, out_width, first, last):
        _rows(kind, line, x, x_bytes, num_tokens, out, out_width, first, last)

    return code


@njit
def _part(thread, num_threads, x, table, out):
    """One thread's run of output rows over all matrices, cut where cache lines of ``out`` end."""
    total = 0
    for index in range(table.shape[0]):
        total += table[index, _NUM_ROWS]
    first = total * thread // num_threads // TILE * TILE
    last = total * (thread + 1) // num_threads // TILE * TILE
    if thread + 1 == num_threads:
        last = total
    seen = 0
    for index in range(table.shape[0]):
        line = table[index]
        low, high = max(first - seen, 0), min(last - seen, line[_NUM_ROWS])
        if low < high:
            _call(
                line[_CODE], line.ctypes.data, x.ctypes.data, x.shape[1] * 4, x.shape[0],
                out.ctypes.data, out.shape[1], low, high,
            )  # fmt: skip
        seen += line[_NUM_ROWS]


@njit(parallel=True, nogil=True, cache=True)
def multiply(x, table, out, num_threads):
    """x (T, in) times the matrices of ``table`` into out (T, their rows), all C-contiguous."""
    if num_threads == 1:
        _part(0, 1, x, table, out)
    else:
        for thread in prange(num_threads):
            _part(thread, num_threads, x, table, out)


def supports(rows: PackedRows) -> bool:
    """Whether the kernel reads this type, in whole blocks, for at least four outputs."""
    block = BLOCKS.get(rows.type)
    return block is not None and rows.shape[1] % block.size == 0 and rows.shape[0] >= 4


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Matrices under each other, read in place: ``parts`` stay alive with the addresses.

    ``table``: a line of int64 for each matrix, of use in this process only.
    """

    parts: tuple[PackedRows, ...]
    table: np.ndarray
    num_outputs: int

    def product(self, x: Tensor) -> Tensor:
        """x (T, in) float32 -> (T, out)."""
        out = np.empty((x.shape[0], self.num_outputs), np.float32)
        multiply(x.contiguous().numpy(), self.table, out, use_torch_threads())
        return torch.from_numpy(out)


def packed_matrices(parts: tuple[PackedRows, ...]) -> PackedMatrices:
    lines = []
    column = 0
    for part in parts:
        assert part.rows.is_contiguous() and supports(part)
        block, heads = BLOCKS[part.type], part.rotated_heads
        num_rows, num_blocks = part.shape[0], part.shape[1] // block.size
        row_bytes = part.rows.shape[1]
        assert row_bytes == num_blocks * block.num_bytes
        code = _code_of(_KINDS.index(part.type)).address
        half = num_rows // heads // 2 if heads else 0
        address = part.rows.data_ptr()
        lines.append([code, address, num_rows, num_blocks, row_bytes, column, half])
        column += num_rows
    return PackedMatrices(parts, np.array(lines, np.int64), column)

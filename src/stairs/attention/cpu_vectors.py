"""Vectors of floats written from Python: what the inner loops of ``cpu_tiles`` are made of.

A ``Vectors`` emits LLVM code at a builder's place; intrinsics take addresses of numbers, because
an array given to a function that is not inlined is counted in and out.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from stairs.accounting.hardware import has_wide_vectors
from stairs.attention.jit import as_float

__all__ = [
    "I32",
    "I64",
    "ROWS",
    "Vectors",
    "lanes_of",
    "loop",
    "numbers",
    "pointer",
    "shifted",
    "widen",
]

_BYTES, ROWS = (64, 4) if has_wide_vectors() else (32, 2)  # of a vector; rows whose sums fit
_I16, I32, I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()


def widen(value):
    """A stored K/V element as a float: uint16 holds bfloat16 bits, int16 float16 bits."""
    raise NotImplementedError


@overload(widen)
def _widen_overload(value):
    if value == types.uint16:
        return lambda value: as_float(np.int32(np.uint32(value) << np.uint32(16)))
    if value == types.int16:

        def from_half(value):
            magnitude = np.int32(value & 0x7FFF)
            # The exponent's bias differs by 112; the product also makes subnormals right.
            number = as_float(np.int32(magnitude << 13)) * np.float32(2.0**112)
            if magnitude >= 0x7C00:
                number = as_float(np.int32((magnitude << 13) | 0x7F800000))
            return -number if value < 0 else number

        return from_half
    return lambda value: value


class Vectors:
    """Vectors of one compute type at an ``IRBuilder``'s place."""

    def __init__(self, builder: ir.IRBuilder, dtype: types.Float) -> None:
        self.builder = builder
        self.element = _FLOAT if dtype == types.float32 else _DOUBLE
        self.lanes = _BYTES * 8 // dtype.bitwidth
        self.kind = ir.VectorType(self.element, self.lanes)

    def load(self, pointer: ir.Value, index: ir.Value, stored: types.Number) -> ir.Value:
        """``lanes`` elements behind ``pointer``, widened."""
        b, lanes = self.builder, self.lanes
        raw = {types.uint16: _I16, types.int16: ir.HalfType(), types.float32: _FLOAT}.get(
            stored, _DOUBLE
        )
        address = b.bitcast(b.gep(pointer, [index]), ir.VectorType(raw, lanes).as_pointer())
        vector = b.load(address, align=1)
        if stored == types.uint16:
            bits = ir.VectorType(I32, lanes)
            wide = b.shl(b.zext(vector, bits), ir.Constant(bits, [16] * lanes))
            vector = b.bitcast(wide, ir.VectorType(_FLOAT, lanes))
        return vector if vector.type == self.kind else b.fpext(vector, self.kind)

    def store(self, vector: ir.Value, pointer: ir.Value, index: ir.Value) -> None:
        address = self.builder.gep(pointer, [index])
        self.builder.store(vector, self.builder.bitcast(address, vector.type.as_pointer()), align=1)

    def spread(self, number: ir.Value) -> ir.Value:
        """One number in every lane."""
        empty = ir.Constant(self.kind, ir.Undefined)
        first = self.builder.insert_element(empty, number, I32(0))
        return self.builder.shuffle_vector(first, empty, numbers([0] * self.lanes))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        name = f"llvm.fma.v{self.lanes}f{32 if self.element is _FLOAT else 64}"
        kind = ir.FunctionType(self.kind, [self.kind] * 3)
        known = self.builder.module.globals.get(name)
        function = known or ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, [a, b, c])

    def prefetch(self, pointer: ir.Value, index: ir.Value) -> None:
        address = self.builder.bitcast(
            self.builder.gep(pointer, [index]), ir.IntType(8).as_pointer()
        )
        kind = ir.FunctionType(ir.VoidType(), [address.type, I32, I32, I32])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", (address.type,), kind)
        self.builder.call(function, [address, I32(0), I32(3), I32(1)])

    def across(self, vectors: list[ir.Value]) -> ir.Value:
        """Each vector's sum of all lanes, halves upon halves, as one vector of their number, a
        power of two: two vectors are halved together while there are two."""
        b, width, rows = self.builder, self.lanes, 1
        while width > 1:
            half = width // 2
            pairs = list(zip(vectors[::2], vectors[1::2], strict=False)) or [(vectors[0],)]
            starts = [width * i for i in range(rows * len(pairs[0]))]
            low = numbers([start + i for start in starts for i in range(half)])
            high = numbers([start + half + i for start in starts for i in range(half)])
            vectors = [
                b.fadd(*(b.shuffle_vector(pair[0], pair[-1], lanes) for lanes in (low, high)))
                for pair in pairs
            ]
            rows, width = rows * len(pairs[0]), half
        return vectors[0]

    def sums(self, num: int) -> list[ir.Value]:
        return [ir.Constant(self.kind, [0.0] * self.lanes)] * num


def numbers(numbers: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, len(numbers)), numbers)


def loop(builder, count, sums, body):
    """``sums`` after body(index, sums) for each index below ``count``, which may be 0."""
    before, check = builder.block, builder.append_basic_block("check")
    inside, after = builder.append_basic_block("inside"), builder.append_basic_block("after")
    builder.branch(check)
    builder.position_at_end(check)
    index = builder.phi(I64)
    kept = [builder.phi(value.type) for value in sums]
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    changed = body(index, kept)
    following = builder.add(index, I64(1))
    for phi, first, later in zip(
        [index, *kept], [I64(0), *sums], [following, *changed], strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.block)
    builder.branch(check)
    builder.position_at_end(after)
    return kept


@intrinsic
def pointer(typing, array):
    """The address of a C-contiguous array's first element."""
    assert array.layout == "C"

    def codegen(context, builder, signature, args):
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def shifted(typing, address, num):
    """``num`` elements further."""

    def codegen(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return address(address, types.int64), codegen


@intrinsic
def lanes_of(typing, numbers):
    """Elements of a vector of what ``numbers`` points at."""
    lanes = _BYTES * 8 // numbers.dtype.bitwidth
    return types.int64(numbers), lambda context, builder, signature, args: I64(lanes)

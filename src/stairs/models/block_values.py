"""LLVM code that turns one block of packed weights into vectors of float32, type by type.

Each function takes the address of a block and gives its values in order, ``LANES`` at a time, as
ggml's formats define them: a scale (and a minimum) times small integers. LLVM splits the vectors
where the processor's are narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llvmlite import ir

__all__ = ["BLOCKS", "LANES", "Block", "Emitter"]

LANES = 16
_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
BYTES, INTS, FLOATS = (ir.VectorType(kind, LANES) for kind in (_I8, _I32, _F32))


class Emitter:
    """Loads, conversions and arithmetic on vectors, at an ``IRBuilder``'s place."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def load(self, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
        """An unaligned load at ``offset`` bytes behind ``address`` (i8*)."""
        place = self.builder.gep(address, [ir.IntType(64)(offset)])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()), align=1)

    def spread(self, value: ir.Value) -> ir.Value:
        """A scalar in every lane."""
        empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        first = self.builder.insert_element(empty, value, _I32(0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(INTS, [0] * LANES))

    def half(self, address: ir.Value, offset: int) -> ir.Value:
        return self.builder.fpext(self.load(address, offset, ir.HalfType()), _F32)

    def byte(self, address: ir.Value, offset: int) -> ir.Value:
        return self.builder.zext(self.load(address, offset, _I8), _I32)

    def unsigned(self, address: ir.Value, offset: int) -> ir.Value:
        """Sixteen bytes as integers."""
        return self.builder.zext(self.load(address, offset, BYTES), INTS)

    def bits(self, address: ir.Value, offset: int) -> ir.Value:
        """Sixteen bits as integers 0 or 1, the lowest first."""
        lanes = ir.VectorType(ir.IntType(1), LANES)
        return self.builder.zext(
            self.builder.bitcast(self.load(address, offset, _I16), lanes), INTS
        )

    def masked(self, value: ir.Value, shift: int, mask: int) -> ir.Value:
        """(value >> shift) & mask, of a scalar or of every lane."""
        if shift:
            value = self.builder.lshr(value, _constant(value.type, shift))
        return self.builder.and_(value, _constant(value.type, mask))

    def joined(self, low: ir.Value, high: ir.Value, shift: int) -> ir.Value:
        """low | high << shift."""
        return self.builder.or_(low, self.builder.shl(high, _constant(high.type, shift)))

    def number(self, value: ir.Value) -> ir.Value:
        """Signed integers as floats."""
        return self.builder.sitofp(value, _F32 if value.type == _I32 else FLOATS)

    def scaled(self, integers: ir.Value, scale: ir.Value, low: ir.Value | None = None) -> ir.Value:
        """scale * integers (+ low), scale and low being scalars."""
        numbers = self.number(integers)
        if low is None:
            return self.builder.fmul(numbers, self.spread(scale))
        return self.fma(numbers, self.spread(scale), self.spread(low))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, rounded once, of vectors."""
        kind, name = ir.FunctionType(FLOATS, [FLOATS] * 3), f"llvm.fma.v{LANES}f32"
        known = self.builder.module.globals.get(name)
        function = known or ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, [a, b, c])


def _constant(kind: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


Values = Iterator[ir.Value]


def _f32(e: Emitter, block: ir.Value) -> Values:
    yield e.load(block, 0, FLOATS)


def _f16(e: Emitter, block: ir.Value) -> Values:
    for offset in (0, 32):
        halves = e.load(block, offset, ir.VectorType(ir.HalfType(), LANES))
        yield e.builder.fpext(halves, FLOATS)


def _bf16(e: Emitter, block: ir.Value) -> Values:
    for offset in (0, 32):
        bits = e.builder.zext(e.load(block, offset, ir.VectorType(_I16, LANES)), INTS)
        yield e.builder.bitcast(e.builder.shl(bits, _constant(INTS, 16)), FLOATS)


def _q8_0(e: Emitter, block: ir.Value) -> Values:
    scale = e.half(block, 0)
    for offset in (2, 18):
        yield e.scaled(e.builder.sext(e.load(block, offset, BYTES), INTS), scale)


def _q4_0(e: Emitter, block: ir.Value) -> Values:
    scale, pairs = e.half(block, 0), e.unsigned(block, 2)
    for shift in (0, 4):
        yield e.scaled(e.builder.sub(e.masked(pairs, shift, 15), _constant(INTS, 8)), scale)


def _q4_1(e: Emitter, block: ir.Value) -> Values:
    scale, low, pairs = e.half(block, 0), e.half(block, 2), e.unsigned(block, 4)
    for shift in (0, 4):
        yield e.scaled(e.masked(pairs, shift, 15), scale, low)


def _q5_0(e: Emitter, block: ir.Value) -> Values:
    scale, pairs = e.half(block, 0), e.unsigned(block, 6)
    for shift, high in ((0, 2), (4, 4)):
        value = e.joined(e.masked(pairs, shift, 15), e.bits(block, high), 4)
        yield e.scaled(e.builder.sub(value, _constant(INTS, 16)), scale)


def _q5_1(e: Emitter, block: ir.Value) -> Values:
    scale, low, pairs = e.half(block, 0), e.half(block, 2), e.unsigned(block, 8)
    for shift, high in ((0, 4), (4, 6)):
        yield e.scaled(e.joined(e.masked(pairs, shift, 15), e.bits(block, high), 4), scale, low)


def _k_scales(e: Emitter, block: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Scale and minimum of each of eight groups: six bits each in twelve bytes, at offset 4."""
    scale, low = e.half(block, 0), e.builder.fneg(e.half(block, 2))
    for group in range(8):
        first, second = e.byte(block, 4 + group % 4), e.byte(block, 8 + group % 4)
        if group < 4:
            factor, offset = e.masked(first, 0, 63), e.masked(second, 0, 63)
        else:
            third = e.byte(block, 8 + group)
            factor = e.joined(e.masked(third, 0, 15), e.masked(first, 6, 3), 4)
            offset = e.joined(e.masked(third, 4, 15), e.masked(second, 6, 3), 4)
        yield e.builder.fmul(scale, e.number(factor)), e.builder.fmul(low, e.number(offset))


def _q4_k(e: Emitter, block: ir.Value) -> Values:
    for group, (scale, low) in enumerate(_k_scales(e, block)):
        for part in (0, 16):
            pairs = e.unsigned(block, 16 + 32 * (group // 2) + part)
            yield e.scaled(e.masked(pairs, 4 * (group % 2), 15), scale, low)


def _q5_k(e: Emitter, block: ir.Value) -> Values:
    for group, (scale, low) in enumerate(_k_scales(e, block)):
        for part in (0, 16):
            pairs = e.unsigned(block, 48 + 32 * (group // 2) + part)
            high = e.masked(e.unsigned(block, 16 + part), group, 1)
            value = e.joined(e.masked(pairs, 4 * (group % 2), 15), high, 4)
            yield e.scaled(value, scale, low)


def _q6_k(e: Emitter, block: ir.Value) -> Values:
    scale = e.half(block, 208)
    for index in range(16):  # sixteen values share a scale
        half, quarter, part = index // 8, index % 8 // 2, 16 * (index % 2)
        pairs = e.unsigned(block, 64 * half + 32 * (quarter % 2) + part)
        high = e.masked(e.unsigned(block, 128 + 32 * half + part), 2 * quarter, 3)
        value = e.joined(e.masked(pairs, 4 * (quarter // 2), 15), high, 4)
        factor = e.builder.sext(e.load(block, 192 + index, _I8), _I32)
        own = e.builder.fmul(scale, e.number(factor))
        yield e.scaled(e.builder.sub(value, _constant(INTS, 32)), own)


@dataclass(frozen=True, slots=True)
class Block:
    size: int  # values
    num_bytes: int
    values: Callable[[Emitter, ir.Value], Values]


BLOCKS: dict[str, Block] = {
    "F32": Block(16, 64, _f32),
    "F16": Block(32, 64, _f16),
    "BF16": Block(32, 64, _bf16),
    "Q8_0": Block(32, 34, _q8_0),
    "Q4_0": Block(32, 18, _q4_0),
    "Q4_1": Block(32, 20, _q4_1),
    "Q5_0": Block(32, 22, _q5_0),
    "Q5_1": Block(32, 24, _q5_1),
    "Q4_K": Block(256, 144, _q4_k),
    "Q5_K": Block(256, 176, _q5_k),
    "Q6_K": Block(256, 210, _q6_k),
}

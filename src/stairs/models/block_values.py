"""LLVM code that turns one block of packed weights into vectors of float32, type by type.

Each function takes the address of a block and gives its values in order, ``LANES`` at a time, as
ggml's formats define them: a scale (and a minimum) times small integers. LLVM splits the vectors
where the processor's are narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llvmlite import ir

from stairs.accounting.hardware import has_wide_vectors

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

    def picked(self, vector: ir.Value, lanes: list[int]) -> ir.Value:
        """Sixteen lanes of ``vector``, in that order."""
        return self.builder.shuffle_vector(vector, vector, ir.Constant(INTS, lanes))

    def lane(self, vector: ir.Value, index: int) -> ir.Value:
        """One lane of ``vector`` in every lane."""
        return self.picked(vector, [index] * LANES)

    def halves(self, address: ir.Value, offset: int) -> ir.Value:
        """Eight float16 as floats. One alone is loaded into a register that still holds a sum, and
        each block waits for the one before it: 1.4 times the time of a Q8_0 product."""
        half, single = (ir.VectorType(kind, 8) for kind in (ir.HalfType(), _F32))
        return self.builder.fpext(self.load(address, offset, half), single)

    def prefetch(self, address: ir.Value) -> None:
        """Ask for the cache line at ``address``; one that is not there to read is ignored."""
        flag = _I32
        kind = ir.FunctionType(ir.VoidType(), [address.type, flag, flag, flag])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", (address.type,), kind)
        self.builder.call(function, [address, flag(0), flag(3), flag(1)])

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
        """(value >> shift) & mask, in every lane."""
        if shift:
            value = self.builder.lshr(value, _constant(shift))
        return self.builder.and_(value, _constant(mask))

    def joined(self, low: ir.Value, high: ir.Value, shift: int) -> ir.Value:
        """low | high << shift."""
        return self.builder.or_(low, self.builder.shl(high, _constant(shift)))

    def number(self, value: ir.Value) -> ir.Value:
        """Signed integers as floats."""
        return self.builder.sitofp(value, FLOATS)

    def scaled(self, numbers: ir.Value, scale: ir.Value, low: ir.Value | None = None) -> ir.Value:
        """scale * numbers (+ low), lane by lane."""
        return self.builder.fmul(numbers, scale) if low is None else self.fma(numbers, scale, low)

    def nibbles(
        self,
        pairs: ir.Value,
        shift: int,
        scale: ir.Value,
        low: ir.Value | None = None,
        *,
        minus: int = 0,
    ) -> ir.Value:
        """scale * (n - minus) (+ low), n being the low four bits of pairs >> ``shift``.

        A register of 512 bits holds all sixteen values, and picking from it needs neither a mask
        nor a conversion; the values are the same, each made once instead of once a weight.
        """
        if not has_wide_vectors():
            integers = self.masked(pairs, shift, 15)
            if minus:
                integers = self.builder.sub(integers, _constant(minus))
            return self.scaled(self.number(integers), scale, low)
        numbers = ir.Constant(FLOATS, [float(n - minus) for n in range(LANES)])
        kind, name = ir.FunctionType(FLOATS, [FLOATS, INTS]), "llvm.x86.avx512.permvar.sf.512"
        known = self.builder.module.globals.get(name)
        pick = known or ir.Function(self.builder.module, kind, name)
        index = self.builder.lshr(pairs, _constant(shift)) if shift else pairs
        return self.builder.call(pick, [self.scaled(numbers, scale, low), index])

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, rounded once, of vectors."""
        kind, name = ir.FunctionType(FLOATS, [FLOATS] * 3), f"llvm.fma.v{LANES}f32"
        known = self.builder.module.globals.get(name)
        function = known or ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, [a, b, c])


def _constant(*values: int) -> ir.Constant:
    """One integer in every lane, or each in as many lanes side by side."""
    return ir.Constant(INTS, [value for value in values for _ in range(LANES // len(values))])


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
        yield e.builder.bitcast(e.builder.shl(bits, _constant(16)), FLOATS)


def _q8_0(e: Emitter, block: ir.Value) -> Values:
    scale = e.lane(e.halves(block, 0), 0)
    for offset in (2, 18):
        yield e.scaled(e.number(e.builder.sext(e.load(block, offset, BYTES), INTS)), scale)


def _q4_0(e: Emitter, block: ir.Value) -> Values:
    scale, pairs = e.lane(e.halves(block, 0), 0), e.unsigned(block, 2)
    for shift in (0, 4):
        yield e.nibbles(pairs, shift, scale, minus=8)


def _q4_1(e: Emitter, block: ir.Value) -> Values:
    numbers, pairs = e.halves(block, 0), e.unsigned(block, 4)
    for shift in (0, 4):
        yield e.nibbles(pairs, shift, e.lane(numbers, 0), e.lane(numbers, 1))


def _q5_0(e: Emitter, block: ir.Value) -> Values:
    scale, pairs = e.lane(e.halves(block, 0), 0), e.unsigned(block, 6)
    for shift, high in ((0, 2), (4, 4)):
        value = e.joined(e.masked(pairs, shift, 15), e.bits(block, high), 4)
        yield e.scaled(e.number(e.builder.sub(value, _constant(16))), scale)


def _q5_1(e: Emitter, block: ir.Value) -> Values:
    numbers, pairs = e.halves(block, 0), e.unsigned(block, 8)
    for shift, high in ((0, 4), (4, 6)):
        value = e.joined(e.masked(pairs, shift, 15), e.bits(block, high), 4)
        yield e.scaled(e.number(value), e.lane(numbers, 0), e.lane(numbers, 1))


def _k_scales(e: Emitter, block: ir.Value) -> ir.Value:
    """Scales of eight groups, then their minima: twelve bytes at offset 4 hold six bits of each,
    those of the last four in two places."""
    quads = [list(range(4 * i, 4 * i + 4)) for i in range(3)]
    packed = e.unsigned(block, 4)
    rest = e.picked(packed, quads[0] + quads[2] + quads[1] + quads[2])
    rest = e.builder.and_(e.builder.lshr(rest, _constant(0, 0, 0, 4)), _constant(63, 15, 63, 15))
    high = e.picked(packed, quads[0] + quads[0] + quads[1] + quads[1])
    high = e.builder.and_(e.builder.lshr(high, _constant(2)), _constant(0, 48, 0, 48))
    factors = e.picked(e.halves(block, 0), [0] * 8 + [1] * 8)
    signs = ir.Constant(FLOATS, [1.0] * 8 + [-1.0] * 8)
    return e.builder.fmul(e.builder.fmul(factors, signs), e.number(e.builder.or_(rest, high)))


def _q4_k(e: Emitter, block: ir.Value) -> Values:
    scales = _k_scales(e, block)
    for group in range(8):
        for part in (0, 16):
            pairs = e.unsigned(block, 16 + 32 * (group // 2) + part)
            shift = 4 * (group % 2)
            yield e.nibbles(pairs, shift, e.lane(scales, group), e.lane(scales, 8 + group))


def _q5_k(e: Emitter, block: ir.Value) -> Values:
    scales = _k_scales(e, block)
    for group in range(8):
        for part in (0, 16):
            pairs = e.unsigned(block, 48 + 32 * (group // 2) + part)
            high = e.masked(e.unsigned(block, 16 + part), group, 1)
            value = e.joined(e.masked(pairs, 4 * (group % 2), 15), high, 4)
            yield e.scaled(e.number(value), e.lane(scales, group), e.lane(scales, 8 + group))


def _q6_k(e: Emitter, block: ir.Value) -> Values:
    factors = e.number(e.builder.sext(e.load(block, 192, BYTES), INTS))
    scales = e.builder.fmul(e.lane(e.halves(block, 194), 7), factors)  # the block's last number
    for index in range(16):  # sixteen values share a scale
        half, quarter, part = index // 8, index % 8 // 2, 16 * (index % 2)
        pairs = e.unsigned(block, 64 * half + 32 * (quarter % 2) + part)
        high = e.masked(e.unsigned(block, 128 + 32 * half + part), 2 * quarter, 3)
        value = e.joined(e.masked(pairs, 4 * (quarter // 2), 15), high, 4)
        yield e.scaled(e.number(e.builder.sub(value, _constant(32))), e.lane(scales, index))


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

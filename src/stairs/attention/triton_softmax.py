"""Online softmax in Triton, shared by the paged and the contiguous kernel: the law of ``online``
with the maximum in units of log2, so that an exponential is one exp2 of one fused multiply-add.

State of a row: m the largest scaled score (-inf while no key was seen), l the sum of
exp2(score - m), acc the sum of exp2(score - m) times the value; all float32.
"""
# ruff: noqa: E741  (l is the softmax denominator everywhere in this package)

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LN2", "LOG2_E", "finish", "softcapped", "tile_update"]

LOG2_E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softcapped(s, cap):
    """cap * tanh(s / cap): no overflow for any s, and a series where 1 - exp would cancel."""
    x = s / cap
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2 |x|), in (0, 1]
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 + y * (-0.3333333333 + y * (0.1333333333 - y * 0.0539682540)))
    return cap * tl.where(tl.abs(x) < 0.15, near, far)


@triton.jit
def tile_update(
    q, k, v, m, l, acc, columns, first_seen, last_seen, scale, cap,
    MASKED: tl.constexpr, LEFT: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys ``columns`` (N,) to rows (M,): q (M, D), k and v (N, D).

    Row r sees keys first_seen[r] .. last_seen[r]; both bounds are read only where MASKED, the
    first only where LEFT. ``scale`` is in log2 units, or natural before a cap.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        s = softcapped(s * scale, cap)
        scale = 1.4426950408889634
    if MASKED:
        visible = columns[None, :] <= last_seen[:, None]
        if LEFT:
            visible &= columns[None, :] >= first_seen[:, None]
        s = tl.where(visible, s, float("-inf"))
    # scale is positive: the largest score is the largest scaled one.
    peak = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(peak == float("-inf"), 0.0, peak) if MASKED else peak
    p = tl.exp2(s * scale - base[:, None])
    keep = tl.exp2(m - base)
    l = l * keep + tl.sum(p, 1)
    acc = acc * keep[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return peak, l, acc


@triton.jit
def finish(m, l, acc):
    """O = acc / l, 0 for a row that saw no key, and its LSE in log2 units, -inf there."""
    seen = l != 0.0
    total = tl.where(seen, l, 1.0)
    # Rounded to nearest: Triton's own division may be two units off.
    out = acc * tl.div_rn(tl.full(l.shape, 1.0, tl.float32), total)[:, None]
    return out, tl.where(seen, m + tl.log2(total), float("-inf"))

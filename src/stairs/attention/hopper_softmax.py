"""Online softmax of one tile of wgmma scores in Gluon: masks, weights and sums of 64 rows.

As in ``triton_softmax``, but that the maximum is kept of raw scores, and the sums by lane.
"""
# ruff: noqa: SIM108  (a constant decides what is compiled)

from __future__ import annotations

from stairs.attention.gluon_api import gl, gluon

__all__ = ["quads_layout", "weights"]


@gluon.constexpr_function
def quads_layout(keys):
    """Scores (64, keys) as (64, keys / 8, 4, 2): a row's four lanes are the third dimension, so
    that sums over the second and the last stay within a thread."""
    registers = [[0, 0, 0, 1], [8, 0, 0, 0]]
    step = 1
    while step < keys // 8:
        registers.append([0, step, 0, 0])
        step *= 2
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, keys // 8, 4, 2])


@gluon.jit
def capped(s, inner):
    """tanh(s * inner): no overflow for any s, and a series where 1 - exp would cancel."""
    x = s * inner
    e = gl.exp2(gl.abs(x) * -2.8853900817779268)  # exp(-2 |x|), in (0, 1]
    far = gl.where(x < 0.0, -1.0, 1.0) * ((1.0 - e) / (1.0 + e))
    y = x * x
    near = x * (1.0 + y * (-0.3333333333 + y * (0.1333333333 - y * 0.0539682540)))
    return gl.where(gl.abs(x) < 0.15, near, far)


@gluon.jit
def masked(s, j, edges, BN: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
           S_LAYOUT: gl.constexpr, QUADS: gl.constexpr):  # fmt: skip
    """Keys that a row does not see to -inf: row r sees the first ``stop``, none below
    ``left + r`` and none over ``right + r``. Column 8 i + 2 k + h of the quads is a constant of
    its register but for the lane k, so that comparing takes no registers."""
    left, right, stop = edges
    FLAT: gl.constexpr = gl.SliceLayout(3, QUADS)
    i = gl.arange(0, BN // 8, gl.SliceLayout(0, gl.SliceLayout(2, FLAT)))
    k = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, FLAT)))
    h = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, QUADS))))
    place = i[None, :, None, None] * 8 + h[None, None, None, :]
    row = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, FLAT)))
    row = row[:, None, None, None] - k[None, None, :, None] * 2
    last = stop - 1 - j * BN - k[None, None, :, None] * 2
    if RIGHT:
        last = gl.minimum(last, row + (right - j * BN))
    seen = place <= last
    if LEFT:
        seen = seen & (place >= row + (left - j * BN))
    quads = gl.convert_layout(s.reshape([64, BN // 8, 4, 2]), QUADS, assert_trivial=True)
    kept = gl.where(seen, quads, float("-inf"))
    return gl.convert_layout(kept.reshape([64, BN]), S_LAYOUT, assert_trivial=True)


@gluon.jit
def weights(
    s, m, j, edges, scale, inner, BN: gl.constexpr, MASKED: gl.constexpr, RIGHT: gl.constexpr,
    LEFT: gl.constexpr, CAPPED: gl.constexpr, LAZY: gl.constexpr, S_LAYOUT: gl.constexpr,
    QUADS: gl.constexpr,
):  # fmt: skip
    """exp2((s - new maximum) * scale), the new maximum (or less: LAZY), what old terms keep, and
    sums (64, 4) over the keys of each lane, so that no thread asks another."""
    if CAPPED:
        s = capped(s, inner)
    if MASKED:
        s = masked(s, j, edges, BN, RIGHT, LEFT, S_LAYOUT, QUADS)
    peak = gl.maximum(m, gl.max(s, 1))
    if LAZY:
        # A sum of terms up to 2**8 is as exact as one of terms up to 1, and O is seldom rescaled.
        peak = gl.where((peak - m) * scale > 8.0, peak, m)
    if MASKED:
        base = gl.where(peak == float("-inf"), 0.0, peak) * scale
    else:
        base = peak * scale
    keep = gl.exp2(m * scale - base)
    s = gl.exp2(s * scale - base[:, None])
    quads = gl.convert_layout(s.reshape([64, BN // 8, 4, 2]), QUADS, assert_trivial=True)
    return s, peak, keep, gl.sum(gl.sum(quads, 3), 1)

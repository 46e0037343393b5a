"""What stands between the products on a CPU in float32: one Numba kernel each.

Few rows cost the calls, not the arithmetic, so these run on the calling thread; the step's larger
ones use torch's threads. Every row is computed by itself, in one order.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from stairs.attention.jit import exp_float32, njit, prange, use_torch_threads

__all__ = [
    "SERIAL_ROWS",
    "add_norm_few",
    "add_rms_norm",
    "gelu",
    "rotate",
    "rotate_few",
    "rotation",
    "silu_mul",
    "silu_mul_few",
]

_SUMS = {"reassoc", "contract", "nsz"}
SERIAL_ROWS = 16  # rows up to which one thread is quicker than waking others


@njit(fastmath=_SUMS)
def _add_norm_row(x, branch, weight, eps, total, normed):
    squares = np.float32(0)
    for i in range(x.shape[0]):
        total[i] = x[i] + branch[i]
        squares += total[i] * total[i]
    factor = np.float32(1) / np.sqrt(squares / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        normed[i] = total[i] * factor * weight[i]


@njit(nogil=True, cache=True)
def add_norm_few(x, branch, weight, eps, total, normed):
    for row in range(x.shape[0]):
        _add_norm_row(x[row], branch[row], weight, eps, total[row], normed[row])


@njit(parallel=True, nogil=True, cache=True)
def _add_norm_many(x, branch, weight, eps, total, normed):
    for row in prange(x.shape[0]):
        _add_norm_row(x[row], branch[row], weight, eps, total[row], normed[row])


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, branch (T, C) -> rms_norm(x + branch), x + branch."""
    both = torch.empty((2, *x.shape))
    rows = both.numpy()
    run = add_norm_few
    if len(x) > SERIAL_ROWS:
        use_torch_threads()
        run = _add_norm_many
    run(
        x.contiguous().numpy(),
        branch.contiguous().numpy(),
        weight.numpy(),
        np.float32(eps),
        rows[0],
        rows[1],
    )
    return both[1], both[0]


# A quotient that may raise ZeroDivisionError, as Python's does, keeps a loop from being vectorised.
@njit(error_model="numpy")
def _silu_mul_row(gate_up, out):
    size = out.shape[0]
    for i in range(size):
        gate = gate_up[i]
        small = exp_float32(-abs(gate))
        share = (small if gate < 0 else np.float32(1)) / (np.float32(1) + small)
        out[i] = gate * share * gate_up[size + i]


@njit(nogil=True, cache=True)
def silu_mul_few(gate_up, out):
    for row in range(out.shape[0]):
        _silu_mul_row(gate_up[row], out[row])


@njit(parallel=True, nogil=True, cache=True)
def _silu_mul_many(gate_up, out):
    for row in prange(out.shape[0]):
        _silu_mul_row(gate_up[row], out[row])


def silu_mul(gate_up: Tensor) -> Tensor:
    """(T, 2F): gate, then up -> silu(gate) * up (T, F)."""
    out = torch.empty((len(gate_up), gate_up.shape[1] // 2))
    run = silu_mul_few
    if len(gate_up) > SERIAL_ROWS:
        use_torch_threads()
        run = _silu_mul_many
    run(gate_up.contiguous().numpy(), out.numpy())
    return out


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _gelu(x, out):
    for row in prange(x.shape[0]):
        for i in range(x.shape[1]):
            value = x[row, i]
            # 0.5 (1 + tanh u) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
            inner = np.float32(1.5957691216057308) * (
                value + np.float32(0.044715) * value * value * value
            )
            small = exp_float32(-abs(inner))
            share = (small if inner < 0 else np.float32(1)) / (np.float32(1) + small)
            out[row, i] = value * share


def gelu(x: Tensor) -> Tensor:
    """(T, F): gelu by its tanh formula (Hendrycks and Gimpel 2016)."""
    out = torch.empty(x.shape)
    use_torch_threads()
    _gelu(x.contiguous().numpy(), out.numpy())
    return out


@njit(nogil=True, cache=True)
def _angles(positions, inv_freq, factor, cos, sin):
    for t in range(positions.shape[0]):
        for i in range(inv_freq.shape[0]):
            angle = np.float32(positions[t]) * inv_freq[i]
            cos[t, 0, i] = np.float32(math.cos(angle)) * factor
            sin[t, 0, i] = np.float32(math.sin(angle)) * factor


def rotation(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """positions (T,) -> cos and sin (T, 1, D/2) of position * frequency, times ``factor``."""
    cos, sin = (torch.empty((len(positions), 1, len(inv_freq))) for _ in range(2))
    _angles(positions.numpy(), inv_freq.numpy(), np.float32(factor), cos.numpy(), sin.numpy())
    return cos, sin


@njit
def _rotate_row(heads, cos, sin, num_rotated):
    half = heads.shape[1] // 2
    for head in range(num_rotated):
        for i in range(half):
            a, b = heads[head, i], heads[head, half + i]
            heads[head, i] = a * cos[0, i] - b * sin[0, i]
            heads[head, half + i] = b * cos[0, i] + a * sin[0, i]


@njit(nogil=True, cache=True)
def rotate_few(heads, cos, sin, num_rotated):
    for row in range(heads.shape[0]):
        _rotate_row(heads[row], cos[row], sin[row], num_rotated)


@njit(parallel=True, nogil=True, cache=True)
def _rotate_many(heads, cos, sin, num_rotated):
    for row in prange(heads.shape[0]):
        _rotate_row(heads[row], cos[row], sin[row], num_rotated)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> None:
    """Rotate pairs (i, i + D/2) of the first heads of ``heads`` (T, heads, D), in place."""
    run = rotate_few
    if len(heads) > SERIAL_ROWS:
        use_torch_threads()
        run = _rotate_many
    run(heads.numpy(), cos.numpy(), sin.numpy(), num_rotated)

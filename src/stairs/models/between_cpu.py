"""From one attention to the next in one call, for few rows on a CPU in float32.

A step of few rows costs its calls as much as its arithmetic. The functions and their order are
those of the calls replaced, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stairs.accounting.weights import FEW_ROWS
from stairs.attention.jit import njit, use_torch_threads
from stairs.models.glue_cpu import SERIAL_ROWS, add_norm_few, silu_mul_few
from stairs.models.layers import RMSNorm
from stairs.models.packed import PackedLinear
from stairs.models.quantised_cpu import multiply

__all__ = ["BetweenCPU", "between_cpu"]


@njit
def _product(x, linear, out, num_threads):
    table, bias, _ = linear
    multiply(x, table, out, num_threads)
    if bias.shape[0]:
        for row in range(out.shape[0]):
            for i in range(out.shape[1]):
                out[row, i] += bias[i]


@njit(nogil=True, cache=True)
def _between(
    attended, x, output, norm, gate_up, down, next_norm, qkv, total, result, num_threads
):  # fmt: skip
    """Linear layers are (table, bias or nothing, outputs), norms (weight, eps); a ``qkv`` of no
    matrices leaves the normed rows as the result."""
    branch, normed, middle = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    both = np.empty((x.shape[0], gate_up[2]), np.float32)
    gated = np.empty((x.shape[0], gate_up[2] // 2), np.float32)
    _product(attended, output, branch, num_threads)
    add_norm_few(x, branch, norm[0], norm[1], middle, normed)
    _product(normed, gate_up, both, num_threads)
    silu_mul_few(both, gated)
    _product(gated, down, branch, num_threads)
    if qkv[0].shape[0]:
        add_norm_few(middle, branch, next_norm[0], next_norm[1], total, normed)
        _product(normed, qkv, result, num_threads)
    else:
        add_norm_few(middle, branch, next_norm[0], next_norm[1], total, result)


@dataclass(frozen=True, slots=True)
class BetweenCPU:
    """``weights``: the kernel's arguments from ``output`` to ``qkv``, whose addresses are those of
    ``linears``."""

    linears: tuple[PackedLinear, ...]
    weights: tuple[Any, ...]
    num_results: int
    most_rows: int

    def __call__(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Attended (T, H * D), x (T, C) -> as ``Between``; T at most ``most_rows``."""
        rows = x.contiguous().numpy()
        total, result = np.empty_like(rows), np.empty((len(rows), self.num_results), np.float32)
        heads = attended.contiguous().numpy()
        _between(heads, rows, *self.weights, total, result, use_torch_threads())
        return torch.from_numpy(result), torch.from_numpy(total)


def between_cpu(linears: Sequence[PackedLinear], norm: RMSNorm, next_norm: RMSNorm) -> BetweenCPU:
    """``linears``: output, gate_up, down and, but for the last layer, qkv, all read in place by the
    kernel of ``quantised_cpu``."""
    output, gate_up, down, *rest = (_linear(part) for part in linears)
    nothing = np.empty((0, output[0].shape[1]), np.int64), np.empty(0, np.float32), 0
    qkv = rest[0] if rest else nothing
    has_copy = any(part.dense is not None for part in linears)
    return BetweenCPU(
        tuple(linears),
        (output, _norm(norm), gate_up, down, _norm(next_norm), qkv),
        num_results=qkv[2] or len(norm.weight),
        most_rows=FEW_ROWS if has_copy else SERIAL_ROWS,
    )


def _linear(linear: PackedLinear) -> tuple[np.ndarray, np.ndarray, int]:
    assert linear.matrices is not None
    bias = np.empty(0, np.float32) if linear.bias is None else linear.bias.numpy()
    return linear.matrices.table, bias, linear.matrices.num_outputs


def _norm(norm: RMSNorm) -> tuple[np.ndarray, np.float32]:
    return norm.weight.numpy(), np.float32(norm.eps)

"""Linear layers and embeddings over rows as they lie in the file, for models too large for a dense
copy: values are made for each call, ``SLICE_BYTES`` at a time, and never kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stairs.checkpoints.dequantize import dequantize
from stairs.checkpoints.tensors import PackedRows

__all__ = ["SLICE_BYTES", "PackedEmbedding", "PackedLinear"]

SLICE_BYTES = 32 * 2**20  # of dense values held at a time


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Several matrices under each other, each with its own type of blocks."""

    parts: tuple[PackedRows, ...]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in) -> (T, out)."""
        outputs = [_product(x, part) for part in self.parts]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    rows: PackedRows
    dtype: torch.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """(T,) -> (T, C): only the rows asked for are unpacked."""
        return dequantize(self.rows.rows[ids], self.rows.type).to(self.dtype)


def _product(x: Tensor, part: PackedRows) -> Tensor:
    out = x.new_empty(len(x), part.shape[0])
    for start, stop in _slices(part.shape):
        weight = dequantize(part.rows[start:stop], part.type).to(x.dtype)
        torch.mm(x, weight.t(), out=out[:, start:stop])
    if not part.rotated_heads:
        return out
    # The file's row 2i + j of a head is the model's row i + j * (half a head).
    heads = out.view(len(x), part.rotated_heads, -1, 2)
    return heads.transpose(-1, -2).reshape(len(x), -1)


def _slices(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    num = max(1, SLICE_BYTES // (4 * shape[1]))
    for start in range(0, shape[0], num):
        yield start, min(start + num, shape[0])

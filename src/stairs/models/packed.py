"""Linear layers and embeddings over rows as they lie in the file.

In float32 on a CPU the kernel of ``quantised_cpu`` makes the values in registers. Elsewhere, and
for a type that it does not know, they are made for each call, ``SLICE_BYTES`` at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stairs.accounting.weights import FEW_ROWS
from stairs.checkpoints.dequantize import dequantize
from stairs.checkpoints.tensors import PackedRows

if TYPE_CHECKING:
    from stairs.models.quantised_cpu import PackedMatrices

__all__ = ["FEW_ROWS", "SLICE_BYTES", "PackedEmbedding", "PackedLinear"]

SLICE_BYTES = 32 * 2**20  # of dense values held at a time


class PackedLinear:
    """Several matrices under each other, each with its own type of blocks.

    ``dense``: a copy of them for more than ``FEW_ROWS`` rows, where BLAS is quicker than reading
    packed values again for every eight rows.
    """

    def __init__(
        self,
        parts: tuple[PackedRows, ...],
        bias: Tensor | None = None,
        *,
        in_registers: bool,
        dense: Tensor | None = None,
    ) -> None:
        self.parts = parts
        self.bias = bias
        self.dense = dense
        self.matrices: PackedMatrices | None = None  # of the kernel, where it reads them
        if in_registers:
            from stairs.models.quantised_cpu import packed_matrices  # Numba, only where it is used

            self.matrices = packed_matrices(parts)

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in) -> (T, out)."""
        if self.dense is not None and len(x) > FEW_ROWS:
            return F.linear(x, self.dense, self.bias)
        out = self._by_slices(x) if self.matrices is None else self.matrices.product(x)
        return out if self.bias is None else out + self.bias

    def bytes_read(self, num_rows: int) -> int:
        """Bytes of the rows, packed or dense, that a product with ``num_rows`` rows reads, once."""
        if self.dense is not None and num_rows > FEW_ROWS:
            return self.dense.nbytes
        return sum(part.rows.nbytes for part in self.parts) if num_rows else 0

    def _by_slices(self, x: Tensor) -> Tensor:
        outputs = [_product(x, part) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    rows: PackedRows
    dtype: torch.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """(T,) -> (T, C): only the rows asked for are unpacked."""
        return dequantize(self.rows.rows[ids], self.rows.type).to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.rows.rows.nbytes


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

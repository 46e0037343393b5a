"""``TensorSource``: a checkpoint's tensors under one set of names, read one at a time.

Nothing is held: ``load`` makes a new dense tensor on each call, so a model can be built a layer at
a time, and the file stays mapped. ``packed`` hands out quantised rows as they lie in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["PackedRows", "TensorSource"]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A quantised matrix (out, in): ``rows`` is (out, bytes of a row), ``type`` names the blocks
    in the gguf package's words (Q4_1: 32 values in 20 bytes)."""

    rows: torch.Tensor  # uint8
    type: str
    shape: tuple[int, int]


class TensorSource(Protocol):
    def names(self) -> frozenset[str]:
        """Exactly the tensors of the model, as ``layout`` names them."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A new, contiguous, dense tensor in ``dtype``, dequantised through float32."""
        ...

    def packed(self, name: str) -> PackedRows | None:
        """The quantised rows of a linear weight, (out, in) in every family; None where dense."""
        ...

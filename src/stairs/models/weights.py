"""From a checkpoint's tensors to a model's layers: dtype, device, rows put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stairs.checkpoints.tensors import PackedRows, TensorSource
from stairs.models.layers import DenseLinear, Embedding, Linear
from stairs.models.packed import PackedEmbedding, PackedLinear

__all__ = ["Weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """``source`` has exactly the tensors that ``checkpoints.layout`` lists, in those shapes.

    ``packed``: matrices that the file has in fewer bits than float32 stay there, mapped, and are
    unpacked by each call; else every matrix is loaded dense.
    """

    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    packed: bool = False

    def tensor(self, name: str) -> Tensor:
        return self.source.load(name, self.dtype).to(self.device)

    def linear(self, *names: str, bias: bool, transposed: bool = False) -> Linear:
        """The rows of several linear layers under each other: one product instead of several.
        ``transposed``: the checkpoint names them (in, out)."""
        biases = _stacked([self.tensor(f"{name}.bias") for name in names]) if bias else None
        rows = [self._packed(f"{name}.weight") for name in names]
        whole = tuple(part for part in rows if part is not None)
        if len(whole) == len(names):
            return PackedLinear(whole, biases)
        parts = [self.tensor(f"{name}.weight") for name in names]
        if transposed:
            parts = [part.t().contiguous() for part in parts]
        return DenseLinear(_stacked(parts), biases)

    def embedding(self, name: str) -> Callable[[Tensor], Tensor]:
        """(T,) ids -> (T, C)."""
        rows = self._packed(f"{name}.weight")
        if rows is not None:
            return PackedEmbedding(rows, self.dtype)
        return Embedding(self.tensor(f"{name}.weight"))

    def head(self, embedding: Callable[[Tensor], Tensor], *, tied: bool) -> Linear:
        """Logits: the head's own rows, or those of the embedding."""
        if not tied:
            return self.linear("lm_head", bias=False)
        if isinstance(embedding, PackedEmbedding):
            return PackedLinear((embedding.rows,))
        assert isinstance(embedding, Embedding)
        return DenseLinear(embedding.weight)

    def _packed(self, name: str) -> PackedRows | None:
        return self.source.packed(name) if self.packed else None


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)

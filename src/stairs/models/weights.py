"""From a checkpoint's tensors to a model's: in its dtype, on its device, rows put together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stairs.checkpoints.tensors import TensorSource
from stairs.models.layers import Linear

__all__ = ["Weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """``source`` has exactly the tensors that ``checkpoints.layout`` lists, in those shapes."""

    source: TensorSource
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str) -> Tensor:
        return self.source.load(name, self.dtype).to(self.device)

    def linear(self, *names: str, bias: bool) -> Linear:
        """The rows of several linear layers under each other: one product instead of several."""
        parts = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
        return Linear(_stacked(parts), _stacked(biases) if bias else None)


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)

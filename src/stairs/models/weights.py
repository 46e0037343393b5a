"""From a checkpoint's named tensors to a model's: every name is used once, or it is an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from stairs.errors import CheckpointError

__all__ = ["TensorSource", "Weights"]


class TensorSource(Protocol):
    """Where tensors come from; names are Hugging Face's, whatever the file's format."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """Dense and contiguous, dequantised where the file is quantised."""
        ...


class Weights:
    """Hands tensors out by name and shape, and remembers which were taken."""

    def __init__(self, source: TensorSource, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._source = source
        self._left = set(source.names())

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name``, which must have ``shape``."""
        if name not in self._left:
            raise CheckpointError(f"tensor {name!r} is missing from the checkpoint", param=name)
        found = tuple(self._source.shape(name))
        if found != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {found}, the config asks for {shape}", param=name
            )
        self._left.remove(name)
        return self._source.load(name, self.dtype).to(self.device)

    def stacked(self, names: Iterable[str], rows: Iterable[int], *columns: int) -> Tensor:
        """Tensors of one width under each other: one product instead of several."""
        parts = [self.take(n, r, *columns) for n, r in zip(names, rows, strict=True)]
        return torch.cat(parts)

    def finish(self) -> None:
        """Refuse a checkpoint that holds what the model did not ask for."""
        if self._left:
            shown = ", ".join(sorted(self._left)[:3])
            raise CheckpointError(
                f"{len(self._left)} tensors of the checkpoint are unknown to this model: {shown}"
            )

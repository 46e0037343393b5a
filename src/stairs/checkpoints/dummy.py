"""Random weights from a config alone, to measure a model whose file is not here.

Each tensor is seeded by its name, so it is the same in any order and on any machine of a kind.
Linear weights are scaled by 1/sqrt(inputs), so that activations keep their size through any
number of layers; norms scale by one, biases are small.
"""

from __future__ import annotations

import hashlib
import math

import torch

from stairs.checkpoints.layout import TensorSpec, tensor_specs
from stairs.checkpoints.tensors import PackedRows
from stairs.config import ModelConfig

__all__ = ["DummyTensors"]


class DummyTensors:
    """A ``TensorSource`` that holds nothing."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        self._specs = tensor_specs(config)
        self._seed = seed

    def names(self) -> frozenset[str]:
        return frozenset(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].shape

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        spec = self._specs[name]
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.randn(spec.shape, generator=generator).mul_(_scale(spec))
        return (values + 1 if _is_norm_weight(spec) else values).to(dtype)

    def packed(self, name: str) -> PackedRows | None:
        return None

    def sample(self, name: str) -> bytes:
        return f"dummy {self._seed}".encode()


def _is_norm_weight(spec: TensorSpec) -> bool:
    return len(spec.shape) == 1 and spec.name.endswith(".weight")


def _scale(spec: TensorSpec) -> float:
    if len(spec.shape) == 1:
        return 0.02
    return 1 / math.sqrt(spec.shape[0] if spec.transposed else spec.shape[1])

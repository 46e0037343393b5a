"""``TensorSource``: a checkpoint's tensors under one set of names, read one at a time.

Nothing is held: ``load`` makes a new dense tensor on each call, so a model can be built a layer at
a time, and the file stays mapped. ``packed`` hands out quantised rows as they lie in the file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch

from stairs.config import ModelConfig

__all__ = ["SAMPLE_BYTES", "PackedRows", "TensorSource", "fingerprint"]

SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A matrix (out, in) as it lies in the file: ``rows`` is (out, bytes of a row), ``type`` names
    what they hold in the gguf package's words (Q4_1: blocks of 32 values in 20 bytes; BF16).

    ``rotated_heads``: row 2i + j of each of that many heads is row i + j * (half a head) of the
    model, as llama.cpp stores q and k for its own rope; 0: rows are in order.
    """

    rows: torch.Tensor  # uint8, a view of the mapped file
    type: str
    shape: tuple[int, int]
    rotated_heads: int = 0


class TensorSource(Protocol):
    def names(self) -> frozenset[str]:
        """Exactly the tensors of the model, as ``layout`` names them."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A new, contiguous, dense tensor in ``dtype``, dequantised through float32."""
        ...

    def packed(self, name: str) -> PackedRows | None:
        """The rows of a matrix that the file has in less than 32 bits, (out, in) in every family;
        None where it has them in 32 or more, or the other way round."""
        ...

    def sample(self, name: str) -> bytes:
        """The tensor's first ``SAMPLE_BYTES`` at most, as stored."""
        ...


def fingerprint(config: ModelConfig, source: TensorSource) -> str:
    """Tells models apart without reading them whole: the config, and of every tensor its name,
    its shape and the beginning of its values. Another training run changes all of them."""
    digest = hashlib.sha256(repr(config).encode())
    for name in sorted(source.names()):
        digest.update(f"{name}{source.shape(name)}".encode())
        digest.update(source.sample(name))
    return digest.hexdigest()

"""A GGUF's tensors under transformers' names: rows in order again, dequantised on load."""

from __future__ import annotations

import torch

from stairs.checkpoints.dequantize import QUANTISED, SMALL, dequantize
from stairs.checkpoints.gguf import GGUF, GGUFTensor
from stairs.checkpoints.layout import TensorSpec, check_names, tensor_specs
from stairs.checkpoints.tensors import SAMPLE_BYTES, PackedRows
from stairs.config import ModelConfig
from stairs.errors import CheckpointError

__all__ = ["GGUFTensors"]

# llama.cpp's own helpers, already read into the config or used by nothing here.
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})
_DENSE = frozenset({"F64", "F32", "F16", "BF16"})


class GGUFTensors:
    """A ``TensorSource``. Names, shapes and types are checked when it is made, values never."""

    def __init__(self, file: GGUF, config: ModelConfig) -> None:
        self._specs = tensor_specs(config)
        self._tensors = file.tensors
        where = file.path.name
        names = file.tensors.keys() - _NOT_WEIGHTS
        check_names(names, [spec.gguf_name for spec in self._specs.values()], where)
        for spec in self._specs.values():
            tensor = file.tensors[spec.gguf_name]
            expected = spec.shape[::-1] if spec.transposed else spec.shape
            if tensor.shape != expected:
                raise CheckpointError(
                    f"{where}: tensor {tensor.name!r} is {tensor.shape}, the config says {expected}"
                )
            if tensor.type not in _DENSE | QUANTISED:
                raise CheckpointError(
                    f"{where}: tensor {tensor.name!r} has type {tensor.type}, which cannot be read"
                )

    def names(self) -> frozenset[str]:
        return frozenset(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].shape

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        spec, tensor = self._specs[name], self._tensors[self._specs[name].gguf_name]
        rows = _rows(tensor, spec)
        dense = dequantize(rows, tensor.type).view(tensor.shape)
        if spec.transposed:
            dense = dense.T
        loaded = dense.to(dtype, memory_format=torch.contiguous_format)
        # A view of the mapped file is copied: the caller owns what it gets.
        return loaded.clone() if loaded.data_ptr() == rows.data_ptr() else loaded.contiguous()

    def packed(self, name: str) -> PackedRows | None:
        spec, tensor = self._specs[name], self._tensors[self._specs[name].gguf_name]
        if tensor.type not in SMALL or len(tensor.shape) != 2:
            return None
        shape = tensor.shape[0], tensor.shape[1]
        return PackedRows(_bytes(tensor), tensor.type, shape, spec.rotated_heads)

    def sample(self, name: str) -> bytes:
        return bytes(self._tensors[self._specs[name].gguf_name].data[:SAMPLE_BYTES])


def _rows(tensor: GGUFTensor, spec: TensorSpec) -> torch.Tensor:
    """The file's bytes as (rows, bytes), a view unless the rows of q or k must change places.

    The converter wrote row 2i + j of a head from its row i + j * (half a head), so that rope turns
    neighbours; gathering the packed rows undoes it for every type alike.
    """
    rows = _bytes(tensor)
    if not spec.rotated_heads:
        return rows
    half = tensor.shape[0] // spec.rotated_heads // 2
    grouped = rows.view(spec.rotated_heads, half, 2, -1)
    return grouped.transpose(1, 2).reshape(tensor.shape[0], -1)


def _bytes(tensor: GGUFTensor) -> torch.Tensor:
    return torch.frombuffer(tensor.data, dtype=torch.uint8).view(tensor.shape[0], -1)

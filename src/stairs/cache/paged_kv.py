"""The tensors behind the block ids: per layer k and v of (num_blocks, kv_heads, block_size,
head_dim).

One head's block is contiguous, so a kernel reads it in one run. The pages are not touched when
they are allocated: what a block held before is never read, because lengths bound every read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stairs.attention.meta import LayerKV

__all__ = ["PagedKV"]

_LINE = 64  # bytes of a cache line: no row straddles one more than it must


class PagedKV:
    """K and V of all layers: 2 x layers x blocks x kv_heads x block_size x head_dim values."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.layers = [
            LayerKV(_pages(shape, dtype, device), _pages(shape, dtype, device))
            for _ in range(num_layers)
        ]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in all layers."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.layers[0].k.device).unbind(1)
        for layer in self.layers:
            layer.k[target] = layer.k[source]
            layer.v[target] = layer.v[source]

    @property
    def nbytes(self) -> int:
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return sum(layer.k[0].nbytes + layer.v[0].nbytes for layer in self.layers)


def _pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised pages. On a CPU through numpy, which asks the system for huge pages: decode
    reads blocks all over the pool, and fewer address translations made it 10 to 20 % faster."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)

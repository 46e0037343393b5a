"""The parts decoders are made of: weights and a call, no other state.

Axes: T tokens fed, C hidden_size, H query heads, G kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "ACTIVATIONS",
    "DenseLinear",
    "Embedding",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "Rotary",
    "apply_rotary",
]

Linear = Callable[[Tensor], Tensor]  # (T, in) -> (T, out)


@dataclass(frozen=True, slots=True)
class DenseLinear:
    weight: Tensor  # (out, in)
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def bytes_read(self, num_rows: int) -> int:
        """Bytes of the matrix that a product with ``num_rows`` rows reads, once."""
        return self.weight.nbytes if num_rows else 0


@dataclass(frozen=True, slots=True)
class Embedding:
    weight: Tensor  # (V, C)

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: Tensor  # (C,)
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor  # (C,)
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Rotary:
    """Rotary position embedding (Su et al. 2021), half-split form: frequency i is
    theta^(-2i/D) / factors[i]. Angles are float32, as the models were trained; their cos and sin
    are multiplied by ``attention_factor``, then cast."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        *,
        factors: Sequence[float] = (),
        attention_factor: float = 1.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq = 1.0 / theta**powers
        if factors:
            inv_freq = inv_freq / torch.tensor(factors)
        self.inv_freq = inv_freq.to(device)  # (D/2,)
        self.attention_factor = attention_factor
        self.dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin of shape (T, 1, D/2): computed once a step, used by all layers."""
        if positions.device.type == "cpu" and self.dtype == torch.float32:
            from stairs.models.glue_cpu import rotation  # Numba, only where it is used

            return rotation(positions, self.inv_freq, self.attention_factor)
        angles = positions.float()[:, None, None] * self.inv_freq
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.to(self.dtype), sin.to(self.dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x[i], x[i + D/2]) of ``x`` (T, heads, D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
}

"""From one attention to the next: output product, norm, gated MLP, norm, the next layer's qkv.

Axes as in layers.py: T tokens, C hidden_size, H query heads, G kv heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from stairs.models.fused import add_norm, gated
from stairs.models.layers import Linear, RMSNorm
from stairs.models.packed import PackedLinear

if TYPE_CHECKING:
    from stairs.models.between_cpu import BetweenCPU

__all__ = ["Between"]


@dataclass(frozen=True, slots=True)
class Between:
    """``qkv``: of the next layer, None after the last one. Few rows on a CPU take one call, with
    the same bits, where its kernel reads every matrix in place."""

    output: Linear
    norm: RMSNorm
    gate_up: Linear
    down: Linear
    activation: str
    next_norm: RMSNorm
    qkv: Linear | None
    few_rows: BetweenCPU | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "few_rows", self._in_one_call())

    def __call__(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Attended (T, H * D), x (T, C) -> the next layer's qkv (T, H * D + 2 G * D), or after the
        last layer the normed states (T, C); and the new x."""
        if self.few_rows is not None and len(x) <= self.few_rows.most_rows:
            return self.few_rows(attended, x)
        return self.call_by_call(attended, x)

    def call_by_call(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        normed, x = add_norm(x, self.output(attended), self.norm)
        branch = self.down(gated(self.gate_up(normed), self.activation))
        normed, x = add_norm(x, branch, self.next_norm)
        return (normed if self.qkv is None else self.qkv(normed)), x

    def _in_one_call(self) -> BetweenCPU | None:
        linears = [self.output, self.gate_up, self.down, self.qkv]
        packed = [part for part in linears if isinstance(part, PackedLinear) and part.matrices]
        if self.activation != "silu" or len(packed) + (self.qkv is None) < len(linears):
            return None
        from stairs.models.between_cpu import between_cpu  # Numba, only where it is used

        return between_cpu(packed, self.norm, self.next_norm)

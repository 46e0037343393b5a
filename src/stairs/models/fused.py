"""What stands between the products: one Triton kernel each on a GPU, one Numba kernel each for
float32 on a CPU, torch everywhere else.

The ``_torch`` twin of each is its definition; the kernels compute in float32 and round once.
Axes as in layers.py: T tokens, C hidden_size, H query heads, G kv heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stairs.attention.attend import attend, attend_written
from stairs.attention.devices import triton_supports
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.models.layers import ACTIVATIONS, LayerNorm, RMSNorm, apply_rotary

__all__ = ["activated", "add_norm", "attend_rotated", "gated"]


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda" and triton_supports(x.device, x.dtype, 1) is None


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


def add_norm(x: Tensor, branch: Tensor, norm: RMSNorm | LayerNorm) -> tuple[Tensor, Tensor]:
    """x, branch (T, C) -> norm(x + branch), x + branch."""
    if _on_gpu(x):
        from stairs.models.triton_glue import add_norm_triton

        return add_norm_triton(x, branch, norm)
    if isinstance(norm, RMSNorm) and _on_cpu(x):
        from stairs.models.glue_cpu import add_rms_norm

        return add_rms_norm(x, branch, norm.weight, norm.eps)
    return add_norm_torch(x, branch, norm)


def add_norm_torch(x: Tensor, branch: Tensor, norm: RMSNorm | LayerNorm) -> tuple[Tensor, Tensor]:
    x = x + branch
    return norm(x), x


def activated(x: Tensor, activation: str) -> Tensor:
    """act(x), of a plain MLP."""
    if activation == "gelu_new" and _on_cpu(x):
        from stairs.models.glue_cpu import gelu

        return gelu(x)
    return ACTIVATIONS[activation](x)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """(T, 2F): gate, then up -> act(gate) * up (T, F)."""
    if activation == "silu" and _on_gpu(gate_up):
        from stairs.models.triton_glue import silu_mul_triton

        return silu_mul_triton(gate_up)
    if activation == "silu" and _on_cpu(gate_up):
        from stairs.models.glue_cpu import silu_mul

        return silu_mul(gate_up)
    return gated_torch(gate_up, activation)


def gated_torch(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def attend_rotated(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    norms: tuple[RMSNorm, RMSNorm] | None,
    layer_kv: LayerKV,
    meta: AttnMeta,
    *,
    num_heads: int,
    backend: str,
) -> Tensor:
    """Norm q and k, rotate them, write K and V, attend: heads (T, H + 2G, D) -> (T, H, D).

    ``rotation``: cos and sin (T, 1, D/2), None for a layer without positions.
    """
    if meta.work and _on_gpu(heads):
        from stairs.models.triton_glue import rotate_and_write_triton

        q = rotate_and_write_triton(heads, rotation, norms, layer_kv, meta, num_heads=num_heads)
        return attend_written(q, layer_kv, meta)
    if norms is None and rotation is not None and _on_cpu(heads):
        from stairs.models.attend_cpu import rotate_and_attend, takes
        from stairs.models.glue_cpu import rotate

        if backend in ("auto", "cpu") and takes(heads, layer_kv, meta):
            return rotate_and_attend(heads, rotation, layer_kv, meta, num_heads=num_heads)
        v_start = (heads.shape[1] + num_heads) // 2
        rotate(heads, *rotation, v_start)
        q, k, v = heads[:, :num_heads], heads[:, num_heads:v_start], heads[:, v_start:]
    else:
        q, k, v = rotate_torch(heads, rotation, norms, num_heads=num_heads)
    return attend(q, k, v, layer_kv, meta, backend=backend)


def rotate_torch(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    norms: tuple[RMSNorm, RMSNorm] | None,
    *,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = (heads.shape[1] - num_heads) // 2
    q, k, v = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    if rotation is not None:
        q, k = apply_rotary(q, *rotation), apply_rotary(k, *rotation)
    return q, k, v

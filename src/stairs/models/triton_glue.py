"""The kernels of ``fused``: residual + norm, q/k norm + rotation + K/V write, SiLU x up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stairs.attention.meta import AttnMeta, LayerKV
from stairs.models.layers import LayerNorm, RMSNorm

__all__ = [
    "add_norm_kernel",
    "add_norm_triton",
    "rotate_and_write_triton",
    "rotate_kernel",
    "silu_mul_kernel",
    "silu_mul_triton",
]


@triton.jit
def add_norm_kernel(
    x, branch, weight, bias, normed, total, eps, C: tl.constexpr, BC: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """A row of C: total = x + branch, normed = its RMS norm, or layer norm where CENTRED."""
    row = tl.program_id(0).to(tl.int64) * C
    c = tl.arange(0, BC)
    inside = c < C
    s = tl.load(x + row + c, inside, 0.0).to(tl.float32)
    s += tl.load(branch + row + c, inside, 0.0).to(tl.float32)
    s = s.to(total.dtype.element_ty)
    tl.store(total + row + c, s, inside)
    s = s.to(tl.float32)
    if CENTRED:
        s = tl.where(inside, s - tl.sum(s, 0) / C, 0.0)
    s *= tl.rsqrt(tl.sum(s * s, 0) / C + eps)
    s *= tl.load(weight + c, inside, 0.0).to(tl.float32)
    if CENTRED:
        s += tl.load(bias + c, inside, 0.0).to(tl.float32)
    tl.store(normed + row + c, s.to(normed.dtype.element_ty), inside)


@triton.jit
def silu_mul_kernel(gate_up, out, F: tl.constexpr, BF: tl.constexpr):
    blocks: tl.constexpr = (F + BF - 1) // BF
    row = (tl.program_id(0) // blocks).to(tl.int64)
    f = tl.program_id(0) % blocks * BF + tl.arange(0, BF)
    gate = tl.load(gate_up + row * 2 * F + f, f < F, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, f < F, 0.0).to(tl.float32)
    tl.store(out + row * F + f, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), f < F)


@triton.jit(do_not_specialize=["num_slots"])
def rotate_kernel(
    heads, cos, sin, q_weight, k_weight, slots, q, k_pool, v_pool, eps, num_slots, page_stride,
    H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BHALF: tl.constexpr,
    BH: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """BH of the H + 2G heads of a token: q to ``q`` (T, H, D), k and v to the pools at its slot."""
    half: tl.constexpr = D // 2
    tiles: tl.constexpr = (H + 2 * G + BH - 1) // BH
    token = (tl.program_id(0) // tiles).to(tl.int64)
    head = (tl.program_id(0) % tiles * BH + tl.arange(0, BH))[:, None]
    i = tl.arange(0, BHALF)[None, :]
    inside = (head < H + 2 * G) & (i < half)
    at = heads + (token * (H + 2 * G) + head) * D + i
    a = tl.load(at, inside, 0.0).to(tl.float32)
    b = tl.load(at + half, inside, 0.0).to(tl.float32)
    is_q = head < H
    is_v = head >= H + G
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        q_a = tl.load(q_weight + i, i < half, 0.0).to(tl.float32)
        q_b = tl.load(q_weight + half + i, i < half, 0.0).to(tl.float32)
        k_a = tl.load(k_weight + i, i < half, 0.0).to(tl.float32)
        k_b = tl.load(k_weight + half + i, i < half, 0.0).to(tl.float32)
        a = tl.where(is_v, a, a * scale * tl.where(is_q, q_a, k_a))
        b = tl.where(is_v, b, b * scale * tl.where(is_q, q_b, k_b))
    if ROTATED:
        c = tl.load(cos + token * half + i, i < half, 0.0).to(tl.float32)
        s = tl.load(sin + token * half + i, i < half, 0.0).to(tl.float32)
        c = tl.where(is_v, 1.0, c)
        s = tl.where(is_v, 0.0, s)
        turned = a * c - b * s
        b = b * c + a * s
        a = turned
    q_at = q + (token * H + head) * D + i
    tl.store(q_at, a.to(q.dtype.element_ty), inside & is_q)
    tl.store(q_at + half, b.to(q.dtype.element_ty), inside & is_q)
    slot = tl.load(slots + token)
    stored = inside & (slot >= 0) & (slot < num_slots)
    kv_head = tl.where(is_v, head - H - G, head - H)
    place = (slot // BLOCK) * page_stride + (kv_head * BLOCK + slot % BLOCK) * D + i
    is_k = (head >= H) & (head < H + G)
    kind = k_pool.dtype.element_ty
    tl.store(k_pool + place, a.to(kind), stored & is_k)
    tl.store(k_pool + place + half, b.to(kind), stored & is_k)
    tl.store(v_pool + place, a.to(kind), stored & is_v)
    tl.store(v_pool + place + half, b.to(kind), stored & is_v)


def add_norm_triton(x: Tensor, branch: Tensor, norm: RMSNorm | LayerNorm) -> tuple[Tensor, Tensor]:
    num_tokens, width = x.shape
    normed, total = torch.empty_like(x), torch.empty_like(x)
    centred = isinstance(norm, LayerNorm)
    block = triton.next_power_of_2(width)
    if num_tokens:
        add_norm_kernel[(num_tokens,)](
            x, branch, norm.weight, norm.bias if isinstance(norm, LayerNorm) else norm.weight,
            normed, total, norm.eps, C=width, BC=block, CENTRED=centred,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return normed, total


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, width))
    if num_tokens:
        silu_mul_kernel[(num_tokens * triton.cdiv(width, 1024),)](
            gate_up, out, F=width, BF=1024, num_warps=4
        )
    return out


def rotate_and_write_triton(
    heads: Tensor, rotation: tuple[Tensor, Tensor] | None, norms: tuple[RMSNorm, RMSNorm] | None,
    layer_kv: LayerKV, meta: AttnMeta, *, num_heads: int,
) -> Tensor:  # fmt: skip
    """heads (T, H + 2G, D) contiguous -> q (T, H, D)."""
    num_tokens, _, head_dim = heads.shape
    num_blocks, kv_heads, block_size, _ = layer_kv.k.shape
    q = heads.new_empty((num_tokens, num_heads, head_dim))
    cos, sin = rotation if rotation is not None else (q, q)
    q_weight, k_weight = (norm.weight for norm in norms) if norms is not None else (q, q)
    tile = 4  # heads of one program
    if num_tokens:
        rotate_kernel[(num_tokens * triton.cdiv(num_heads + 2 * kv_heads, tile),)](
            heads, cos, sin, q_weight, k_weight, meta.slots, q, layer_kv.k, layer_kv.v,
            norms[0].eps if norms is not None else 0.0, num_blocks * block_size,
            layer_kv.k.stride(0), H=num_heads, G=kv_heads, BLOCK=block_size, D=head_dim,
            BHALF=triton.next_power_of_2(head_dim // 2), BH=tile, NORMED=norms is not None,
            ROTATED=rotation is not None, num_warps=2,
        )  # fmt: skip
    if meta.counting:
        row_bytes = 2 * kv_heads * head_dim * layer_kv.k.element_size()
        meta.counts[:, AttnMeta.KV_BYTES_WRITTEN] += meta.cu_q.diff() * row_bytes
    return q

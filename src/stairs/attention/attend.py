"""The engine's door: write this step's K and V into the pages, then attend over them.

One call holds every sequence of the step, prefill chunks and decodes alike. All implementations
compute softmax(scale * Q K^T) V over the same pairs, and add what their loops visited to
``meta.counts``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stairs.attention.devices import choose_paged, cutter_for
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.online import paged_online
from stairs.attention.pages import write_kv
from stairs.attention.reference import paged_reference
from stairs.attention.tiles import HopperTile, TritonTile
from stairs.errors import ConfigError

__all__ = ["attend", "attend_paged", "attend_written", "cut", "write_kv"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_kv: LayerKV,
    meta: AttnMeta,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """q (T, H, D), k and v (T, G, D) of one dtype -> (T, H, D) in that dtype.

    The pool may have another dtype; ``scale`` is 1/sqrt(D) when None.
    Raises ConfigError for shapes or dtypes that do not fit, IndexError for a page outside the pool.
    """
    _check(q, k, v, layer_kv)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    choice = choose_paged(
        layer_kv, backend=backend, dtype=q.dtype, num_heads=q.shape[1], device=q.device,
    )  # fmt: skip
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if choice.implementation == "cpu":
        from stairs.attention.cpu import attend_pages  # Numba, only where it is used

        attend_pages(q, k, v, layer_kv, meta, scale=scale, out=out)
        return out
    if choice.implementation in ("triton", "hopper"):
        if not meta.work:
            meta = cut(q, layer_kv, meta, implementation=choice.implementation)
        _attend_gpu(q, k, v, layer_kv, meta, scale=scale, out=out)
        return out
    write_kv(k, v, layer_kv, meta)
    if choice.implementation == "reference":
        paged_reference(q, layer_kv, meta, scale=scale, out=out)
    else:
        paged_online(q, layer_kv, meta, scale=scale, tile=choice.tile, out=out)
    return out


def _attend_gpu(
    q: Tensor, k: Tensor, v: Tensor, layer_kv: LayerKV, meta: AttnMeta, *, scale: float, out: Tensor
) -> None:
    from stairs.attention.triton_paged import write_pages  # Triton, only on a GPU

    if q.shape[0]:
        write_pages(k, v, layer_kv, meta)
        attend_paged(q, layer_kv, meta, scale=scale, out=out)


def attend_paged(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, *, scale: float, out: Tensor
) -> None:
    """q (T, H, D) over the pages, cut as ``meta.work`` says, into ``out`` (T, H, D) contiguous:
    each list by the kernel its tile is of."""
    from stairs.attention.triton_paged import attend_cut

    if q.stride(2) != 1:
        q = q.contiguous()
    for work in meta.work:
        if isinstance(work.tile, TritonTile):
            attend_cut(q, layer_kv, meta, work, scale=scale, out=out)
        elif isinstance(work.tile, HopperTile):
            from stairs.attention.hopper_decode import attend_short

            attend_short(q, layer_kv, meta, work, scale=scale, out=out)
        else:
            from stairs.attention.hopper_chunks import attend_chunks

            attend_chunks(q, layer_kv, meta, work, scale=scale, out=out)


def attend_written(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, *, scale: float | None = None
) -> Tensor:
    """``attend`` on a GPU for a step whose K and V are in the pages and whose work is cut."""
    assert meta.work
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    attend_paged(q, layer_kv, meta, scale=q.shape[-1] ** -0.5 if scale is None else scale, out=out)
    return out


def cut(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, *, implementation: str = "triton"
) -> AttnMeta:
    """``meta`` with its work: for calls whose batch did not bring it. Waits for the device."""
    _, kv_heads, _, head_dim = layer_kv.k.shape
    cutter = cutter_for(
        q.shape[1], kv_heads, head_dim, dtype=q.dtype, device=q.device,
        implementation=implementation,
    )  # fmt: skip
    num_q = meta.cu_q.diff().cpu().numpy().astype("int64")
    return replace(meta, work=cutter(num_q, meta.kv_len.cpu().numpy().astype("int64")))


def _check(q: Tensor, k: Tensor, v: Tensor, layer_kv: LayerKV) -> None:
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = layer_kv.k.shape[1]
    if num_heads % kv_heads:
        raise ConfigError(
            f"num_heads {num_heads} is not a multiple of num_kv_heads {kv_heads}",
            param="num_kv_heads",
        )
    if k.shape != (num_tokens, kv_heads, head_dim) or v.shape != k.shape:
        raise ConfigError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be "
            f"{(num_tokens, kv_heads, head_dim)}",
            param="head_dim",
        )
    if layer_kv.k.shape[3] != head_dim or layer_kv.v.shape != layer_kv.k.shape:
        raise ConfigError(
            f"the pool's head_dim {layer_kv.k.shape[3]} is not q's {head_dim}", param="head_dim"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(
            f"q, k, v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}", param="dtype"
        )

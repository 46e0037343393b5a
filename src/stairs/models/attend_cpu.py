"""Rotate q and k, write K and V, attend: one call for a step of few rows, in float32 on a CPU.

The bits are those of ``glue_cpu.rotate`` and ``attend``; what is saved is calls, and turning the
step's tensors into arrays again in every layer.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from stairs.attention.choose import KEY_TILE
from stairs.attention.cpu import write_and_attend
from stairs.attention.jit import njit, use_torch_threads
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.models.glue_cpu import SERIAL_ROWS, rotate_few

__all__ = ["rotate_and_attend", "takes"]

Rotation = tuple[Tensor, Tensor]


@njit
def _copied(heads, first, num):
    out = np.empty((heads.shape[0], num, heads.shape[2]), heads.dtype)
    for row in range(out.shape[0]):
        for head in range(num):
            for e in range(out.shape[2]):
                out[row, head, e] = heads[row, first + head, e]
    return out


@njit(nogil=True, cache=True)
def _rotate_and_attend(heads, rotation, pools, step, options, num_heads, num_threads, out):
    cos, sin = rotation
    cu_q, kv_len, table, slots, counts = step
    scale, key_tile, whole = options
    kv_heads = (heads.shape[1] - num_heads) // 2
    rotate_few(heads, cos, sin, num_heads + kv_heads)
    write_and_attend(
        _copied(heads, 0, num_heads),
        _copied(heads, num_heads, kv_heads),
        _copied(heads, num_heads + kv_heads, kv_heads),
        pools[0], pools[1], cu_q, kv_len, table, slots, scale, out, counts, num_threads,
        key_tile, whole,
    )  # fmt: skip


def takes(heads: Tensor, layer_kv: LayerKV, meta: AttnMeta) -> bool:
    """Whether the step is one of few rows, over a pool of float32."""
    return heads.shape[0] <= SERIAL_ROWS and layer_kv.k.dtype == torch.float32


def rotate_and_attend(
    heads: Tensor, rotation: Rotation, layer_kv: LayerKV, meta: AttnMeta, *, num_heads: int
) -> Tensor:
    """heads (T, H + 2G, D), which is overwritten; cos and sin (T, 1, D/2) -> (T, H, D)."""
    angles, step = _arrays(rotation, meta)
    rows = heads.numpy()
    out = np.empty((rows.shape[0], num_heads, rows.shape[2]), np.float32)
    options = (
        np.float32(rows.shape[2] ** -0.5),
        KEY_TILE,
        meta.batch_invariant,
    )
    pools = layer_kv.k.numpy(), layer_kv.v.numpy()
    _rotate_and_attend(rows, angles, pools, step, options, num_heads, use_torch_threads(), out)
    return torch.from_numpy(out)


_latest = threading.local()  # of the step that this thread runs: its tensors as arrays


def _arrays(rotation: Rotation, meta: AttnMeta) -> tuple[tuple[np.ndarray, ...], ...]:
    if getattr(_latest, "meta", None) is not meta or _latest.rotation is not rotation:
        step = meta.cu_q, meta.kv_len, meta.block_table.contiguous(), meta.slots, meta.counts
        _latest.arrays = tuple(tuple(x.numpy() for x in tensors) for tensors in (rotation, step))
        _latest.meta, _latest.rotation = meta, rotation
    arrays: tuple[tuple[np.ndarray, ...], ...] = _latest.arrays
    return arrays

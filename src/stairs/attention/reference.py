"""The specification: O = softmax(scale * Q K^T) V with the whole score matrix in memory.

Three passes over that matrix (Q K^T, softmax, times V), one sequence at a time, in the inputs'
dtype and at least float32. Key j is visible to query i when j <= i + Sk - Sq (bottom-right).
A row that sees no key gives O = 0 and LSE = -inf; LSE is the natural logarithm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.pages import gather, sequences

__all__ = ["compute_dtype", "paged_reference", "reference_attention", "visible_keys"]


class _Result(NamedTuple):
    out: Tensor
    lse: Tensor
    num_pairs: int  # unmasked entries of the score matrix, over heads


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The widest of ``dtypes`` and float32."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def visible_keys(
    queries: range, keys: range, *, past: int, device: torch.device | None = None
) -> Tensor:
    """The staircase: (queries, keys) bool, true where j <= i + past; past is Sk - Sq."""
    rows = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    return torch.arange(keys.start, keys.stop, device=device) <= rows + past


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """q (..., Sq, H, D), k and v (..., Sk, G, D) -> O (..., Sq, H, D), LSE (..., Sq, H).

    H is a multiple of G. ``scale`` is 1/sqrt(D) when None. LSE has the compute dtype.
    """
    result = _materialised(q, k, v, causal=causal, scale=scale)
    return result.out, result.lse


def _materialised(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> _Result:
    num_q, num_heads, head_dim = q.shape[-3:]
    num_kv, kv_heads, _ = k.shape[-3:]
    dtype = compute_dtype(q.dtype, k.dtype)
    group = num_heads // kv_heads
    queries = q.to(dtype).transpose(-3, -2)  # (..., H, Sq, D)
    keys = k.to(dtype).transpose(-3, -2).repeat_interleave(group, dim=-3)
    values = v.to(dtype).transpose(-3, -2).repeat_interleave(group, dim=-3)

    scores = queries @ keys.transpose(-1, -2)  # trip 1: (..., H, Sq, Sk), held to the end
    scores *= head_dim**-0.5 if scale is None else scale
    visible = torch.ones((num_q, num_kv), dtype=torch.bool, device=q.device)
    if causal:
        visible = visible_keys(range(num_q), range(num_kv), past=num_kv - num_q, device=q.device)
        scores.masked_fill_(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if num_kv:  # trip 2: softmax, in place so that one matrix is held
        peak = scores.amax(dim=-1, keepdim=True).masked_fill_(~visible.any(-1, keepdim=True), 0)
        scores.sub_(peak).exp_()
        total = scores.sum(dim=-1, keepdim=True)
        scores.div_(total.masked_fill_(total == 0, 1))
    out = (scores @ values).transpose(-3, -2)  # trip 3
    num_pairs = int(visible.sum()) * scores[..., 0, 0].numel() if scores.numel() else 0
    return _Result(out.to(q.dtype), lse.transpose(-1, -2), num_pairs)


def paged_reference(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, *, scale: float, out: Tensor
) -> None:
    """q (T, H, D) over the pages of ``layer_kv``, one sequence after the other, into out."""
    for sequence in sequences(meta):
        pages = meta.block_table[sequence.seat]
        rows = slice(sequence.first, sequence.first + sequence.num_q)
        keys = gather(layer_kv.k, pages, start=0, stop=sequence.num_kv)  # (G, Sk, D)
        values = gather(layer_kv.v, pages, start=0, stop=sequence.num_kv)
        result = _materialised(
            q[rows], keys.transpose(0, 1), values.transpose(0, 1), causal=True, scale=scale
        )
        out[rows] = result.out
        counts = meta.counts[sequence.seat]
        counts[AttnMeta.PAIRS] += result.num_pairs
        counts[AttnMeta.KV_BYTES_READ] += keys.nbytes + values.nbytes

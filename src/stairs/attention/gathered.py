"""Long rows on a CPU: a sequence's pages are gathered once, then torch's SDPA tiles over them.

The causal mask is bottom-right aligned and no (queries, keys) mask is built: the keys before the
first query are seen by every row (one unmasked call), the rest is a square that torch masks
itself (one causal call); the two are merged by the law of ``online``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stairs.attention.choose import SHORT_ROWS
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.online import State, finish, merge, partial
from stairs.attention.pages import gather, sequences
from stairs.attention.reference import compute_dtype

__all__ = ["attend_long"]


def attend_long(q: Tensor, layer_kv: LayerKV, meta: AttnMeta, *, scale: float, out: Tensor) -> None:
    """Every sequence of at least SHORT_ROWS queries: q (T, H, D) into the same rows of out."""
    dtype = compute_dtype(q.dtype, layer_kv.k.dtype)
    for sequence in sequences(meta):
        if sequence.num_q < SHORT_ROWS:
            continue
        pages = meta.block_table[sequence.seat]
        keys = gather(layer_kv.k, pages, start=0, stop=sequence.num_kv)
        values = gather(layer_kv.v, pages, start=0, stop=sequence.num_kv)
        counts = meta.counts[sequence.seat]
        counts[AttnMeta.KV_BYTES_READ] += keys.nbytes + values.nbytes
        rows = slice(sequence.first, sequence.first + sequence.num_q)
        queries = q[rows].to(dtype).transpose(0, 1)  # (H, Sq, D)
        result, num_pairs = _staircase(queries, keys.to(dtype), values.to(dtype), scale=scale)
        out[rows] = result.transpose(0, 1)
        counts[AttnMeta.PAIRS] += num_pairs


def _staircase(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float
) -> tuple[Tensor, int]:
    """queries (H, Sq, D), keys and values (G, Sk, D) -> O (H, Sq, D) and the pairs computed."""
    num_q = queries.shape[1]
    past = keys.shape[1] - num_q
    blind = max(0, -past)  # rows above the staircase see no key
    out = queries.new_zeros(queries.shape)
    if blind == num_q:
        return out, 0
    square, num_pairs = _sdpa(
        queries[:, blind:], keys[:, max(0, past) :], values[:, max(0, past) :],
        scale=scale, causal=True,
    )  # fmt: skip
    if past > 0:
        prefix, num_prefix_pairs = _sdpa(
            queries, keys[:, :past], values[:, :past], scale=scale, causal=False
        )
        return finish(merge(prefix, square))[0], num_pairs + num_prefix_pairs
    out[:, blind:] = square.acc
    return out, num_pairs


def _sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool
) -> tuple[State, int]:
    """One call of torch's CPU kernel, which shares a K/V head among its query heads itself."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), 0.0, causal, scale=scale
    )
    num_rows, num_keys = queries.shape[1], keys.shape[1]
    visible = num_keys * (num_keys + 1) // 2 if causal else num_rows * num_keys
    return partial(out[0], lse[0]), queries.shape[0] * visible

"""The specification: O = softmax(scale * Q K^T) V with the whole score matrix in memory.

Three trips over that matrix (Q K^T, softmax, times V), one sequence at a time, in the inputs'
dtype and at least float32. Key j is visible to query i when j <= i + Sk - Sq (bottom-right).
A row that sees no key gives O = 0 and LSE = -inf; LSE is the natural logarithm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.pages import gather, sequences

__all__ = ["compute_dtype", "paged_reference", "reference_attention", "visible_keys"]

_BLOCK = 16  # rows of one product, see _Block


class _Block(NamedTuple):
    """Rows at positions 16 b .. 16 b + 15, over the keys that the last of them sees.

    BLAS and sum() choose their order of summation by shape. A block's shapes depend on b alone,
    so appending a token changes no earlier row by a bit, and a row fed alone equals the same row
    of a whole prompt.
    """

    rows: slice  # of q
    inside: slice  # the same rows in the block
    num_keys: int  # keys of the block, cut to those that exist
    visible: Tensor  # (16, keys of the block) bool

    def load(self, matrix: Tensor) -> Tensor:
        """This block of the score matrix (..., H, Sq, Sk), zero where the matrix has no entry."""
        block = matrix.new_zeros((*matrix.shape[:-2], *self.visible.shape))
        block[..., self.inside, : self.num_keys] = matrix[..., self.rows, : self.num_keys]
        return block

    def store(self, block: Tensor, matrix: Tensor) -> None:
        matrix[..., self.rows, : self.num_keys] = block[..., self.inside, : self.num_keys]


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


def _blocks(num_q: int, num_kv: int, *, causal: bool, device: torch.device) -> list[_Block]:
    """The rows that see a key, in blocks at absolute positions."""
    past = num_kv - num_q
    first = max(past, 0) if causal else past
    blocks: list[_Block] = []
    if not num_q or not num_kv:
        return blocks
    for start in range(first // _BLOCK * _BLOCK, num_kv, _BLOCK):
        low, high = max(start, first), min(start + _BLOCK, num_kv)
        num_keys = start + _BLOCK if causal else num_kv
        visible = visible_keys(
            range(_BLOCK), range(num_keys), past=start if causal else num_kv, device=device
        )
        blocks.append(
            _Block(
                rows=slice(low - past, high - past),
                inside=slice(low - start, high - start),
                num_keys=min(num_keys, num_kv),
                visible=visible,
            )
        )
    return blocks


def _materialised(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> _Result:
    *batch, num_q, num_heads, head_dim = q.shape
    num_kv, kv_heads, _ = k.shape[-3:]
    dtype = compute_dtype(q.dtype, k.dtype)
    queries = q.to(dtype).transpose(-3, -2)  # (..., H, Sq, D)
    # Zeros up to the end of the last block: no row sees them.
    keys, values = (
        F.pad(x.to(dtype).transpose(-3, -2), (0, 0, 0, -num_kv % _BLOCK)).repeat_interleave(
            num_heads // kv_heads, dim=-3
        )
        for x in (k, v)
    )
    blocks = _blocks(num_q, num_kv, causal=causal, device=q.device)
    scores = queries.new_empty((*batch, num_heads, num_q, num_kv))  # held to the end
    out = queries.new_zeros(queries.shape)
    lse = queries.new_full(queries.shape[:-1], -torch.inf)
    num_pairs = 0
    for block in blocks:  # trip 1: Q K^T
        padded = queries.new_zeros((*batch, num_heads, _BLOCK, head_dim))
        padded[..., block.inside, :] = queries[..., block.rows, :]
        product = padded @ keys[..., : block.visible.shape[1], :].transpose(-1, -2)
        product *= head_dim**-0.5 if scale is None else scale
        block.store(product, scores)
        num_pairs += int(block.visible[block.inside].sum()) * padded[..., 0, 0].numel()
    for block in blocks:  # trip 2: softmax, in place
        weights = block.load(scores).masked_fill_(~block.visible, -torch.inf)
        peak = weights.amax(dim=-1, keepdim=True)
        total = weights.sub_(peak).exp_().sum(dim=-1, keepdim=True)
        lse[..., block.rows] = (peak + total.log())[..., block.inside, 0]
        block.store(weights.div_(total), scores)
    for block in blocks:  # trip 3: times V
        product = block.load(scores) @ values[..., : block.visible.shape[1], :]
        out[..., block.rows, :] = product[..., block.inside, :]
    return _Result(out.transpose(-3, -2).to(q.dtype), lse.transpose(-1, -2), num_pairs)


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

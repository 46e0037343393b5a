"""K and V in pages: the write at ``slots``, the walk over a batch, the gather of one sequence.

Exactly ``kv_len`` rows of a sequence are touched: the unused end of its last page and the
table entries past it are never read, so what they hold (NaN, old ids) cannot reach an output.
A page id outside the pool raises IndexError at the moment it would be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stairs.attention.meta import AttnMeta, LayerKV

__all__ = ["SequenceRows", "gather", "num_pages", "sequences", "write_kv"]


class SequenceRows(NamedTuple):
    """One sequence of the batch that has queries: rows ``first .. first + num_q`` of q."""

    seat: int  # its row in kv_len, block_table and counts
    first: int
    num_q: int
    num_kv: int


def num_pages(num_kv: int, block_size: int) -> int:
    """Pages that hold ``num_kv`` keys."""
    return -(-num_kv // block_size)


def sequences(meta: AttnMeta) -> Iterator[SequenceRows]:
    """The sequences with at least one query, in order."""
    starts: list[int] = meta.cu_q.tolist()
    for index, num_kv in enumerate(meta.kv_len.tolist()):
        num_q = starts[index + 1] - starts[index]
        if num_q:
            yield SequenceRows(index, starts[index], num_q, num_kv)


def gather(pool: Tensor, pages: Tensor, *, start: int, stop: int) -> Tensor:
    """Keys ``start .. stop`` of one sequence as one contiguous tensor.

    pool (N, G, B, D), pages (P,), start a multiple of B -> (G, stop - start, D) in pool's dtype.
    """
    _, kv_heads, block_size, head_dim = pool.shape
    rows = pool.new_empty((kv_heads, stop - start, head_dim))
    ids = pages[start // block_size : num_pages(stop, block_size)]
    full, rest = divmod(stop - start, block_size)
    # index_select, unlike indexing, refuses negative ids instead of counting from the end.
    whole = torch.index_select(pool, 0, ids[:full])  # (full, G, B, D)
    rows[:, : full * block_size].view(kv_heads, full, block_size, head_dim).copy_(
        whole.transpose(0, 1)
    )
    if rest:
        last = torch.index_select(pool[:, :, :rest], 0, ids[full:])
        rows[:, full * block_size :] = last[0]
    return rows


def write_kv(k: Tensor, v: Tensor, layer_kv: LayerKV, meta: AttnMeta) -> None:
    """Put this step's rows k, v (T, G, D) at ``meta.slots``, cast to the pool's dtype."""
    if not k.shape[0]:
        return
    if int(meta.slots.min()) < 0:
        raise IndexError(f"slot {int(meta.slots.min())} is negative")
    block_size = layer_kv.block_size
    page, offset = meta.slots // block_size, meta.slots % block_size
    row_bytes = 0
    for pool, rows in ((layer_kv.k, k), (layer_kv.v, v)):
        pool[page, :, offset] = rows.to(pool.dtype)
        row_bytes += rows[0].numel() * pool.element_size()
    meta.counts[:, AttnMeta.KV_BYTES_WRITTEN] += meta.cu_q.diff() * row_bytes

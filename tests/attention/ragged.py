"""Ragged batches over a hostile pool, and what attention must answer for them.

Every byte that no sequence owns is NaN, page ids are shuffled, and table entries past a
sequence's last page hold ``tail``.
"""

from __future__ import annotations

import functools
import os
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.reference import reference_attention

__all__ = ["BACKENDS", "Ragged", "fresh", "make_ragged"]

BACKENDS = ("reference", "online", "cpu")


def fresh() -> torch.Generator:
    """The running test's generator: other numbers in every test, the same ones in every run."""
    return _generator(os.environ["PYTEST_CURRENT_TEST"])


@functools.lru_cache(maxsize=1)
def _generator(test: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(test.encode()))


@dataclass
class Ragged:
    q: Tensor  # (T, H, D)
    k: Tensor  # (T, G, D)  this step's rows
    v: Tensor
    layer_kv: LayerKV
    meta: AttnMeta
    keys: list[Tensor]  # per sequence (Sk, G, D), as the pool's dtype rounds them
    values: list[Tensor]

    def rows(self, sequence: int) -> slice:
        return slice(int(self.meta.cu_q[sequence]), int(self.meta.cu_q[sequence + 1]))

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The specification on contiguous K and V, in ``dtype``."""
        out = torch.zeros(self.q.shape, dtype=dtype)
        for sequence, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            rows = self.rows(sequence)
            out[rows] = reference_attention(
                self.q[rows].to(dtype), keys.to(dtype), values.to(dtype)
            )[0]
        return out


def make_ragged(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    tail: int = -1,
    poison: float = torch.nan,
    generator: torch.Generator | None = None,
) -> Ragged:
    """A step of (queries, keys) per sequence; the last ``queries`` keys are still to be written."""
    assert all(num_q <= num_kv for num_q, num_kv in lengths)
    generator = fresh() if generator is None else generator
    kv_dtype = dtype if kv_dtype is None else kv_dtype

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    used = [-(-num_kv // block_size) for _, num_kv in lengths]
    num_blocks = sum(used) + 2
    ids = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    table = torch.full((len(lengths), max(used, default=0) + 2), tail, dtype=torch.int32)
    pool_shape = (num_blocks, kv_heads, block_size, head_dim)
    layer_kv = LayerKV(
        torch.full(pool_shape, poison, dtype=kv_dtype),
        torch.full(pool_shape, poison, dtype=kv_dtype),
    )
    starts, slots, keys, values = [0], [], [], []
    new_k, new_v = [random(0, kv_heads, head_dim)], [random(0, kv_heads, head_dim)]
    for sequence, (num_q, num_kv) in enumerate(lengths):
        pages = ids[sum(used[:sequence]) : sum(used[: sequence + 1])]
        table[sequence, : len(pages)] = pages
        starts.append(starts[-1] + num_q)
        k, v = random(num_kv, kv_heads, head_dim), random(num_kv, kv_heads, head_dim)
        keys.append(k.to(kv_dtype))
        values.append(v.to(kv_dtype))
        position = torch.arange(num_kv)
        page, offset = pages[position // block_size].long(), position % block_size
        past = num_kv - num_q
        layer_kv.k[page[:past], :, offset[:past]] = keys[-1][:past]
        layer_kv.v[page[:past], :, offset[:past]] = values[-1][:past]
        slots.append(page[past:] * block_size + offset[past:])
        new_k.append(k[past:])
        new_v.append(v[past:])
    meta = AttnMeta(
        cu_q=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor([num_kv for _, num_kv in lengths], dtype=torch.int32),
        block_table=table,
        slots=torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64),
        counts=torch.zeros((len(lengths), 3), dtype=torch.int64),
    )
    return Ragged(
        q=random(starts[-1], num_heads, head_dim),
        k=torch.cat(new_k),
        v=torch.cat(new_v),
        layer_kv=layer_kv,
        meta=meta,
        keys=keys,
        values=values,
    )

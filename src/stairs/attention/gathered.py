"""Long rows on a CPU: a sequence's pages are gathered once, then torch's SDPA tiles over them.

The staircase mask is bottom-right aligned and costs O(queries + keys) memory. Softmax does not
mind the order of the keys, so they are gathered last first: row i of R then sees key j when
i + j >= R - 1, every row of the mask is the same vector one step further, and one vector seen
with strides (1, 1) is the whole mask. Rows go in groups, each over the keys that its last row
sees: less is computed above the staircase, and nothing is merged, so the error is torch's own.
"""

from __future__ import annotations

import math
import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from stairs.attention.choose import ROW_GROUP, in_place_rows
from stairs.attention.cpu import gather_reversed
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.pages import sequences
from stairs.attention.reference import compute_dtype

__all__ = ["attend_long"]


def attend_long(q: Tensor, layer_kv: LayerKV, meta: AttnMeta, *, scale: float, out: Tensor) -> None:
    """Every sequence of at least ``in_place_rows`` queries: q (T, H, D) into the same rows of out.

    Follows ``write_and_attend_short``, which writes the new rows and checks the page ids.
    """
    dtype = compute_dtype(q.dtype, layer_kv.k.dtype)
    _, kv_heads, _, head_dim = layer_kv.k.shape
    for sequence in sequences(meta):
        if sequence.num_q < in_place_rows():
            continue
        shape = (kv_heads, sequence.num_kv, head_dim)
        keys, values = _buffers(shape, dtype)
        counts = meta.counts[sequence.seat]
        counts[AttnMeta.KV_BYTES_READ] += gather_reversed(
            layer_kv, meta, sequence.seat, keys=keys, values=values
        )
        rows = slice(sequence.first, sequence.first + sequence.num_q)
        counts[AttnMeta.PAIRS] += _climb(
            q[rows].to(dtype), keys, values, scale=scale, out=out[rows]
        )


_KEPT_BYTES = 64 * 2**20
_kept = threading.local()


def _buffers(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """(2, *shape) for one sequence's K and V: the same memory in every layer, up to _KEPT_BYTES.

    The system hands out new memory page by page: 9 ms for the 12 MiB of 2048 keys of 12 heads
    x 64, where the attention of 16 rows takes 2.
    """
    nbytes = 2 * math.prod(shape) * dtype.itemsize
    memory: Tensor | None = getattr(_kept, "memory", None)
    if memory is None or memory.nbytes < nbytes:
        memory = torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
        if memory.nbytes <= _KEPT_BYTES:
            _kept.memory = memory
    return memory[:nbytes].view(dtype).view(2, *shape)


def _climb(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, out: Tensor) -> int:
    """queries (Sq, H, D), keys and values (G, Sk, D), the last key first, into out (Sq, H, D);
    the pairs seen."""
    num_q, num_heads, _ = queries.shape
    num_kv = keys.shape[1]
    past = num_kv - num_q
    blind = max(0, -past)  # rows above the staircase see no key
    out[:blind] = 0
    staircase = queries.new_zeros(ROW_GROUP - 1 + num_kv)
    staircase[: ROW_GROUP - 1] = -torch.inf
    seen_before = F.pad((staircase == 0).cumsum(0), (1, 0))
    num_pairs = 0
    for first in range(blind, num_q, ROW_GROUP):
        rows = min(ROW_GROUP, num_q - first)
        stop = past + first + rows  # keys that the group's last row sees
        begin = ROW_GROUP - rows
        attended = F.scaled_dot_product_attention(
            queries[first : first + rows].transpose(0, 1).unsqueeze(0),
            keys[:, num_kv - stop :].unsqueeze(0),
            values[:, num_kv - stop :].unsqueeze(0),
            attn_mask=staircase.as_strided((1, 1, rows, stop), (0, 0, 1, 1), begin),
            scale=scale,
            enable_gqa=True,
        )
        out[first : first + rows] = attended[0].transpose(0, 1)
        seen = seen_before[begin + stop :][:rows] - seen_before[begin:][:rows]
        num_pairs += num_heads * int(seen.sum())
    return num_pairs

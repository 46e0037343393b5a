"""Online softmax, the law stated once: the state (m, l, acc) of a row over the keys seen so far.

    m = max s_j,   l = sum exp(s_j - m),   acc = sum exp(s_j - m) v_j

``update`` adds a tile of keys, ``merge`` joins two states over disjoint keys, ``finish`` gives
O = acc / l and LSE = m + ln l. Raising the maximum from m to m' rescales l and acc by
exp(m - m'), so tiles, split K/V, chunks and shared prefixes all give softmax over all keys.
No key seen: m = -inf, l = 0, acc = 0, hence O = 0 and LSE = -inf, and merging changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stairs.attention.choose import Tile
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.pages import SequenceRows, gather, sequences
from stairs.attention.reference import compute_dtype, visible_keys

__all__ = ["State", "empty", "finish", "merge", "paged_online", "update"]


class State(NamedTuple):
    """Rows (...,) with D-wide accumulators."""

    m: Tensor  # (...)     largest score, -inf while no key was seen
    l: Tensor  # (...)     sum of exp(score - m)  # noqa: E741
    acc: Tensor  # (..., D)  sum of exp(score - m) times the value


def empty(rows: tuple[int, ...], head_dim: int, *, like: Tensor) -> State:
    """The state of ``rows`` that have seen no key; dtype and device of ``like``."""
    return State(
        like.new_full(rows, -torch.inf), like.new_zeros(rows), like.new_zeros((*rows, head_dim))
    )


def update(state: State, scores: Tensor, values: Tensor) -> State:
    """Add a tile of C keys to rows (..., R): scores (..., R, C), -inf where masked;
    values (..., C, D)."""
    if not scores.shape[-1]:
        return state
    m = torch.maximum(state.m, scores.amax(dim=-1))
    reference = _finite(m)
    kept = torch.exp(state.m - reference)
    weights = torch.exp(scores - reference.unsqueeze(-1))
    return State(
        m,
        state.l * kept + weights.sum(dim=-1),
        state.acc * kept.unsqueeze(-1) + weights @ values,
    )


def merge(a: State, b: State) -> State:
    """The state over the keys of both; their key sets must not overlap."""
    m = torch.maximum(a.m, b.m)
    reference = _finite(m)
    keep_a, keep_b = torch.exp(a.m - reference), torch.exp(b.m - reference)
    return State(
        m,
        a.l * keep_a + b.l * keep_b,
        a.acc * keep_a.unsqueeze(-1) + b.acc * keep_b.unsqueeze(-1),
    )


def finish(state: State) -> tuple[Tensor, Tensor]:
    """O (..., D) and natural-log LSE (...)."""
    out = state.acc / state.l.masked_fill(state.l == 0, 1).unsqueeze(-1)
    return out, state.m + torch.log(state.l)


def _finite(m: Tensor) -> Tensor:
    """m where a key was seen, 0 where none was: exp(-inf - 0) is 0, exp(-inf + inf) is NaN."""
    return m.masked_fill(m == -torch.inf, 0)


def paged_online(
    q: Tensor,
    layer_kv: LayerKV,
    meta: AttnMeta,
    *,
    scale: float,
    tile: Tile,
    out: Tensor,
) -> None:
    """q (T, H, D) over pages in tiles of (queries, keys), each K/V tile gathered once, into out."""
    for sequence in sequences(meta):
        rows = slice(sequence.first, sequence.first + sequence.num_q)
        out[rows] = _attend_sequence(q[rows], layer_kv, meta, sequence, scale=scale, tile=tile)


def _attend_sequence(
    q: Tensor,
    layer_kv: LayerKV,
    meta: AttnMeta,
    sequence: SequenceRows,
    *,
    scale: float,
    tile: Tile,
) -> Tensor:
    num_q, num_heads, head_dim = q.shape
    kv_heads = layer_kv.k.shape[1]
    group = num_heads // kv_heads
    dtype = compute_dtype(q.dtype, layer_kv.k.dtype)
    tile_q = tile.queries or num_q
    tile_kv = max(1, (tile.keys or 1) // layer_kv.block_size) * layer_kv.block_size
    # (G, group, Sq, D): the heads that share a K/V head become rows of one product.
    queries = q.to(dtype).view(num_q, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    starts = range(0, num_q, tile_q)
    states = [
        empty((kv_heads, group * min(tile_q, num_q - first)), head_dim, like=queries)
        for first in starts
    ]
    counts = meta.counts[sequence.seat]
    pages = meta.block_table[sequence.seat]
    past = sequence.num_kv - num_q  # query i sees keys 0 .. past + i
    # Keys outside, queries inside: every K/V row is read once, states wait in between.
    for start in range(0, sequence.num_kv, tile_kv):
        stop = min(start + tile_kv, sequence.num_kv)
        keys = gather(layer_kv.k, pages, start=start, stop=stop)
        values = gather(layer_kv.v, pages, start=start, stop=stop)
        counts[AttnMeta.KV_BYTES_READ] += keys.nbytes + values.nbytes
        keys, values = keys.to(dtype), values.to(dtype)
        for index, first in enumerate(starts):
            last = min(first + tile_q, num_q)
            if past + last <= start:
                continue  # a whole tile right of the staircase
            rows = queries[:, :, first:last].reshape(kv_heads, -1, head_dim)
            scores = (rows @ keys.transpose(1, 2)).mul_(scale)
            num_pairs = scores.numel()
            if past + first + 1 < stop:
                visible = visible_keys(
                    range(first, last), range(start, stop), past=past, device=q.device
                )
                scores.view(kv_heads, group, last - first, -1).masked_fill_(~visible, -torch.inf)
                num_pairs = num_heads * int(visible.sum())
            states[index] = update(states[index], scores, values)
            counts[AttnMeta.PAIRS] += num_pairs
    parts = [
        finish(state)[0].view(kv_heads, group, -1, head_dim).permute(2, 0, 1, 3) for state in states
    ]
    return torch.cat(parts).reshape(num_q, num_heads, head_dim)

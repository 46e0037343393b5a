"""What attention allocates beside K/V in a step: partial results of rows whose keys are cut.

One place, torch-free: ``work`` cuts a step by these figures and the planner sizes memory by them.
"""

from __future__ import annotations

from collections.abc import Iterable

from stairs.attention.hopper import ForwardTile, chunk_tile
from stairs.attention.tiles import (
    MAX_HEAD_DIM,
    Card,
    HopperTile,
    TritonTile,
    hopper_tiles,
    paged_tiles,
)

__all__ = [
    "PagedTile",
    "engine_tiles",
    "most_partials",
    "num_places",
    "partial_bytes",
    "workspace_bytes",
]

# Which kernel: triton_paged, hopper_decode or hopper_chunks.
PagedTile = TritonTile | HopperTile | ForwardTile


def num_places(tile: PagedTile, *, kv_heads: int, num_sms: int) -> int:
    """Programs of one kv head that the card holds at a time: what a step's keys are cut for. For a
    ForwardTile every query head is a kv head of its own."""
    per_sm = 1 if isinstance(tile, ForwardTile) else tile.per_sm
    return max(1, num_sms * per_sm // kv_heads)


def most_partials(num_tiles: int, num_places: int) -> int:
    """Partial results of ``num_tiles`` tiles of rows, whose keys are cut for ``num_places``.

    A piece takes 1/C of all keys or more, so fewer than C tiles are longer than a piece; n that
    are cut, of k keys in pieces of p, have sum(ceil(k / p)) < C + n. Pieces of one line of all
    keys are no more: C - 1 cuts begin one each beside the first of every tile that is cut.
    """
    cut = min(num_tiles, num_places - 1)
    return num_places + cut - 1 if cut > 0 else 0


def partial_bytes(num_partials: int, *, rows: int, kv_heads: int, head_dim: int) -> int:
    """O (P, G, rows, D) and LSE (P, G, rows) in float32."""
    return num_partials * kv_heads * rows * (head_dim + 1) * 4


def workspace_bytes(
    tiles: Iterable[PagedTile],
    *,
    num_seqs: int,
    num_tokens: int,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    num_sms: int,
) -> int:
    """At most what a step of ``num_seqs`` sequences and ``num_tokens`` queries takes, with splits
    that follow the batch. The lists of a step take turns, as layers do: each frees its own."""
    most = 0
    for tile in tiles:
        heads = num_heads if isinstance(tile, ForwardTile) else kv_heads
        rows = num_tokens * (num_heads // heads)
        num_tiles = num_seqs + rows // tile.rows  # each sequence may end in one that is not full
        num = most_partials(num_tiles, num_places(tile, kv_heads=heads, num_sms=num_sms))
        most = max(most, partial_bytes(num, rows=tile.rows, kv_heads=heads, head_dim=head_dim))
    return most


def engine_tiles(head_dim: int, group: int, *, itemsize: int, card: Card) -> tuple[PagedTile, ...]:
    """Every tile that an engine on ``card`` may cut its steps in, whichever kernels it takes."""
    if head_dim > MAX_HEAD_DIM:
        return ()
    tiles = paged_tiles(head_dim, group, itemsize=itemsize, card=card)
    if card.capability != 90 or itemsize != 2:
        return tiles
    return (*hopper_tiles(head_dim, group), *tiles, chunk_tile(head_dim))

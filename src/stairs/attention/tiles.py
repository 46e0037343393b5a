"""Tiles of the Triton kernels: a pure function of shapes and of the card, measurements beside it.

A tile is (rows x keys) of scores; what it costs on chip is its K and V stages and its queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

__all__ = [
    "CARDS",
    "MAX_HEAD_DIM",
    "Card",
    "HopperTile",
    "TritonTile",
    "flash_tile",
    "for_load",
    "hopper_tiles",
    "paged_tiles",
]

KIB = 1024
Tile = TypeVar("Tile")
MAX_HEAD_DIM = 256  # of our kernels on a GPU


@dataclass(frozen=True, slots=True)
class Card:
    """What a tile choice depends on. ``shared``: bytes one program may take."""

    capability: int  # 90 is sm_90
    shared: int
    num_sms: int = 132


# Shared memory of one block, CUDA C++ programming guide, table of compute capabilities.
CARDS = {
    80: Card(80, 163 * KIB, 108),
    86: Card(86, 99 * KIB, 84),
    89: Card(89, 99 * KIB, 142),
    90: Card(90, 227 * KIB, 132),
    100: Card(100, 227 * KIB, 148),
    120: Card(120, 99 * KIB, 170),
}


@dataclass(frozen=True, slots=True)
class TritonTile:
    rows: int
    keys: int
    num_warps: int
    num_stages: int
    per_sm: int = 1  # programs that one SM holds at a time

    @property
    def tall(self) -> bool:
        """Worth a loop of its own for keys that all rows see."""
        return self.num_warps >= 4 and self.rows >= 64


@dataclass(frozen=True, slots=True)
class HopperTile:
    """A tile of hopper_decode: 16 rows by mma.sync or 64 by wgmma, in rings of ``num_stages``."""

    rows: int
    keys: int
    num_stages: int
    per_sm: int
    min_keys: int = 128  # of a split, and what a merge costs: shorter ones do not pay for it
    most_keys: float = math.inf  # of a step, an SM: with more, another of as many rows is quicker
    is_chained: bool = True  # it and the merge are launched early, and wait (programmatic)
    measured: str | None = None  # the file of bench/records where it was the quickest

    @property
    def max_registers(self) -> int:
        """A thread, of four warps that compute and four that the loading one takes with it."""
        return {1: 168, 2: 128, 3: 80, 4: 64}[self.per_sm]


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def paged_tiles(
    head_dim: int, group: int, *, itemsize: int, card: Card
) -> tuple[TritonTile, TritonTile]:
    """(short, tall): the tile of sequences whose rows fit one product, and of the others.

    Page ids take a stage of their own, so 2n + 1 stages hold n tiles of K and V. Measured on an
    H200 in bfloat16 over 6 head shapes x 9 batches (bench/records/attention_gpu.jsonl).
    """
    rows = min(max(16, 1 << (group - 1).bit_length()), 64)
    padded = _padded(head_dim)
    if itemsize == 4:
        keys = 32 if padded <= 128 else 16
        return TritonTile(rows, keys, 4, 1, per_sm=2), TritonTile(32, keys, 4, 1)
    if padded <= 64:
        short = TritonTile(rows, 64, 2, 5, per_sm=4)
    elif padded == 128:
        # Many rows make partial results as large as the K/V they stand for: fewer, longer splits.
        wide = rows >= 32 and card.shared > 99 * KIB
        short = TritonTile(rows, 128, 4, 5) if wide else TritonTile(rows, 64, 4, 5, per_sm=2)
    else:
        wide = card.shared > 99 * KIB
        short = TritonTile(rows, 64, 8, 5) if wide else TritonTile(rows, 32, 4, 3, per_sm=2)
    return short, _tall(padded, card)


def hopper_tiles(head_dim: int, group: int) -> tuple[HopperTile, ...]:
    """The tiles of sequences of up to 64 rows on sm_90, the fewest rows first; ``for_load`` takes
    one of each number of rows.

    The rings of an SM's programs hold 96 to 192 KiB, of which about 26 cover the memory's latency
    at full speed. Measured on an H200 in bfloat16 over 6 head shapes x 10 batches
    (`bench/attention_gpu.py --decode --sweep`, bench/records/attention_gpu_sweep.jsonl).
    """
    # Of few keys most is latency: tiles of 128 take fewer turns, and fewer programs leave less to
    # merge. Of many keys what counts is how many copies are under way.
    tiles: tuple[HopperTile, ...]
    padded = _padded(head_dim)
    if padded <= 64:
        few = HopperTile(16, 128, 3, 2, most_keys=1000), HopperTile(64, 128, 3, 2, most_keys=1000)
        tiles = few[0], HopperTile(16, 64, 3, 3), few[1], HopperTile(64, 64, 3, 3)
    elif padded == 128:
        few = HopperTile(16, 128, 3, 1, most_keys=2600), HopperTile(64, 128, 3, 1, most_keys=1500)
        tiles = few[0], HopperTile(16, 64, 2, 2), few[1], HopperTile(64, 64, 2, 2)
    else:
        tiles = HopperTile(16, 64, 2, 1), HopperTile(64, 32, 3, 1)
    return tuple(
        replace(tile, measured="attention_gpu_sweep.jsonl")
        for tile in tiles
        if group <= 16 or tile.rows > 16
    )


def for_load(tiles: tuple[Tile, ...], keys_per_sm: float) -> tuple[Tile, ...]:
    """``tiles`` for a step of so many keys an SM, of all its kv heads."""
    kept: list[Tile] = []
    for tile in tiles:
        if isinstance(tile, HopperTile):
            same = kept and isinstance(kept[-1], HopperTile) and kept[-1].rows == tile.rows
            if same or keys_per_sm > tile.most_keys:
                continue
        kept.append(tile)
    return tuple(kept)


def _tall(padded: int, card: Card) -> TritonTile:
    if padded <= 64:
        return TritonTile(128, 64, 8, 5)
    if padded == 128:
        return TritonTile(128, 64, 8, 5 if card.shared > 99 * KIB else 3)
    if card.shared > 99 * KIB:
        return TritonTile(128, 32, 8, 5)
    return TritonTile(64, 32, 4, 3)


def flash_tile(head_dim: int, *, causal: bool, num_q: int, itemsize: int, card: Card) -> TritonTile:
    """The tile of the contiguous kernel for sequences of up to ``num_q`` queries.

    Measured on an H200 in bfloat16, 512 to 16384 queries (bench/records/attention_gpu.jsonl).
    """
    padded = _padded(head_dim)
    if itemsize == 4:
        return TritonTile(32, 32 if padded <= 128 else 16, 4, 1)
    stages = 3 if card.shared > 99 * KIB else 2
    if padded <= 128 and num_q <= 1024 and (causal or padded == 128):
        return TritonTile(64, 64, 4, stages)
    if padded <= 64:
        return TritonTile(128, 64, 8, 3)
    wide = card.shared >= 227 * KIB
    if padded == 128:
        return TritonTile(128, 128, 8, 3) if wide else TritonTile(128, 64, 8, 2)
    if wide:
        return TritonTile(128, 64, 8, 2)
    return TritonTile(128, 32, 8, 2) if card.shared > 99 * KIB else TritonTile(64, 16, 4, 2)

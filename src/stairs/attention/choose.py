"""Which implementation runs a call, with which tile, and why: a pure function of host facts.

Tuning is data here. A new kernel is one file, one row of ``IMPLEMENTATIONS`` and one branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stairs.errors import ConfigError

__all__ = ["IMPLEMENTATIONS", "Choice", "Tile", "choose", "score_bytes_held"]

KEY_TILE = 64  # keys of one step of the Numba kernel: K and V of both stay in the first cache

Implementation = Literal["reference", "online", "cpu", "triton", "hopper"]

# How often a pass over scores leaves the inner loop for memory, by implementation.
IMPLEMENTATIONS: dict[Implementation, tuple[str, ...]] = {
    "reference": ("QK^T", "softmax", "times V"),
    "online": ("QK^T, softmax and times V, tile by tile",),
    "cpu": ("QK^T, softmax and times V, tile by tile",),
    "triton": ("QK^T, softmax and times V, tile by tile",),
    "hopper": ("QK^T, softmax and times V, tile by tile",),
}


@dataclass(frozen=True, slots=True)
class Tile:
    """Scores held at one time: queries x keys for each of ``heads`` query heads; None is all."""

    queries: int | None = None
    keys: int | None = None
    heads: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    implementation: Implementation
    tile: Tile
    reason: str

    @property
    def trips(self) -> tuple[str, ...]:
        """The passes over the scores that go through memory, in order."""
        return IMPLEMENTATIONS[self.implementation]


def choose(
    *,
    backend: str = "auto",
    device: str = "cpu",
    group_size: int = 1,
    num_threads: int = 1,
    triton_lacks: str | None = None,
    hopper_lacks: str | None = None,
    hopper_measured: str | None = None,
    triton_tile: tuple[int, int] = (128, 64),
) -> Choice:
    """The implementation for a call on ``device``.

    ``triton_lacks``, ``hopper_lacks``: what keeps those kernels from this call, if something does.
    ``hopper_measured``: where Hopper's were measured to be the quicker ones; auto takes no others.
    Raises ConfigError for a backend that is unknown or does not run on the device.
    """
    if backend not in ("auto", *IMPLEMENTATIONS):
        raise ConfigError(
            f"attention_backend {backend!r} is unknown; one of auto, {', '.join(IMPLEMENTATIONS)}",
            param="attention_backend",
        )
    home = {"cpu": "cpu", "triton": "cuda", "hopper": "cuda"}.get(backend, device)
    if home != device:
        raise ConfigError(
            f"attention_backend {backend} does not run on {device}", param="attention_backend"
        )
    lacks = {"triton": triton_lacks, "hopper": triton_lacks or hopper_lacks}.get(backend)
    if lacks:
        raise ConfigError(
            f"attention_backend {backend} cannot run this: {lacks}", param="attention_backend"
        )
    if backend == "reference":
        return Choice("reference", Tile(), "asked for: the whole score matrix is materialised")
    is_quicker = backend == "auto" and device == "cuda" and hopper_measured and not hopper_lacks
    if backend == "hopper" or (is_quicker and not triton_lacks):
        reason = f"Gluon on Hopper, {hopper_measured or 'asked for and not measured yet'}"
        return Choice("hopper", Tile(*triton_tile), reason)
    if device == "cuda" and backend != "online" and not triton_lacks:
        return Choice("triton", Tile(*triton_tile), "Triton over pages in place, K/V ranges merged")
    if backend == "online" or device != "cpu":
        return Choice("online", Tile(128, 128), "tiles of 128 queries x 128 keys in torch")
    tile = Tile(None, KEY_TILE, group_size * num_threads)
    return Choice("cpu", tile, "pages read in place, by threads over heads and keys")


def score_bytes_held(choice: Choice, *, rows: int, keys: int, heads: int, itemsize: int) -> int:
    """Peak bytes of scores in one call for a sequence of ``rows`` queries and ``keys`` keys.

    rows x keys x heads x itemsize, each cut to the tile where the implementation has one.
    """
    tile = choice.tile
    held = 1
    for size, limit in ((rows, tile.queries), (keys, tile.keys), (heads, tile.heads)):
        held *= size if limit is None else min(size, limit)
    return held * itemsize

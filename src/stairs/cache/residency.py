"""How long K/V blocks live, lie idle and wait to be hit again: what vLLM calls residency.

    allocated ──used──────released ─ idle ─ hit again ──────released ─ idle ─ evicted
        │                     └─── reuse gap ───┘               └─ idle before ─┘ │
        └──────────────────────────────── lifetime ───────────────────────────────┘

Seconds are gathered until ``take``; whoever attaches one to a pool takes them every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Residency", "Spans"]


@dataclass(slots=True)
class Spans:
    """Seconds, one value an event."""

    lifetimes: list[float] = field(default_factory=list)
    idle_before_evict: list[float] = field(default_factory=list)
    reuse_gaps: list[float] = field(default_factory=list)


class Residency:
    """Of one pool's blocks. One that was handed out before this was attached has no birth."""

    def __init__(self, num_blocks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born: list[float | None] = [None] * num_blocks
        self._idle_since: list[float | None] = [None] * num_blocks
        self._spans = Spans()

    def allocated(self, blocks: list[int]) -> None:
        now = self._clock()
        for block in blocks:
            self._born[block], self._idle_since[block] = now, None

    def released(self, block: int) -> None:
        """Nobody holds it any more, but it can still be hit."""
        self._idle_since[block] = self._clock()

    def reused(self, block: int) -> None:
        since, self._idle_since[block] = self._idle_since[block], None
        if since is not None:
            self._spans.reuse_gaps.append(self._clock() - since)

    def evicted(self, block: int) -> None:
        now, born, since = self._clock(), self._born[block], self._idle_since[block]
        if born is not None and since is not None:
            self._spans.lifetimes.append(now - born)
            self._spans.idle_before_evict.append(now - since)

    def take(self) -> Spans | None:
        """What came together since the last time; None if nothing did."""
        spans = self._spans
        if not (spans.lifetimes or spans.reuse_gaps):
            return None
        self._spans = Spans()
        return spans

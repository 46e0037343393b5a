"""Tells an engine that hangs from one that works: silence while something is pending.

Nothing is polled: a timer runs only while there is work, ten times in ``seconds``. Silence is
counted in its turns, not by the clock, because a machine that slept or a container that was
paused did not wait; after ten turns without a word ``bark`` is called, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Watchdog"]

_TURNS = 10


class Watchdog:
    """``pending``: whether the engine owes an answer; ``listen``: take in what it has sent that
    nobody read yet, which calls ``heard``. ``seconds`` 0: never barks."""

    def __init__(
        self,
        seconds: float,
        *,
        pending: Callable[[], bool],
        listen: Callable[[], None],
        bark: Callable[[], None],
    ) -> None:
        self._pause = seconds / _TURNS
        self._pending = pending
        self._listen = listen
        self._bark = bark
        self._silent_turns = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Something was asked of the engine."""
        if self._timer is None and self._pause:
            self._silent_turns = 0
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._turn)

    def heard(self) -> None:
        self._silent_turns = 0

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        self._silent_turns += 1
        self._listen()
        if not self._pending():
            return
        if self._silent_turns >= _TURNS:
            self._bark()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._turn)

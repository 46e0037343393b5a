"""What the two processes say to each other: msgspec types, one message a step.

``request`` is the number the HTTP side gave; only a TokenEvent bears the engine's own, which
``Step.accepted`` pairs with it. Nothing here can name code: decoding makes these types only.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stairs.accounting.record import Phase, Totals
from stairs.cache.residency import Spans
from stairs.config import EngineConfig, SamplingParams
from stairs.engine.sequence import TokenEvent
from stairs.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    StairsError,
)

__all__ = [
    "Abort",
    "Add",
    "Command",
    "Ended",
    "Failed",
    "Pin",
    "Pinned",
    "Ready",
    "Refused",
    "Report",
    "Source",
    "Start",
    "Stats",
    "Step",
    "Unpin",
    "refusal",
]

_ERRORS: dict[str, type[StairsError]] = {
    error.code: error
    for error in (
        CheckpointError, ConfigError, ContextLengthError, InvalidRequestError, ModelNotFoundError,
    )
}  # fmt: skip


class Start(msgspec.Struct):
    """The first line on the engine process's standard input."""

    address: str
    model: str
    revision: str | None
    load_format: str
    config: EngineConfig


# -- to the engine ------------------------------------------------------------------------------


class Add(msgspec.Struct, tag=True, array_like=True):
    request: int
    tokens: list[int]
    sampling: SamplingParams
    salt: str | None = None
    grammar: str | None = None


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Drop a request, or its answer ``index``. Answered by ``Ended`` once nothing is left."""

    request: int
    index: int | None = None


class Pin(msgspec.Struct, tag=True, array_like=True):
    """Compute a prefix and hold it; with ``file`` its K/V are read from there, or saved there."""

    request: int
    name: str
    tokens: list[int]
    salt: str | None = None
    file: str | None = None


class Unpin(msgspec.Struct, tag=True, array_like=True):
    name: str


Command = Add | Abort | Pin | Unpin


# -- from the engine ----------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True, array_like=True):
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    dtype: str
    kv_cache_dtype: str
    load_seconds: float


class Refused(msgspec.Struct, array_like=True):
    """A request that the engine will not run, by its error of ``stairs.errors``."""

    request: int
    code: str
    message: str
    param: str | None


Source = Literal["computed", "file"]


class Pinned(msgspec.Struct, array_like=True):
    request: int
    num_tokens: int
    num_pinned_tokens: int
    kv_bytes: int
    source: Source


class Ended(msgspec.Struct, array_like=True):
    """The last word on an aborted request. One that ends by itself has its costs on its event."""

    request: int
    costs: dict[Phase, Totals]


class Stats(msgspec.Struct, array_like=True):
    """State after a step; counters run since the engine process started."""

    running: int
    waiting: int
    blocks_owned: int
    blocks_cached: int
    blocks_pinned: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    step_tokens: int  # fed in this step, prompt and answers
    kv_bytes_written: int
    kv_bytes_read: int
    pairs_predicted: int
    pairs_counted: int


class Step(msgspec.Struct, tag=True, array_like=True):
    """One turn of the loop. ``accepted``: request and the engine's number for it; ``started``:
    request and the monotonic time at which its first step began; ``spans``: of K/V blocks that
    were hit again or evicted."""

    stats: Stats
    events: list[TokenEvent] = []
    accepted: list[tuple[int, int]] = []
    started: list[tuple[int, float]] = []
    refused: list[Refused] = []
    pinned: list[Pinned] = []
    ended: list[Ended] = []
    spans: Spans | None = None


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine cannot start or go on; the process ends after this."""

    code: str
    message: str
    param: str | None = None


Report = Ready | Step | Failed


def refusal(code: str, message: str, param: str | None) -> StairsError:
    """The error of the tree that ``code`` names."""
    return _ERRORS.get(code, StairsError)(message, param=param)

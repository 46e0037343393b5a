"""One record a step, one row a sequence in it: everything shown anywhere sums these rows.

``pairs`` is predicted from lengths alone; ``pairs_counted`` is what the kernels' loops visited.
The same holds for K/V bytes. A pair is one (query token, key token) in one head of one layer; K/V
bytes are over all layers. The phase is a sequence's state: a one-token chunk is still prefill.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import mul

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROW", "Ledger", "Phase", "StepRecord", "Totals"]


class Phase(IntEnum):
    PREFILL = 0
    DECODE = 1


ROW = np.dtype(
    [
        ("request", np.int64),
        ("phase", np.int8),
        ("new_tokens", np.int32),  # query rows fed = K/V rows computed
        ("context", np.int32),  # keys visible to the last of them
        ("cached_tokens", np.int32),  # K/V rows reused from the prefix cache, on the first row only
        ("chunks", np.int32),
        ("pairs", np.int64),
        ("pairs_counted", np.int64),
        ("kv_bytes_written", np.int64),
        ("kv_bytes_written_counted", np.int64),
        ("kv_bytes_read", np.int64),
        ("kv_bytes_read_counted", np.int64),
        ("kv_bytes_stored", np.int64),  # of the blocks that ``context`` tokens need
        ("kv_bytes_allocated", np.int64),  # of the blocks it had, shared ones included
    ]
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """``rows``: structured array of ``ROW``, one entry a sequence of the step. Times in seconds;
    ``host_seconds`` is the step without the forward pass, ``device_seconds`` the forward pass."""

    step: int
    rows: NDArray[np.void]
    host_seconds: float
    device_seconds: float
    num_preempted: int
    blocks_owned: int
    blocks_cached: int


@dataclass(slots=True)
class Totals:
    """Sums over rows; over steps for ``steps``; the most of any row for bytes stored and allocated.

    ``largest_step`` is the most score-matrix cells any one step held: sum over its sequences of
    rows x keys, in one head of one layer.
    """

    steps: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    chunks: int = 0
    pairs: int = 0
    pairs_counted: int = 0
    kv_bytes_written: int = 0
    kv_bytes_written_counted: int = 0
    kv_bytes_read: int = 0
    kv_bytes_read_counted: int = 0
    kv_bytes_stored: int = 0
    kv_bytes_allocated: int = 0
    largest_step: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0

    def add(self, record: StepRecord, rows: NDArray[np.void]) -> None:
        """Add ``rows``, a selection of ``record.rows``. A step's time counts once in each
        selection that took part in it: two phases of one mixed step share it."""
        if not len(rows):
            return
        self.steps += 1
        # Of a few rows, whose columns numpy would sum in one call each.
        columns = dict(zip(ROW.names or (), zip(*rows.tolist(), strict=True), strict=True))
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + sum(columns[name]))
        for name in _PEAKS:
            setattr(self, name, max(getattr(self, name), *columns[name]))
        cells = sum(map(mul, columns["new_tokens"], columns["context"]))
        self.largest_step = max(self.largest_step, cells)
        self.host_seconds += record.host_seconds
        self.device_seconds += record.device_seconds


_PEAKS = ("kv_bytes_stored", "kv_bytes_allocated")
_SUMMED = tuple(
    f.name for f in fields(Totals) if f.name in (ROW.names or ()) and f.name not in _PEAKS
)


class Ledger:
    """The engine's records: the newest ``keep`` of them, sums over all, sums of live requests."""

    def __init__(self, *, keep: int = 4096) -> None:
        self.records: deque[StepRecord] = deque(maxlen=keep)
        self.total = Totals()
        self.by_phase = {phase: Totals() for phase in Phase}
        self._open: dict[int, list[tuple[StepRecord, int]]] = {}

    def append(self, record: StepRecord) -> None:
        self.records.append(record)
        self.total.add(record, record.rows)
        for phase, totals in self.by_phase.items():
            totals.add(record, record.rows[record.rows["phase"] == phase])
        for i, request in enumerate(record.rows["request"].tolist()):
            self._open.setdefault(request, []).append((record, i))

    def close(self, request: int) -> dict[Phase, Totals]:
        """Sums of one request's rows by phase; its rows are then forgotten."""
        sums = {phase: Totals() for phase in Phase}
        for record, i in self._open.pop(request, ()):
            sums[Phase(record.rows["phase"][i])].add(record, record.rows[i : i + 1])
        return sums

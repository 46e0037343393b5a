"""Runs a step's batch through the model. Eager; one thread calls it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from stairs.cache.paged_kv import PagedKV
from stairs.engine.batch import StepBatch
from stairs.models.registry import Model

__all__ = ["Runner", "Stopwatch"]


class Stopwatch:
    """Seconds that a device works on what is launched within ``with``; on a GPU they are read
    from its own clock, and asking waits for it."""

    def __init__(self, device: torch.device) -> None:
        make: type[Any] = torch.cuda.Event
        on_gpu = device.type == "cuda"
        self._events = [make(enable_timing=True) for _ in range(2)] if on_gpu else []
        self._begun = self._ended = 0.0

    def __enter__(self) -> Stopwatch:
        self._begun = time.perf_counter()
        if self._events:
            self._events[0].record()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        if not self._events:
            return self._ended - self._begun
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class Runner:
    """Holds the model and the K/V tensors that its attention reads and writes."""

    def __init__(self, model: Model, kv: PagedKV) -> None:
        self.model = model
        self.kv = kv
        self.stopwatch = Stopwatch(kv.layers[0].k.device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Hidden states (T, C) of all fed tokens, whose K/V are written."""
        return self.model.forward(batch.ids, batch.positions, self.kv.layers, batch.meta)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, C) -> (R, V)."""
        return self.model.logits(hidden)

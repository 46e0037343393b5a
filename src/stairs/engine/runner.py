"""Runs a step's batch through the model. Eager; one thread calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from stairs.cache.paged_kv import PagedKV
from stairs.engine.batch import StepBatch
from stairs.models.registry import Model

__all__ = ["Runner"]


class Runner:
    """Holds the model and the K/V tensors that its attention reads and writes."""

    def __init__(self, model: Model, kv: PagedKV) -> None:
        self.model = model
        self.kv = kv

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Hidden states (T, C) of all fed tokens, whose K/V are written."""
        return self.model.forward(batch.ids, batch.positions, self.kv.layers, batch.meta)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, C) -> (R, V)."""
        return self.model.logits(hidden)

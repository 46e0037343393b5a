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
        """Logits (R, V) of ``batch.logit_rows``; K/V of all fed tokens are written."""
        hidden = self.model.forward(batch.ids, batch.positions, self.kv.layers, batch.meta)
        return self.model.logits(hidden[batch.logit_rows])

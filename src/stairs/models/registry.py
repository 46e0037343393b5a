"""Which class runs which model_type: one row a family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from stairs.attention.meta import AttnMeta, LayerKV
from stairs.checkpoints.tensors import TensorSource
from stairs.config import ModelConfig
from stairs.errors import ConfigError
from stairs.models.gpt2 import GPT2
from stairs.models.layers import DenseLinear
from stairs.models.llama import Llama
from stairs.models.packed import PackedLinear
from stairs.models.weights import Weights

__all__ = ["MODELS", "Model", "build_model", "matrix_bytes_read"]


class Model(Protocol):
    @property
    def layers(self) -> Sequence[Any]: ...  # dataclasses, whose linear layers are fields

    @property
    def embedding(self) -> Any: ...

    @property
    def head(self) -> Any: ...

    def forward(
        self, ids: Tensor, positions: Tensor, kv: Sequence[LayerKV], meta: AttnMeta
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


MODELS: dict[str, type[GPT2] | type[Llama]] = {
    "gpt2": GPT2,
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "smollm3": Llama,
}


def build_model(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention_backend: str = "auto",
    packed: bool = False,
    batch_invariant: bool = False,
) -> Model:
    """Load all weights of ``source`` in ``dtype`` onto ``device``; ``packed`` and
    ``batch_invariant`` as in ``Weights``.

    Raises ConfigError for a model_type without a row. ``source`` has checked its tensors' names
    and shapes when it was made.
    """
    if config.model_type not in MODELS:
        raise ConfigError(
            f"model_type {config.model_type!r} cannot be run; one of {', '.join(MODELS)}",
            param="model_type",
        )
    weights = Weights(
        source, dtype=dtype, device=device, packed=packed, batch_invariant=batch_invariant
    )
    return MODELS[config.model_type](config, weights, attention_backend=attention_backend)


def matrix_bytes_read(model: Model, *, num_rows: int, logits_rows: int) -> dict[str, int]:
    """Bytes that a step of ``num_rows`` rows reads of the linear layers' matrices ("weights") and
    of the head's, each once and as it lies in memory: packed, or as a dense copy."""
    linear = [
        part
        for layer in model.layers
        for part in (getattr(layer, field.name) for field in fields(layer))
        if isinstance(part, DenseLinear | PackedLinear)
    ]
    return {
        "weights": sum(part.bytes_read(num_rows) for part in linear),
        "head": model.head.bytes_read(logits_rows),
    }

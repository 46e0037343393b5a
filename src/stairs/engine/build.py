"""From a checkpoint and a configuration to a running engine: dtypes, memory, then the tensors."""

from __future__ import annotations

import torch

from stairs.accounting.weights import stored_weight_bytes
from stairs.cache.paged_kv import PagedKV
from stairs.checkpoints.tensors import TensorSource, fingerprint
from stairs.config import DTYPE_BYTES, EngineConfig, ModelConfig
from stairs.engine.core import Engine
from stairs.engine.resolve import resolve
from stairs.models.registry import build_model

__all__ = ["build_engine"]


def build_engine(
    model_config: ModelConfig, tensors: TensorSource, config: EngineConfig | None = None
) -> Engine:
    """Load the weights and allocate the pool. Raises ConfigError before either if it cannot fit."""
    config = resolve(model_config, config or EngineConfig())
    device = torch.device("cpu")
    dense_budget = config.dense_weights_memory_bytes
    assert dense_budget is not None
    model = build_model(
        model_config,
        tensors,
        dtype=getattr(torch, config.dtype),
        device=device,
        attention_backend=config.attention_backend,
        packed=stored_weight_bytes(model_config, DTYPE_BYTES[config.dtype]) > dense_budget,
    )
    assert config.cache.num_blocks is not None
    kv = PagedKV(
        config.cache.num_blocks,
        config.cache.block_size,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=getattr(torch, config.cache.dtype),
        device=device,
    )
    return Engine(
        model,
        kv,
        model_config=model_config,
        config=config,
        fingerprint=fingerprint(model_config, tensors),
    )

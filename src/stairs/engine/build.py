"""From a checkpoint and a configuration to a running engine: dtypes, memory, then the tensors."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from stairs.accounting.hardware import has_wide_vectors
from stairs.attention.devices import choose_paged, cuda_problem, cutter_for
from stairs.attention.meta import LayerKV
from stairs.attention.work import Cutter
from stairs.checkpoints.residence import held_weights, source_types
from stairs.checkpoints.tensors import TensorSource, fingerprint
from stairs.config import EngineConfig, ModelConfig
from stairs.engine.capacity import make_pool, measure_capacity, use_growing_segments
from stairs.engine.core import Engine
from stairs.engine.resolve import residence_of, resolve
from stairs.errors import ConfigError
from stairs.models.registry import build_model

__all__ = ["build_engine"]

logger = logging.getLogger(__name__)


def build_engine(
    model_config: ModelConfig, tensors: TensorSource, config: EngineConfig | None = None
) -> Engine:
    """Load the weights and allocate the pool. Raises ConfigError before either if it cannot fit,
    on a GPU before the pool: there the largest step is run and measured first."""
    config = _placed(config or EngineConfig())
    device = torch.device(config.device)
    if device.type == "cuda":
        use_growing_segments()
    config = resolve(model_config, config)
    on_cpu = device.type == "cpu"
    residence = residence_of(model_config, config, wide_vectors=on_cpu and has_wide_vectors())
    model = build_model(
        model_config,
        tensors,
        dtype=getattr(torch, config.dtype),
        device=device,
        attention_backend=config.attention_backend,
        packed=residence.packed,
        batch_invariant=config.batch_invariant,
    )
    cutter = _cutter(model_config, config, device)
    capacity = None
    if device.type == "cuda":
        capacity = measure_capacity(
            model, cutter, model_config=model_config, config=config, device=device
        )
        for line in capacity.lines():
            logger.info(line)
        cache = replace(config.cache, num_blocks=capacity.num_blocks)
        config = replace(config, cache=cache)
    assert config.cache.num_blocks is not None
    return Engine(
        model,
        make_pool(config.cache.num_blocks, model_config, config, device),
        weights=held_weights(model_config, source_types(tensors, model_config), residence),
        model_config=model_config,
        config=config,
        fingerprint=fingerprint(model_config, tensors),
        cutter=cutter,
        capacity=capacity,
    )


def _placed(config: EngineConfig) -> EngineConfig:
    """``config`` on the GPU if there is one that we support and nothing asks for the CPU."""
    if config.device == "cuda" and config.batch_invariant:
        raise ConfigError("batch_invariant runs on a CPU only", param="batch_invariant")
    cpu_only = config.attention_backend == "cpu" or config.batch_invariant
    if config.device == "cpu" or (config.device == "auto" and cpu_only):
        return replace(config, device="cpu")
    problem = cuda_problem()
    if problem is None:
        return replace(config, device="cuda")
    if config.device == "cuda":
        raise ConfigError(problem or "device cuda: no NVIDIA GPU is visible", param="device")
    if problem:
        logger.warning(problem)
    return replace(config, device="cpu")


def _cutter(model_config: ModelConfig, config: EngineConfig, device: torch.device) -> Cutter | None:
    """Of the steps that our kernels attend to; None where another implementation does."""
    if device.type != "cuda":
        return None
    c, dtype = model_config, getattr(torch, config.dtype)
    page = torch.empty(
        (1, c.num_kv_heads, config.cache.block_size, c.head_dim),
        dtype=getattr(torch, config.cache.dtype), device="meta",
    )  # fmt: skip
    choice = choose_paged(
        LayerKV(page, page), backend=config.attention_backend, dtype=dtype,
        num_heads=c.num_heads, device=device,
    )  # fmt: skip
    if choice.implementation not in ("triton", "hopper"):
        return None
    return cutter_for(
        c.num_heads, c.num_kv_heads, c.head_dim, dtype=dtype, device=device,
        implementation=choice.implementation,
    )  # fmt: skip

"""What "auto" and None in a configuration come to: dtypes, context, blocks of the pool.

Torch-free, so that the planner sizes the pool with the engine's own function.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from stairs.accounting import costs
from stairs.accounting.weights import stored_weight_bytes
from stairs.checkpoints.residence import Residence
from stairs.config import DTYPE_BYTES, CacheConfig, EngineConfig, ModelConfig
from stairs.errors import ConfigError

__all__ = [
    "CPU_POOL_FRACTION",
    "available_memory",
    "cpu_pool_budget",
    "dense_weights_budget",
    "residence_of",
    "resolve",
]

# Share of the memory that is free at start which a dense copy of the weights may take on a CPU.
CPU_WEIGHTS_FRACTION = 0.5
# Share of the memory that is free at start which the K/V pool takes on a CPU by default.
CPU_POOL_FRACTION = 0.25


def resolve(
    model_config: ModelConfig, config: EngineConfig, *, memory: int | None = None
) -> EngineConfig:
    """``config`` with every "auto" and None replaced. ``memory``: bytes free, None to ask.

    On ``device`` cuda the blocks stay None unless they or their bytes were given: what is free is
    measured once the weights are there. Any other device, "auto" too, is read as a CPU.
    """
    context = model_config.context_length
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        raise ConfigError(
            f"max_model_len {max_model_len} exceeds the {context} positions that this model "
            f"computes exactly",
            param="max_model_len",
        )
    on_gpu = config.device == "cuda"
    own_dtype = "bfloat16" if on_gpu else "float32"
    dtype = own_dtype if config.dtype == "auto" else config.dtype
    if config.batch_invariant:
        _check_batch_invariant(config, dtype)
    cache = config.cache
    kv_dtype = dtype if cache.dtype == "auto" else cache.dtype
    block_bytes = cache.block_size * costs.kv_bytes_per_token(model_config, DTYPE_BYTES[kv_dtype])
    free = available_memory() if memory is None else memory
    num_blocks = cache.num_blocks
    if num_blocks is None and (cache.memory_bytes is not None or not on_gpu):
        most = config.max_num_seqs * costs.blocks_for(max_model_len, cache.block_size)
        budget = cache.memory_bytes
        if budget is None:
            budget = cpu_pool_budget(free)
            num_blocks = min(budget // block_bytes, most)
        else:
            num_blocks = budget // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes {budget} holds no block: one of {cache.block_size} tokens "
                f"takes {block_bytes} bytes",
                param="kv_cache_memory_bytes",
            )
    if num_blocks is not None and not on_gpu:
        _check_room(cache, num_blocks * block_bytes, free)
    tables = config.max_num_seqs * costs.blocks_for(max_model_len, cache.block_size) * 4
    if tables > free // 4:
        raise ConfigError(
            f"max_num_seqs {config.max_num_seqs} sequences of {max_model_len} tokens need block "
            f"tables of {tables} bytes, more than a quarter of the {free} that are free",
            param="max_num_seqs",
        )
    dense_budget = config.dense_weights_memory_bytes
    if dense_budget is None:
        dense_budget = dense_weights_budget(free)
    return replace(
        config,
        max_model_len=max_model_len,
        dense_weights_memory_bytes=dense_budget,
        dtype=dtype,
        cache=replace(cache, dtype=kv_dtype, num_blocks=num_blocks),
    )


def _check_room(cache: CacheConfig, pool_bytes: int, free: int) -> None:
    """Pages are only taken when they are written, so the system would not say it until then."""
    if pool_bytes > free:
        name = "num_blocks" if cache.num_blocks is not None else "kv_cache_memory_bytes"
        raise ConfigError(
            f"{name}: a K/V pool of {pool_bytes} bytes does not fit in the {free} that are free",
            param=name,
        )


def _check_batch_invariant(config: EngineConfig, dtype: str) -> None:
    for name, value, known in (
        ("device", config.device, ("auto", "cpu")),
        ("dtype", dtype, ("float32",)),
        ("attention_backend", config.attention_backend, ("auto", "cpu")),
    ):
        if value not in known:
            raise ConfigError(
                f"batch_invariant needs {name} {known[-1]}, not {value}", param="batch_invariant"
            )


def cpu_pool_budget(free: int) -> int:
    """Bytes of K/V that a CPU's pool may take of what is free, unless it is told."""
    return int(free * CPU_POOL_FRACTION)


def dense_weights_budget(free: int) -> int:
    """Bytes that a dense copy of the weights may take of what is free, unless it is told."""
    return int(free * CPU_WEIGHTS_FRACTION)


def residence_of(
    model_config: ModelConfig, config: EngineConfig, *, wide_vectors: bool
) -> Residence:
    """How matrices will lie under a resolved ``config``. They stay packed where a dense copy of
    all weights would take more than it may; on a GPU a quantised file becomes the engine's dtype.
    """
    budget = config.dense_weights_memory_bytes
    assert budget is not None
    too_large = stored_weight_bytes(model_config, DTYPE_BYTES[config.dtype]) > budget
    return Residence(
        device=config.device,
        dtype=config.dtype,
        packed=too_large and config.device == "cpu",
        batch_invariant=config.batch_invariant,
        wide_vectors=wide_vectors,
    )


def available_memory() -> int:
    """Bytes this process can still take: the machine's, or what its control group leaves."""
    free = _meminfo_available()
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, usage = _read_bytes(limit_file), _read_bytes(usage_file)
        if limit is not None and usage is not None:
            free = min(free, max(limit - usage, 0))
    return free


def _meminfo_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # macOS has no such line; half of what is installed is a guess on the safe side.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read_bytes(path: str) -> int | None:
    """The number in a control group's file; None where there is no file or no limit ("max")."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None

from __future__ import annotations

import pytest

from harness import Tiny
from stairs.config import CacheConfig, EngineConfig
from stairs.engine.resolve import available_memory, resolve
from stairs.errors import ConfigError

GIB = 2**30


def test_pool_takes_a_quarter_of_memory_or_what_all_sequences_can_use(tiny_llama: Tiny):
    config = tiny_llama.config  # 3 layers x 2 kv heads x 8: 384 bytes a token in fp32
    block = 16 * 384
    small = resolve(config, EngineConfig(max_num_seqs=64), memory=400 * block)
    assert small.cache.num_blocks == 100
    large = resolve(config, EngineConfig(max_num_seqs=2), memory=GIB)
    assert large.cache.num_blocks == 2 * 1024 // 16
    asked = resolve(config, EngineConfig(cache=CacheConfig(memory_bytes=10 * block)), memory=GIB)
    assert asked.cache.num_blocks == 10
    half = EngineConfig(cache=CacheConfig(memory_bytes=10 * block, dtype="bfloat16"))
    assert resolve(config, half, memory=GIB).cache.num_blocks == 20


def test_auto_becomes_what_runs(tiny_llama: Tiny):
    resolved = resolve(tiny_llama.config, EngineConfig(), memory=GIB)
    assert (resolved.dtype, resolved.cache.dtype, resolved.max_model_len) == (
        "float32",
        "float32",
        1024,
    )


@pytest.mark.parametrize(
    ("config", "param", "says"),
    [
        (EngineConfig(max_model_len=1025), "max_model_len", "1025 exceeds the 1024"),
        (
            EngineConfig(cache=CacheConfig(memory_bytes=100)),
            "kv_cache_memory_bytes",
            "100 holds no block: one of 16 tokens takes 6144 bytes",
        ),
        (
            EngineConfig(cache=CacheConfig(memory_bytes=10**15)),
            "kv_cache_memory_bytes",
            "does not fit in the 1073741824 that are free",
        ),
        (
            EngineConfig(cache=CacheConfig(num_blocks=10**12)),
            "num_blocks",
            "does not fit in the 1073741824 that are free",
        ),
        (EngineConfig(max_num_seqs=10**9), "max_num_seqs", "more than a quarter"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_allocated(
    tiny_llama: Tiny, config, param, says
):
    with pytest.raises(ConfigError, match=says) as caught:
        resolve(tiny_llama.config, config, memory=GIB)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"prefill_chunk_size": 100}, "prefill_chunk_size"),
        ({"max_num_batched_tokens": 500}, "max_num_batched_tokens"),
        ({"dtype": "int3"}, "dtype"),
        ({"max_model_len": 0}, "max_model_len"),
    ],
)
def test_engine_options_are_checked_when_built(options, param):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert caught.value.param == param and param in str(caught.value)


def test_available_memory_is_bounded_by_the_control_group(monkeypatch):
    files = {"/sys/fs/cgroup/memory.max": 900, "/sys/fs/cgroup/memory.current": 300}
    monkeypatch.setattr("stairs.engine.resolve._read_bytes", files.get)
    monkeypatch.setattr("stairs.engine.resolve._meminfo_available", lambda: 10_000)
    assert available_memory() == 600
    monkeypatch.setattr("stairs.engine.resolve._meminfo_available", lambda: 500)
    assert available_memory() == 500
    monkeypatch.setattr("stairs.engine.resolve._read_bytes", lambda path: None)
    assert available_memory() == 500

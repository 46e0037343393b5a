"""Weights that stay packed: the same values as a dense copy, in the memory that was promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from checkpoints.model_files import as_llama_cpp, metadata_of, seeded_tensors, write_gguf
from harness import prompt_logits
from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.checkpoints.gguf import open_gguf
from stairs.checkpoints.gguf_tensors import GGUFTensors
from stairs.config import CacheConfig, EngineConfig, ModelConfig
from stairs.engine.build import build_engine
from stairs.engine.core import Engine
from stairs.models import packed

WIDE = ModelConfig(
    model_type="llama", vocab_size=96, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, intermediate_size=512, max_position_embeddings=128, norm_eps=1e-5,
    activation="silu", rope_theta=10000.0,
)  # fmt: skip
GPT2 = ModelConfig(
    model_type="gpt2", vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4,
    head_dim=16, intermediate_size=256, max_position_embeddings=64, norm_eps=1e-5,
    activation="gelu_new", tie_word_embeddings=True, attention_bias=True,
    attention_output_bias=True, mlp_bias=True,
)  # fmt: skip


def engines(path: Path, config: ModelConfig) -> tuple[Engine, list[tuple[float, Engine]]]:
    """The same file dense, and packed with the most it may differ: in slices, in registers, and
    as a machine with memory runs it. In float64, which the kernel does not know, the budget says
    whether it is dense or in slices."""
    source = GGUFTensors(open_gguf(path), config)

    def engine(dtype: str, budget: int) -> Engine:
        cache = CacheConfig(num_blocks=16)
        config_ = EngineConfig(dtype=dtype, dense_weights_memory_bytes=budget, cache=cache)
        return build_engine(config, source, config_)

    packed = [(1e-12, engine("float64", 0)), (3e-6, engine("float32", 0))]
    return engine("float64", 2**40), [*packed, (3e-6, engine("float32", 2**40))]


def check(dense: Engine, kept: list[tuple[float, Engine]], *, prompt: list[int]) -> None:
    wanted = prompt_logits(dense, prompt)
    for most, engine in kept:
        assert (prompt_logits(engine, prompt) - wanted).abs().max() / wanted.abs().max() < most


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_packed_llama_equals_its_dense_copy(tmp_path: Path, kind: str, monkeypatch):
    monkeypatch.setattr(packed, "SLICE_BYTES", 4 * 256 * 40)  # many slices, the last one short
    tensors = as_llama_cpp(seeded_tensors(WIDE), WIDE, gguf.MODEL_ARCH.LLAMA)
    types = {name: kind for name, array in tensors.items() if array.ndim == 2}
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata=metadata_of(WIDE), types=types)
    check(*engines(path, WIDE), prompt=list(range(90)))


def test_packed_gpt2_equals_its_dense_copy(tmp_path: Path):
    tensors = as_llama_cpp(seeded_tensors(GPT2), GPT2, gguf.MODEL_ARCH.GPT2)
    types = {name: "Q8_0" for name, array in tensors.items() if array.ndim == 2}
    path = write_gguf(
        tmp_path / "g.gguf", tensors, arch="gpt2", metadata=metadata_of(GPT2), types=types
    )
    check(*engines(path, GPT2), prompt=list(range(60)))


PEAK = """
import sys
from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.config import CacheConfig, EngineConfig, SamplingParams
from stairs.engine.build import build_engine

checkpoint = open_checkpoint(sys.argv[1])
engine = build_engine(
    checkpoint.config,
    checkpoint.tensors,
    EngineConfig(dense_weights_memory_bytes=0, cache=CacheConfig(num_blocks=64)),
)
engine.add(list(range(100, 400)), SamplingParams(temperature=0.0, max_tokens=3))
while engine.has_work:
    engine.step()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, engine.kv.nbytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_peak_memory_is_file_layer_cache_and_a_constant():
    """Peak resident bytes <= file + one dense layer + K/V + 500 MB, the whole program included."""
    checkpoint = open_checkpoint("smollm2")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "smollm2"],
        capture_output=True, text=True, check=True, env=os.environ,
    )  # fmt: skip
    peak, kv_bytes = map(int, done.stdout.split())
    c = checkpoint.config
    layer = 4 * (
        c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        + 3 * c.hidden_size * c.intermediate_size
    )
    assert peak <= checkpoint.path.stat().st_size + layer + kv_bytes + 500 * 10**6

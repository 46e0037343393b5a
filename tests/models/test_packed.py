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


def engines(path: Path, config: ModelConfig) -> tuple[Engine, Engine]:
    """The same file dense and packed."""
    source = GGUFTensors(open_gguf(path), config)
    cache = CacheConfig(num_blocks=16)
    dense, kept = (
        build_engine(config, source, EngineConfig(dense_weights_memory_bytes=b, cache=cache))
        for b in (2**40, 0)
    )
    return dense, kept


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_packed_llama_equals_its_dense_copy(tmp_path: Path, kind: str, monkeypatch):
    monkeypatch.setattr(packed, "SLICE_BYTES", 4 * 256 * 40)  # many slices, the last one short
    tensors = as_llama_cpp(seeded_tensors(WIDE), WIDE, gguf.MODEL_ARCH.LLAMA)
    types = {name: kind for name, array in tensors.items() if array.ndim == 2}
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata=metadata_of(WIDE), types=types)
    dense, kept = engines(path, WIDE)
    prompt = list(range(90))
    wanted, found = prompt_logits(dense, prompt), prompt_logits(kept, prompt)
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-6


def test_packed_gpt2_equals_its_dense_copy(tmp_path: Path):
    tensors = as_llama_cpp(seeded_tensors(GPT2), GPT2, gguf.MODEL_ARCH.GPT2)
    types = {name: "Q8_0" for name, array in tensors.items() if array.ndim == 2}
    path = write_gguf(
        tmp_path / "g.gguf", tensors, arch="gpt2", metadata=metadata_of(GPT2), types=types
    )
    dense, kept = engines(path, GPT2)
    wanted, found = prompt_logits(dense, list(range(60))), prompt_logits(kept, list(range(60)))
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-6


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

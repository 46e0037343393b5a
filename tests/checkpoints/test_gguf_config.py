"""GGUF metadata to a configuration: translated, checked, or refused by key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoints.model_files import (
    CONFIG,
    METADATA,
    as_llama_cpp,
    seeded_tensors,
    write_gguf,
    write_tiny_gguf,
)
from stairs.checkpoints.configs import GenerationDefaults, read_config
from stairs.checkpoints.gguf import open_gguf
from stairs.checkpoints.gguf_config import read_gguf_config, read_gguf_generation
from stairs.config import ModelConfig
from stairs.errors import CheckpointError, ConfigError


def config_of(tmp_path: Path, metadata: dict[str, Any], **extra: np.ndarray) -> ModelConfig:
    arrays = as_llama_cpp(seeded_tensors(), CONFIG, gguf.MODEL_ARCH.LLAMA)
    path = write_gguf(
        tmp_path / "tiny.gguf",
        arrays | {name.replace("_weight", ".weight"): array for name, array in extra.items()},
        metadata=metadata,
    )
    return read_gguf_config(open_gguf(path))


def test_the_tiny_model(tmp_path: Path):
    assert config_of(tmp_path, METADATA) == CONFIG


def test_saved_dtype(tmp_path: Path):
    assert config_of(tmp_path, METADATA | {"general.file_type": 1}).dtype == "float16"
    assert config_of(tmp_path, METADATA | {"general.file_type": 32}).dtype == "bfloat16"
    assert config_of(tmp_path, METADATA | {"general.file_type": 3}).dtype == "float32"


def test_every_token_that_ends_a_turn(tmp_path: Path):
    more = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert config_of(tmp_path, METADATA | more).eos_token_ids == (2, 5)


def test_sampling_defaults(tmp_path: Path):
    path = write_tiny_gguf(
        tmp_path / "s.gguf",
        metadata=METADATA | {"general.sampling.temp": 0.5, "general.sampling.top_k": 40},
    )
    assert read_gguf_generation(open_gguf(path), CONFIG) == GenerationDefaults(
        temperature=0.5, top_k=40, eos_token_ids=(2,)
    )


@pytest.mark.parametrize("name", [
    "llama.block_count", "llama.context_length", "llama.embedding_length",
    "llama.feed_forward_length", "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
])  # fmt: skip
def test_a_missing_key_is_named_as_the_file_would_have_it(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match=name):
        config_of(tmp_path, {k: v for k, v in METADATA.items() if k != name})


@pytest.mark.parametrize(("name", "value"), [
    ("llama.expert_count", 8),
    ("llama.attention.clamp_kqv", 1.0),
    ("llama.logit_scale", 2.0),
    ("llama.attention.causal", False),
    ("llama.attention.value_length", 8),
    ("llama.rope.dimension_count", 8),
    ("llama.attention.head_count_kv", 3),
    ("llama.attention.head_count", "four"),
    ("llama.feed_forward_length", [96, 96]),
    ("llama.block_count", 10**9),
    ("llama.rope.scaling.type", "longrope"),
    ("llama.attention.sliding_window", 64),
    ("general.type", "adapter"),
    ("clip.has_vision_encoder", True),
    ("tokenizer.ggml.eos_token_id", 96),
])  # fmt: skip
def test_a_key_that_changes_the_computation_is_refused(tmp_path: Path, name: str, value: Any):
    with pytest.raises(ConfigError, match=name.rpartition(".")[2].replace("_length", "")):
        config_of(tmp_path, METADATA | {name: value})


def test_an_architecture_we_lack(tmp_path: Path):
    path = write_gguf(
        tmp_path / "m.gguf", {"w": np.zeros(32, np.float32)}, arch="mamba", metadata={}
    )
    with pytest.raises(ConfigError, match=r"general\.architecture 'mamba'"):
        read_gguf_config(open_gguf(path))
    path = write_gguf(tmp_path / "e.gguf", {"w": np.zeros(32, np.float32)})
    with pytest.raises(CheckpointError, match=r"token_embd\.weight"):
        read_gguf_config(open_gguf(path))


def test_rope_divisors_stored_as_a_tensor(tmp_path: Path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    config = config_of(tmp_path, METADATA, rope_freqs_weight=factors)
    assert config == dataclasses.replace(CONFIG, rope_factors=tuple(factors.tolist()))
    for bad in (np.zeros(8, np.float32), np.full(8, np.nan, np.float32), np.ones(4, np.float32)):
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            config_of(tmp_path, METADATA, rope_freqs_weight=bad)


@pytest.mark.parametrize(("keys", "scaling"), [
    ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    (
        {"type": "yarn", "factor": 4.0, "original_context_length": 32, "finetuned": True},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    ({"type": "none", "factor": 1.0}, None),
])  # fmt: skip
def test_rope_scaling_reads_as_the_config_it_came_from(
    tmp_path: Path, keys: dict[str, Any], scaling: dict[str, Any] | None
):
    stored = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    expected = read_config({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "max_position_embeddings": 128, "rms_norm_eps": CONFIG.norm_eps, "hidden_act": "silu",
        "rope_theta": 10000.0, "rope_scaling": scaling, "bos_token_id": 1, "eos_token_id": 2,
    })  # fmt: skip
    assert config_of(tmp_path, METADATA | stored) == expected

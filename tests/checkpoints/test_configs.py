"""A config.json is read whole, key by key, or refused by the key at fault."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stairs.checkpoints.configs import FAMILIES, read_config, read_generation
from stairs.config import ModelConfig
from stairs.errors import ConfigError

# The default model's own config.json, with the keys that other programs left in it.
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"dtype": "q4"},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def with_keys(**changes: Any) -> dict[str, Any]:
    return SMOLLM2 | changes


def test_the_default_model():
    assert read_config(SMOLLM2) == ModelConfig(
        model_type="llama", vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, intermediate_size=1536, max_position_embeddings=8192,
        norm_eps=1e-5, activation="silu", rope_theta=100000.0, tie_word_embeddings=True,
        dtype="bfloat16", bos_token_id=1, eos_token_ids=(2,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "layers", "heads"), [(768, 12, 12), (1024, 24, 16), (1280, 36, 20), (1600, 48, 25)]
)
def test_gpt2_in_all_sizes(width: int, layers: int, heads: int):
    raw = GPT2Config(n_embd=width, n_layer=layers, n_head=heads).to_dict()
    config = read_config(raw | {"n_ctx": 1024, "architectures": ["GPT2LMHeadModel"]})
    assert (config.hidden_size, config.num_layers, config.num_heads) == (width, layers, heads)
    assert (config.num_kv_heads, config.head_dim) == (heads, width // heads)
    assert (config.intermediate_size, config.max_position_embeddings) == (4 * width, 1024)
    assert (
        config.rope_theta is None
        and config.tie_word_embeddings
        and config.eos_token_ids == (50256,)
    )
    assert config.attention_bias and config.attention_output_bias and config.mlp_bias


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            LlamaConfig(attention_bias=True, mlp_bias=True),
            {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
        ),
        (
            MistralConfig(sliding_window=4096),
            {
                "sliding_window": 4096,
                "context_length": 4096,
                "num_kv_heads": 8,
                "attention_bias": False,
            },
        ),
        (MistralConfig(sliding_window=None), {"sliding_window": None, "context_length": 131072}),
        (
            Qwen2Config(rope_theta=1e6),
            {"attention_bias": True, "attention_output_bias": False, "sliding_window": None},
        ),
        (
            Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=2),
            {"sliding_window": 64, "context_length": 64},
        ),
        (
            Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=99),
            {"sliding_window": None},
        ),
        (
            Qwen3Config(
                hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128
            ),
            {"head_dim": 128, "qk_norm": True, "attention_bias": False},
        ),
        (
            SmolLM3Config(num_hidden_layers=9),
            {"no_rope_layers": (3, 7), "tie_word_embeddings": True, "rope_theta": 2e6},
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_every_family_as_transformers_writes_it(config: Any, expected: dict[str, Any]):
    read = read_config(config.to_dict())
    assert read.model_type in FAMILIES
    assert {name: getattr(read, name) for name in expected} == expected


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3_SCALING,
    LLAMA3_SCALING | {"factor": 32.0, "high_freq_factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096,
     "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 1.0},
], ids=lambda scaling: scaling["rope_type"])  # fmt: skip
def test_rope_scaling_gives_transformers_frequencies(scaling: dict[str, Any]):
    theirs = LlamaConfig(
        hidden_size=512, num_attention_heads=8, max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": 5e5},
    )  # fmt: skip
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, None)
    for raw in (
        theirs.to_dict(),
        {k: v for k, v in theirs.to_dict().items() if k != "rope_parameters"}
        | {"rope_theta": 5e5, "rope_scaling": scaling},
    ):
        ours = read_config(raw)
        exponents = torch.arange(32, dtype=torch.float64) / 32
        divided = 5e5**-exponents / torch.tensor(ours.rope_factors, dtype=torch.float64)
        torch.testing.assert_close(divided.float(), frequencies, rtol=1e-5, atol=0)
        assert ours.rope_attention_factor == pytest.approx(attention_factor)


def test_old_name_of_the_rope_type():
    config = read_config(with_keys(rope_scaling={"type": "linear", "factor": 2.0}))
    assert config.rope_factors == (2.0,) * 32


@pytest.mark.parametrize("name", [
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "max_position_embeddings", "rms_norm_eps", "hidden_act",
])  # fmt: skip
def test_a_missing_key_is_named(name: str):
    with pytest.raises(ConfigError, match=name) as caught:
        read_config({key: value for key, value in SMOLLM2.items() if key != name})
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), [
    ("model_type", "mamba"),
    ("model_type", ["llama"]),
    ("attn_logit_softcapping", 50.0),
    ("quantization_config", {"bits": 4}),
    ("auto_map", {"AutoModel": "modeling.X"}),
    ("hidden_act", "gelu"),
    ("vocab_size", "49152"),
    ("vocab_size", True),
    ("vocab_size", 2**40),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 10**12),
    ("num_key_value_heads", 2),
    ("head_dim", 63),
    ("rms_norm_eps", math.nan),
    ("rms_norm_eps", -1e-5),
    ("rope_theta", math.inf),
    ("partial_rotary_factor", 0.5),
    ("rope_interleaved", True),
    ("rope_scaling", "llama3"),
    ("rope_scaling.rope_type", {"rope_type": "dynamic", "factor": 2.0}),
    ("rope_scaling.factor", {"rope_type": "llama3"}),
    ("rope_scaling.surprise", {"rope_type": "linear", "factor": 2.0, "surprise": 1}),
    ("hidden_size", 577),
    ("rope_scaling.high_freq_factor", LLAMA3_SCALING | {"high_freq_factor": 0.5}),
    ("rope_scaling.factor", LLAMA3_SCALING | {"factor": 0.5}),
    ("rope_scaling.rope_theta", {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.0}),
    ("tie_word_embeddings", "yes"),
    ("eos_token_id", 49152),
    ("eos_token_id", [2, "x"]),
    ("torch_dtype", "int8"),
    ("architectures", ["LlamaForSequenceClassification"]),
    ("sliding_window", 4096),
    ("layer_types", ["linear_attention"] * 30),
    ("is_encoder_decoder", True),
])  # fmt: skip
def test_a_wrong_or_unknown_key_is_named(name: str, value: Any):
    with pytest.raises(ConfigError, match=name.partition(".")[2] or name):
        read_config(with_keys(**{name.partition(".")[0]: value}))


def test_a_frequency_may_be_missing_only_where_the_family_has_one():
    raw = {key: value for key, value in SMOLLM2.items() if key != "rope_theta"}
    assert read_config(raw).rope_theta == 10000.0


@pytest.mark.parametrize(("name", "value"), [
    ("n_head", 7), ("activation_function", "relu"), ("scale_attn_by_inverse_layer_idx", True),
    ("add_cross_attention", True), ("n_embd", None),
])  # fmt: skip
def test_a_wrong_gpt2_is_named(name: str, value: Any):
    with pytest.raises(ConfigError, match=name):
        read_config(GPT2Config().to_dict() | {name: value})


def test_layers_without_rope_must_be_marked_one_by_one():
    raw = SmolLM3Config(num_hidden_layers=4).to_dict()
    assert read_config(raw | {"no_rope_layers": [0, 1, 1, 0]}).no_rope_layers == (0, 3)
    for marks in ([1], [2, 1, 1, 1], "1111", [[], 1, 1, 1]):
        with pytest.raises(ConfigError, match="no_rope_layers"):
            read_config(raw | {"no_rope_layers": marks})


def test_qwen2_config_needs_its_theta():
    raw = Qwen2Config().to_dict()
    raw["rope_parameters"] = {"rope_type": "default"}
    with pytest.raises(ConfigError, match="rope_theta"):
        read_config(raw)


def test_generation_defaults():
    config = read_config(SMOLLM2)
    found = read_generation(
        {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 0], "num_beams": 1, "top_k": 20},
        config,
    )
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.9, 20)
    assert found.eos_token_ids == (2, 0)
    silent = read_generation({}, config)
    assert dataclasses.astuple(silent)[:5] == (None,) * 5 and silent.eos_token_ids == (2,)
    with pytest.raises(ConfigError, match="temperature"):
        read_generation({"temperature": "hot"}, config)

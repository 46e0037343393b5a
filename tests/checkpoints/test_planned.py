"""Families only the planner knows: read as strictly as the others, and refused by the engine."""

from __future__ import annotations

from typing import Any

import pytest

from stairs.checkpoints.configs import read_config
from stairs.checkpoints.planned import PLANNED, read_any_config
from stairs.errors import ConfigError
from stairs.planner.catalogue import CATALOGUE

BY_FAMILY = {raw["model_type"]: dict(raw) for raw in CATALOGUE.values()}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
BY_FAMILY["qwen3_moe"] = QWEN3_MOE


@pytest.mark.parametrize("family", PLANNED)
def test_what_cannot_run_is_planned_and_refused_by_the_engine(family: str) -> None:
    assert read_any_config(BY_FAMILY[family]).model_type == family
    with pytest.raises(ConfigError, match=family) as refused:
        read_config(BY_FAMILY[family])
    assert refused.value.param == "model_type"


@pytest.mark.parametrize("family", PLANNED)
def test_an_unknown_key_is_named(family: str) -> None:
    with pytest.raises(ConfigError, match="attention_chunk_size") as refused:
        read_any_config(BY_FAMILY[family] | {"attention_chunk_size": 8192})
    assert refused.value.param == "attention_chunk_size"


@pytest.mark.parametrize("family", PLANNED)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_key_is_named(family: str, key: str) -> None:
    raw = {k: v for k, v in BY_FAMILY[family].items() if k != key}
    with pytest.raises(ConfigError, match=key) as refused:
        read_any_config(raw)
    assert refused.value.param == key


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gemma3_text", "sliding_window", -1),
        ("gemma3_text", "layer_types", ["full_attention"]),
        ("gemma3_text", "hidden_activation", "relu"),
        ("gpt_oss", "num_local_experts", "32"),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 24),
        ("mixtral", "num_experts_per_tok", 0),
        ("qwen3_moe", "mlp_only_layers", [1]),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("deepseek_v3", "kv_lora_rank", 2**40),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "num_key_value_heads", 8),
    ],
)
def test_a_nonsense_value_is_named(family: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key) as refused:
        read_any_config(BY_FAMILY[family] | {key: value})
    assert refused.value.param == key


@pytest.mark.parametrize("method", ["gptq", {"no": "object"}])
def test_an_unknown_weight_format_is_refused(method: object) -> None:
    raw = BY_FAMILY["gpt_oss"] | {"quantization_config": {"quant_method": method}}
    with pytest.raises(ConfigError, match="quant_method"):
        read_any_config(raw)


def test_more_experts_a_token_than_there_are() -> None:
    with pytest.raises(ConfigError, match="experts_per_token 9"):
        read_any_config(BY_FAMILY["mixtral"] | {"num_experts_per_tok": 9})


def test_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'mamba'.*llama.*deepseek_v3"):
        read_any_config({"model_type": "mamba"})


def test_gemma_with_a_vision_tower_plans_its_text() -> None:
    text = dict(BY_FAMILY["gemma3_text"])
    del text["vocab_size"], text["torch_dtype"], text["max_position_embeddings"]
    raw = {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}
    assert read_any_config(raw) == read_any_config(BY_FAMILY["gemma3_text"])
    with pytest.raises(ConfigError, match="text_config"):
        read_any_config({"model_type": "gemma3", "text_config": 3})
    with pytest.raises(ConfigError, match="text_config"):
        read_any_config({"model_type": "gemma3"})


def test_qwen3_moe_has_its_published_parameters() -> None:
    from stairs.accounting.weights import parameter_count

    assert parameter_count(read_any_config(QWEN3_MOE)) == 30_532_122_624

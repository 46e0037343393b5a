"""Ten public models and the default one: published figures, and small twins that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from stairs.accounting import costs, weights
from stairs.checkpoints.planned import read_any_config
from stairs.planner.catalogue import CATALOGUE, SHORT_NAMES

# Parameters: the publishers' checkpoints (Gemma: its language model; DeepSeek: without the layer
# that predicts a further token). K/V bytes a token in 16 bit; for windows and experts, by hand.
PUBLISHED = {
    "openai-community/gpt2": (124_439_808, 36_864),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (134_515_008, 23_040),
    "meta-llama/Llama-3.1-8B": (8_030_261_248, 128 * 1024),
    "meta-llama/Llama-3.1-70B": (70_553_706_496, 320 * 1024),
    "Qwen/Qwen3-0.6B": (596_049_920, 112 * 1024),
    "Qwen/Qwen3-32B": (32_762_123_264, 256 * 1024),
    "mistralai/Mistral-7B-v0.1": (7_241_732_096, 128 * 1024),
    "google/gemma-3-27b-it": (27_009_346_304, 496 * 1024),
    "openai/gpt-oss-20b": (20_914_757_184, 48 * 1024),
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, 128 * 1024),
    "deepseek-ai/DeepSeek-V3": (671_026_404_352, 61 * 576 * 2),
}

LLAMA_LIKE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
TWINS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 97},
    "llama": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE | {"head_dim": 16, "max_window_layers": 2},
    "mistral": LLAMA_LIKE | {"sliding_window": 16},
    "mixtral": LLAMA_LIKE | {"num_local_experts": 4},
    "gemma3_text": LLAMA_LIKE | {"head_dim": 16, "num_hidden_layers": 7, "sliding_window": 8},
    "gpt_oss": LLAMA_LIKE
    | {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_experts_per_tok": 3,
        "num_local_experts": 8,
        "quantization_config": None,
        "sliding_window": 8,
    },
    "deepseek_v3": LLAMA_LIKE
    | {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 6,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "quantization_config": None,
        "topk_group": 1,
        "v_head_dim": 12,
    },
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_published_parameters_and_kv_bytes(name: str) -> None:
    config = read_any_config(CATALOGUE[name])
    parameters, kv = PUBLISHED[name]
    assert abs(weights.parameter_count(config) / parameters - 1) < 1e-3
    assert costs.kv_bytes_per_token(config, 2) == kv


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_small_twin_has_the_parameters_and_flops_that_torch_counts(name: str) -> None:
    raw = dict(CATALOGUE[name]) | TWINS[CATALOGUE[name]["model_type"]]
    if "rope_scaling" in raw:
        raw["rope_scaling"] = raw["rope_scaling"] | {"original_max_position_embeddings": 32}
    config = read_any_config(raw)
    model = _transformers_model(raw)
    stored = [*model.parameters(), *_correction_biases(model)]
    assert weights.parameter_count(config) == sum(p.numel() for p in stored)

    tokens = 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 97, (1, tokens)), use_cache=False)
    macs = costs.step_macs(
        config, [(tokens, tokens)], logits_rows=tokens, convention="square", form="expanded"
    )
    assert costs.flops(macs) == counter.get_total_flops()


def test_windows_leave_fixed_bytes_a_request_and_bytes_a_token() -> None:
    gpt_oss = read_any_config(CATALOGUE["openai/gpt-oss-20b"])
    assert costs.kv_fixed_and_growing(gpt_oss, 2) == (12 * 128 * 2048, 12 * 2048)
    windowed = 32 * costs.kv_sequence_bytes(gpt_oss, 8192, 2)
    assert round(windowed / 2**30, 2) == 6.09
    assert 32 * 8192 * costs.kv_bytes_per_token(gpt_oss, 2) == 12 * 2**30

    gemma = read_any_config(CATALOGUE["google/gemma-3-27b-it"])
    assert costs.attention_groups(gemma) == ((10, None), (52, 1024))
    mistral = read_any_config(CATALOGUE["mistralai/Mistral-7B-v0.1"])
    assert costs.kv_fixed_and_growing(mistral, 2) == (4096 * 128 * 1024, 0)
    assert costs.kv_sequence_bytes(mistral, 32_768, 2) == 512 * 2**20


def test_latent_attention_stores_71_times_less_and_does_more_flops_absorbed() -> None:
    config = read_any_config(CATALOGUE["deepseek-ai/DeepSeek-V3"])
    stored = costs.kv_values_per_token(config)
    assert stored == 576
    assert round(128 * (192 + 128) / stored) == 71  # its own heads' K and V instead
    assert round(2 * 512 / stored, 2) == 1.78  # a formula seen elsewhere: no rope, a factor 2
    absorbed = costs.attention_macs(config, 1, 8192, form="absorbed")
    expanded = costs.attention_macs(config, 1, 8192, form="expanded")
    pairs = {form: m["qk"] + m["pv"] for form, m in (("a", absorbed), ("e", expanded))}
    assert round(pairs["a"] / pairs["e"], 1) == 3.4
    assert expanded["latent"] == 8192 * absorbed["latent"]
    # Each latent value read serves all heads: 242 FLOP a byte, at the ridge, not memory-bound.
    layer = 2 * pairs["a"] / config.num_layers / 8192
    assert round(layer / (stored * 2)) == 242


def test_experts_read_grow_with_the_batch() -> None:
    mixtral = read_any_config(CATALOGUE["mistralai/Mixtral-8x7B-v0.1"])
    assert weights.expected_experts(mixtral, 1) == pytest.approx(2)
    assert weights.expected_experts(mixtral, 4) == pytest.approx(8 * (1 - 0.75**4))
    assert weights.expected_experts(mixtral, 10_000) == pytest.approx(8)
    one = weights.weight_bytes_read(
        mixtral, weights.dense_weights(mixtral, 2), tokens=1, logits_rows=1
    )
    assert one["experts"] == 2 * 3 * 4096 * 14336 * 32 * 2


def test_packed_weights_take_what_the_checkpoints_take() -> None:
    gpt_oss = read_any_config(CATALOGUE["openai/gpt-oss-20b"])
    assert round(weights.stored_weight_bytes(gpt_oss, 2) / 1e9, 2) == 13.76
    deepseek = read_any_config(CATALOGUE["deepseek-ai/DeepSeek-V3"])
    assert 671e9 < weights.stored_weight_bytes(deepseek, 2) < 675e9


def test_the_embedding_is_gathered_not_read() -> None:
    llama = read_any_config(CATALOGUE["meta-llama/Llama-3.1-8B"])
    read = sum(
        weights.weight_bytes_read(
            llama, weights.dense_weights(llama, 2), tokens=1, logits_rows=1
        ).values()
    )
    table = 128256 * 4096 * 2
    assert read == 2 * 8_030_261_248 - table
    assert round(table / read, 2) == 0.07
    gpt2 = read_any_config(CATALOGUE["openai-community/gpt2"])
    assert (
        weights.weight_bytes_read(gpt2, weights.dense_weights(gpt2, 2), tokens=1, logits_rows=1)[
            "head"
        ]
        == 50257 * 768 * 2
    )


def test_short_names_are_the_catalogues() -> None:
    assert set(SHORT_NAMES.values()) == set(CATALOGUE)
    assert SHORT_NAMES["llama-3.1-8b"] == "meta-llama/Llama-3.1-8B"


def _transformers_model(raw: dict[str, Any]) -> torch.nn.Module:
    keys = {k: v for k, v in raw.items() if k not in ("model_type", "torch_dtype", "n_ctx") and v}
    config = AutoConfig.for_model(
        raw["model_type"], **keys, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    config._attn_implementation = "eager"  # a fused kernel counts as nothing on a CPU
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def _correction_biases(model: torch.nn.Module) -> list[torch.Tensor]:
    """DeepSeek's router bias: in the checkpoint, but a buffer in transformers."""
    return [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]

"""Families that can be planned but not run: windows on some layers, experts, latent attention.

``read_any_config`` takes what the engine runs and these; ``configs.read_config``, which the
engine uses, refuses them by model_type. Keys are as strict here: each one is read, known to
change no count, or refused by name. No code that a checkpoint brings is ever run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stairs.checkpoints.configs import (
    FAMILIES,
    NO_EFFECT,
    read_config,
    read_heads,
    read_tokens_and_dtype,
)
from stairs.checkpoints.keys import Keys
from stairs.config import MLAConfig, ModelConfig, MoEConfig
from stairs.errors import ConfigError

__all__ = ["PLANNED", "read_any_config"]

# Beyond NO_EFFECT: keys that change values but no count of them.
NO_COUNT = NO_EFFECT | {
    "architectures", "auto_map", "model_type", "rope_theta", "rope_scaling", "rope_parameters",
    "rope_local_base_freq", "rope_interleave", "rms_norm_eps", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "initial_context_length",
    "swiglu_alpha", "swiglu_limit", "router_aux_loss_coef", "router_jitter_noise",
    "output_router_logits", "n_group", "topk_group", "topk_method", "norm_topk_prob",
    "routed_scaling_factor", "scoring_func", "seq_aux", "aux_loss_alpha", "ep_size",
    "num_nextn_predict_layers", "cache_implementation", "use_bidirectional_attention",
}  # fmt: skip


def read_any_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A config.json's mapping of any family that can be planned."""
    keys = Keys(raw)
    model_type = keys.text("model_type")
    if model_type in FAMILIES:
        return read_config(raw)
    if model_type == "gemma3":  # a language model beside a vision tower: the text is planned
        text = keys.take("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(
                f"text_config must be an object, got {text!r:.80}", param="text_config"
            )
        return read_any_config({"torch_dtype": raw.get("torch_dtype")} | dict(text))
    read = PLANNED.get(model_type)
    if read is None:
        raise ConfigError(
            f"model_type {model_type!r} cannot be planned; one of "
            f"{', '.join([*FAMILIES, *PLANNED])}",
            param="model_type",
        )
    config = read(keys)
    keys.refuse_rest(NO_COUNT)
    return config


def _shape(keys: Keys, **defaults: int) -> dict[str, Any]:
    """What every family here names alike."""
    vocab_size = keys.integer("vocab_size", high=2**24, **_default(defaults, "vocab_size"))
    context = keys.integer("max_position_embeddings", **_default(defaults, "context"))
    return {
        "model_type": keys.text("model_type"),
        "vocab_size": vocab_size,
        "hidden_size": keys.integer("hidden_size", high=2**20),
        "num_layers": keys.integer("num_hidden_layers", high=4096),
        "intermediate_size": keys.integer("intermediate_size", high=2**22),
        "max_position_embeddings": context,
        "norm_eps": keys.number("rms_norm_eps", default=1e-6),
        # Only whether there is a rope matters to a plan, never its angles.
        "rope_theta": 10000.0,
        **read_tokens_and_dtype(keys, vocab_size),
    }


def _default(defaults: Mapping[str, int], name: str) -> dict[str, int]:
    return {"default": defaults[name]} if name in defaults else {}


def _heads(keys: Keys, hidden_size: int) -> dict[str, Any]:
    num_heads, num_kv_heads, head_dim = read_heads(keys, hidden_size)
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _full_layers(keys: Keys, num_layers: int, *, every: int) -> int:
    """Layers that see everything: said by ``layer_types``, or every so many-th."""
    keys.take("sliding_window_pattern", default=None)
    kinds = keys.take("layer_types", default=None)
    if kinds is None:
        return num_layers // every
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not set(kinds) <= {"full_attention", "sliding_attention"}
    ):
        raise ConfigError(
            f"layer_types must hold full_attention or sliding_attention for each of "
            f"{num_layers} layers",
            param="layer_types",
        )
    return kinds.count("full_attention")


def _read_gemma3(keys: Keys) -> ModelConfig:
    """Five windowed layers to a full one, four norms a layer, q and k norms, a tied head.
    Its own configs leave out what equals transformers' Gemma3TextConfig."""
    shape = _shape(keys, vocab_size=262_208, context=131_072)
    keys.expect("hidden_activation", "gelu_pytorch_tanh")
    pattern = keys.integer("sliding_window_pattern", default=6)
    return ModelConfig(
        **shape,
        **_heads(keys, shape["hidden_size"]),
        activation="gelu_pytorch_tanh",
        sliding_window=keys.integer("sliding_window", default=4096),
        full_attention_layers=_full_layers(keys, shape["num_layers"], every=pattern),
        norms_per_layer=4,
        qk_norm=True,
        attention_bias=keys.flag("attention_bias", default=False),
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=True),
    )


def _read_gpt_oss(keys: Keys) -> ModelConfig:
    """Every other layer windowed, attention sinks, biases everywhere, experts in mxfp4."""
    shape = _shape(keys)
    keys.expect("hidden_act", "silu", required=True)
    keys.take("experts_per_token", default=None)  # its other name is num_experts_per_tok
    bias = keys.flag("attention_bias", default=True)
    return ModelConfig(
        **shape,
        **_heads(keys, shape["hidden_size"]),
        activation="silu",
        sliding_window=keys.integer("sliding_window"),
        full_attention_layers=_full_layers(keys, shape["num_layers"], every=2),
        attention_bias=bias,
        attention_output_bias=bias,
        attention_sinks=True,
        moe=MoEConfig(
            num_experts=keys.integer("num_local_experts", high=2**16),
            experts_per_token=keys.integer("num_experts_per_tok", high=2**16),
            expert_size=shape["intermediate_size"],
            expert_bias=True,
            router_bias=True,
        ),
        weight_format=_weight_format(keys, "mxfp4"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
    )


def _read_mixtral(keys: Keys) -> ModelConfig:
    """Llama with every MLP replaced by experts."""
    shape = _shape(keys)
    keys.expect("hidden_act", "silu", required=True)
    return ModelConfig(
        **shape,
        **_heads(keys, shape["hidden_size"]),
        activation="silu",
        sliding_window=keys.integer("sliding_window", default=None),
        moe=MoEConfig(
            num_experts=keys.integer("num_local_experts", high=2**16),
            experts_per_token=keys.integer("num_experts_per_tok", high=2**16),
            expert_size=shape["intermediate_size"],
        ),
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
    )


def _read_qwen3_moe(keys: Keys) -> ModelConfig:
    """Qwen3 with experts in every layer but those named."""
    shape = _shape(keys)
    keys.expect("hidden_act", "silu", required=True)
    keys.expect("use_sliding_window", False)
    keys.expect("decoder_sparse_step", 1)
    keys.expect("mlp_only_layers", [])
    keys.take("max_window_layers", default=None)
    bias = keys.flag("attention_bias", default=False)
    return ModelConfig(
        **shape,
        **_heads(keys, shape["hidden_size"]),
        activation="silu",
        qk_norm=True,
        attention_bias=bias,
        attention_output_bias=bias,
        moe=MoEConfig(
            num_experts=keys.integer("num_experts", high=2**16),
            experts_per_token=keys.integer("num_experts_per_tok", high=2**16),
            expert_size=keys.integer("moe_intermediate_size", high=2**22),
        ),
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
    )


def _read_deepseek_v3(keys: Keys) -> ModelConfig:
    """Latent attention and experts; the first layers dense; fp8 matrices. The layer that
    predicts a further token (num_nextn_predict_layers) is not part of serving, nor of the count."""
    shape = _shape(keys)
    keys.expect("hidden_act", "silu", required=True)
    keys.expect("moe_layer_freq", 1)
    num_heads = keys.integer("num_attention_heads", high=2**16)
    keys.expect("num_key_value_heads", num_heads)
    keys.expect("attention_bias", False)
    expert_size = keys.integer("moe_intermediate_size", high=2**22)
    mla = MLAConfig(
        kv_lora_rank=keys.integer("kv_lora_rank", high=2**20),
        nope_head_dim=keys.integer("qk_nope_head_dim", high=2**16),
        rope_head_dim=keys.integer("qk_rope_head_dim", high=2**16),
        v_head_dim=keys.integer("v_head_dim", high=2**16),
        q_lora_rank=keys.integer("q_lora_rank", default=None, high=2**20),
    )
    return ModelConfig(
        **shape,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=mla.nope_head_dim + mla.rope_head_dim,
        activation="silu",
        mla=mla,
        moe=MoEConfig(
            num_experts=keys.integer("n_routed_experts", high=2**16),
            experts_per_token=keys.integer("num_experts_per_tok", high=2**16),
            expert_size=expert_size,
            shared_size=expert_size * keys.integer("n_shared_experts", default=0, low=0, high=64),
            num_dense_layers=keys.integer("first_k_dense_replace", default=0, low=0, high=4096),
            router_bias=True,
        ),
        weight_format=_weight_format(keys, "fp8"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
    )


def _weight_format(keys: Keys, expected: str) -> str | None:
    """None: plain matrices. Only the family's own published format is known."""
    raw = keys.take("quantization_config", default=None)
    if raw is None:
        return None
    method = raw.get("quant_method") if isinstance(raw, Mapping) else raw
    if method != expected:
        raise ConfigError(
            f"quantization_config.quant_method must be {expected!r}, got {method!r:.80}",
            param="quantization_config.quant_method",
        )
    if expected == "fp8" and raw.get("weight_block_size") != [128, 128]:
        raise ConfigError(
            "quantization_config.weight_block_size must be [128, 128]",
            param="quantization_config.weight_block_size",
        )
    return expected


PLANNED: Mapping[str, Callable[[Keys], ModelConfig]] = {
    "gemma3_text": _read_gemma3,
    "gpt_oss": _read_gpt_oss,
    "mixtral": _read_mixtral,
    "qwen3_moe": _read_qwen3_moe,
    "deepseek_v3": _read_deepseek_v3,
}

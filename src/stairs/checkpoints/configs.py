"""config.json and generation_config.json to a ``ModelConfig`` and ``GenerationDefaults``.

A family is one row of ``FAMILIES``. Every key is read, known to change nothing, or refused by
name: a key we do not understand could change the computation. Sizes are bounded before anything
is built from them. No torch, no file access: mappings in, frozen values out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stairs.checkpoints.keys import Keys
from stairs.checkpoints.rope import read_rope
from stairs.config import DTYPE_BYTES, ModelConfig
from stairs.errors import ConfigError

__all__ = [
    "FAMILIES",
    "NO_EFFECT",
    "Family",
    "GenerationDefaults",
    "read_config",
    "read_generation",
    "read_heads",
    "read_tokens_and_dtype",
]

# Keys that cannot change what a forward pass computes at inference, whatever their value.
NO_EFFECT = frozenset({
    # who wrote the file, and with what
    "transformers_version", "transformers.js_config", "_name_or_path", "name_or_path", "model_name",
    "_commit_hash", "tokenizer_class", "is_llama_config", "finetuning_task", "task_specific_params",
    # how it was trained or is to be run elsewhere
    "initializer_range", "attention_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop",
    "hidden_dropout", "gradient_checkpointing", "pretraining_tp", "torchscript", "use_cache",
    "chunk_size_feed_forward", "attn_implementation", "_attn_implementation",
    "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict",
    "use_return_dict", "keys_to_ignore_at_inference",
    # heads we do not build, tokens the tokenizer knows, sampling (generation_config.json has it)
    "id2label", "label2id", "num_labels", "problem_type", "summary_type", "summary_use_proj",
    "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "pad_token_id",
    "sep_token_id", "unk_token_id", "decoder_start_token_id", "n_ctx", "max_length", "min_length",
    "do_sample", "temperature", "top_p", "top_k", "num_beams",
})  # fmt: skip

Bias = Literal["key", "always", "never"]


@dataclass(frozen=True, slots=True)
class Family:
    """One row: what a family fixes. ``"key"`` means that the config's own key decides."""

    head: str  # the architecture whose checkpoint holds a language-model head
    read: Callable[[Keys, Family], ModelConfig]
    qkv_bias: Bias = "never"
    output_bias: Bias = "never"
    mlp_bias: Bias = "never"
    qk_norm: bool = False
    window: Literal["never", "key", "gated"] = "never"  # gated: only with use_sliding_window
    rope_theta: float | None = None  # the family's value where a config may leave the key out
    tied: bool = False  # the same for tie_word_embeddings
    no_rope_interval: int | None = None  # the same for no_rope_layer_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the model's own metadata says about sampling; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A config.json's mapping to a ``ModelConfig``; ``ConfigError`` names the key at fault."""
    keys = Keys(raw)
    model_type = keys.text("model_type")
    if "auto_map" in raw:
        raise ConfigError(
            "auto_map asks for the checkpoint's own Python code, which is never run; "
            "use a checkpoint of a built-in family or convert it to one",
            param="auto_map",
        )
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"model_type {model_type!r} does not run here; one of {', '.join(FAMILIES)}",
            param="model_type",
        )
    heads = keys.take("architectures", default=None)
    if heads and not (isinstance(heads, list) and family.head in heads):
        raise ConfigError(
            f"architectures must hold {family.head}, got {heads!r:.80}", param="architectures"
        )
    keys.expect("is_encoder_decoder", False)
    keys.expect("add_cross_attention", False)
    config = family.read(keys, family)
    keys.refuse_rest(NO_EFFECT)
    return config


def read_generation(raw: Mapping[str, Any], config: ModelConfig) -> GenerationDefaults:
    """A generation_config.json's mapping; keys of sampling methods we lack are left alone.

    What ends an answer is what either file says: chat models name the end of a turn in this one.
    """
    keys = Keys(raw)
    eos = (*keys.ids("eos_token_id", config.vocab_size), *config.eos_token_ids)
    return GenerationDefaults(
        temperature=keys.number("temperature", default=None),
        top_p=keys.number("top_p", default=None),
        top_k=keys.integer("top_k", default=None, low=-1),
        min_p=keys.number("min_p", default=None),
        repetition_penalty=keys.number("repetition_penalty", default=None),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _read_llama(keys: Keys, family: Family) -> ModelConfig:
    vocab_size = keys.integer("vocab_size", high=2**24)
    num_layers = keys.integer("num_hidden_layers", high=4096)
    hidden_size = keys.integer("hidden_size", high=2**20)
    context = keys.integer("max_position_embeddings")
    num_heads, num_kv_heads, head_dim = read_heads(keys, hidden_size)
    keys.expect("hidden_act", "silu", required=True)
    keys.expect("rope_interleaved", False)
    qkv_bias = _bias(keys, "attention_bias", family.qkv_bias)
    window, full_attention_layers = _window(keys, family, num_layers)
    rope = read_rope(keys, head_dim, theta=family.rope_theta, context=context)
    return ModelConfig(
        model_type=keys.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size", high=2**22),
        max_position_embeddings=context,
        norm_eps=keys.number("rms_norm_eps"),
        activation="silu",
        rope_theta=rope.theta,
        rope_factors=rope.factors,
        rope_attention_factor=rope.attention_factor,
        no_rope_layers=_no_rope_layers(keys, family, num_layers),
        qk_norm=family.qk_norm,
        sliding_window=window,
        full_attention_layers=full_attention_layers,
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=family.tied),
        attention_bias=qkv_bias,
        attention_output_bias=qkv_bias if family.output_bias == "key" else False,
        mlp_bias=_bias(keys, "mlp_bias", family.mlp_bias),
        **read_tokens_and_dtype(keys, vocab_size),
    )


def _read_gpt2(keys: Keys, family: Family) -> ModelConfig:
    vocab_size = keys.integer("vocab_size", high=2**24)
    hidden_size = keys.integer("n_embd", high=2**20)
    num_heads = keys.integer("n_head", high=2**16)
    if hidden_size % num_heads:
        raise ConfigError(
            f"n_embd {hidden_size} is not a multiple of n_head {num_heads}", param="n_head"
        )
    keys.expect("activation_function", "gelu_new", "gelu_pytorch_tanh", required=True)
    keys.expect("scale_attn_weights", True)
    keys.expect("scale_attn_by_inverse_layer_idx", False)
    keys.expect("reorder_and_upcast_attn", False)
    return ModelConfig(
        model_type=keys.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=keys.integer("n_layer", high=4096),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=keys.integer("n_inner", default=4 * hidden_size, high=2**22),
        max_position_embeddings=keys.integer("n_positions"),
        norm_eps=keys.number("layer_norm_epsilon"),
        activation="gelu_new",
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=family.tied),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        **read_tokens_and_dtype(keys, vocab_size),
    )


def read_heads(keys: Keys, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, K/V heads and head_dim."""
    num_heads = keys.integer("num_attention_heads", high=2**16)
    num_kv_heads = keys.integer("num_key_value_heads", default=num_heads, high=2**16)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}",
            param="num_key_value_heads",
        )
    head_dim = keys.integer("head_dim", default=None, high=2**16)
    if head_dim is None:
        if hidden_size % num_heads:
            raise ConfigError(
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
                "and there is no head_dim",
                param="head_dim",
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd: rope turns pairs", param="head_dim")
    return num_heads, num_kv_heads, head_dim


def _bias(keys: Keys, name: str, rule: Bias) -> bool:
    if rule == "key":
        return keys.flag(name, default=False)
    keys.expect(name, rule == "always")
    return rule == "always"


def _window(keys: Keys, family: Family, num_layers: int) -> tuple[int | None, int]:
    """The window, and how many layers it does not bind; up to it every layer sees all keys."""
    kinds = keys.take("layer_types", default=None)
    known = ("full_attention", "sliding_attention")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == num_layers and all(k in known for k in kinds)
    ):
        raise ConfigError(
            f"layer_types must say full_attention or sliding_attention for each of {num_layers} "
            f"layers, got {kinds!r:.80}",
            param="layer_types",
        )
    window = keys.integer("sliding_window", default=None)
    gate = keys.flag("use_sliding_window", default=False)
    first = keys.integer("max_window_layers", default=0, low=0)
    if family.window == "never" and window is not None:
        raise ConfigError("sliding_window is not part of this family", param="sliding_window")
    full = min(first, num_layers) if kinds is None else kinds.count("full_attention")
    bound = window is not None and full < num_layers and (family.window == "key" or gate)
    return (window, full) if bound else (None, 0)


def _no_rope_layers(keys: Keys, family: Family, num_layers: int) -> tuple[int, ...]:
    """Layers that keep q and k as they are: the zeros of ``no_rope_layers``."""
    if family.no_rope_interval is None:
        return ()
    interval = keys.integer("no_rope_layer_interval", default=family.no_rope_interval)
    marks = keys.take("no_rope_layers", default=None)
    if marks is None:
        marks = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not (
        isinstance(marks, list) and len(marks) >= num_layers and all(m in (0, 1) for m in marks)
    ):
        raise ConfigError(
            f"no_rope_layers must hold a 0 or 1 for each of {num_layers} layers",
            param="no_rope_layers",
        )
    return tuple(layer for layer in range(num_layers) if not marks[layer])


def read_tokens_and_dtype(keys: Keys, vocab_size: int) -> dict[str, Any]:
    older = keys.text("torch_dtype", default="float32")
    dtype = keys.text("dtype", default=older)
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"torch_dtype {dtype!r} is unknown; one of {', '.join(DTYPE_BYTES)}", param="dtype"
        )
    bos = keys.ids("bos_token_id", vocab_size)
    return {
        "dtype": dtype,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": keys.ids("eos_token_id", vocab_size),
    }


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", _read_llama, qkv_bias="key", output_bias="key", mlp_bias="key",
        rope_theta=10000.0,
    ),
    "mistral": Family("MistralForCausalLM", _read_llama, window="key", rope_theta=10000.0),
    "qwen2": Family("Qwen2ForCausalLM", _read_llama, qkv_bias="always", window="gated"),
    "qwen3": Family(
        "Qwen3ForCausalLM", _read_llama, qkv_bias="key", output_bias="key", qk_norm=True,
        window="gated",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", _read_llama, qkv_bias="key", output_bias="key", mlp_bias="key",
        window="gated", tied=True, no_rope_interval=4,
    ),
    "gpt2": Family("GPT2LMHeadModel", _read_gpt2, tied=True),
}  # fmt: skip

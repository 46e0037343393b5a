"""A GGUF's metadata as the config.json it was converted from, then read by ``configs``.

One row an architecture. Keys under the architecture's own prefix are translated, checked or
refused by name; ``general``, ``tokenizer``, ``split`` and ``quantize`` change no computation.
What llama.cpp leaves out is in the tensors: biases, an untied head, the rope divisors of Llama 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stairs.checkpoints.configs import GenerationDefaults, read_config
from stairs.checkpoints.gguf import GGUF
from stairs.checkpoints.keys import Keys
from stairs.config import ModelConfig
from stairs.errors import CheckpointError, ConfigError

__all__ = ["read_gguf_config", "read_gguf_generation"]

_SHARED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_GPT2 = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# Prefixes of keys that say nothing about the computation.
_ELSEWHERE = ("general.", "tokenizer.", "split.", "quantize.")


@dataclass(frozen=True, slots=True)
class _Architecture:
    model_type: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any]


_SILU = {"hidden_act": "silu"}
_GELU = {"activation_function": "gelu_new"}
ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("llama", _SHARED, _SILU),
    "qwen2": _Architecture("qwen2", _SHARED, _SILU),
    "qwen3": _Architecture("qwen3", _SHARED, _SILU),
    "smollm3": _Architecture("smollm3", _SHARED, _SILU),  # llama.cpp fixes the interval of 4 too
    "gpt2": _Architecture("gpt2", _GPT2, _GELU),
}


def read_gguf_config(file: GGUF) -> ModelConfig:
    """The model's configuration; ``ConfigError`` names a key that is missing or not understood."""
    keys = Keys(file.metadata)
    keys.expect("general.type", "model")
    name = keys.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"general.architecture {name!r} does not run here; one of {', '.join(ARCHITECTURES)}",
            param="general.architecture",
        )
    row = ARCHITECTURES[name]
    raw: dict[str, Any] = {"model_type": row.model_type, **row.fixed}
    for key, hf_key in row.keys.items():
        value = keys.take(f"{name}.{key}", default=None)
        if value is not None:
            raw[hf_key] = value
    raw["vocab_size"] = _vocab_size(file, keys, name)
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    raw["attention_bias"], raw["mlp_bias"] = _biases(file, row.model_type)
    raw["bos_token_id"] = keys.take("tokenizer.ggml.bos_token_id", default=None)
    raw["eos_token_id"] = _eos_token_ids(keys)
    file_type = keys.integer("general.file_type", default=0, low=0)
    raw["dtype"] = {1: "float16", 32: "bfloat16"}.get(file_type, "float32")
    if row.keys is _SHARED:
        raw["rope_scaling"] = _rope_scaling(keys, name)
    try:
        config = read_config(raw)
    except ConfigError as error:
        raise _in_the_files_words(error, name) from None
    if row.keys is _SHARED:  # keys and values of one width, all of it turned by rope
        keys.expect(f"{name}.attention.value_length", config.head_dim)
        keys.expect(f"{name}.rope.dimension_count", config.head_dim)
    keys.expect(f"{name}.attention.causal", True)
    keys.refuse_rest(frozenset(key for key in file.metadata if key.startswith(_ELSEWHERE)))
    if "rope_freqs.weight" in file.tensors:
        config = dataclasses.replace(config, rope_factors=_rope_factors(file, config))
    return config


def read_gguf_generation(file: GGUF, config: ModelConfig) -> GenerationDefaults:
    """The ``general.sampling`` keys, where a file has them, and every token that ends a turn."""
    keys = Keys(file.metadata)
    return GenerationDefaults(
        temperature=keys.number("general.sampling.temp", default=None),
        top_p=keys.number("general.sampling.top_p", default=None),
        top_k=keys.integer("general.sampling.top_k", default=None, low=-1),
        min_p=keys.number("general.sampling.min_p", default=None),
        repetition_penalty=keys.number("general.sampling.penalty_repeat", default=None),
        eos_token_ids=config.eos_token_ids,
    )


def _in_the_files_words(error: ConfigError, name: str) -> ConfigError:
    """The same fault, led by the GGUF's own key where it has one."""
    theirs = {hf_key: f"{name}.{key}" for key, hf_key in ARCHITECTURES[name].keys.items()}
    theirs |= {"bos_token_id": "tokenizer.ggml.bos_token_id"}
    theirs |= {"eos_token_id": "tokenizer.ggml.eos_token_id"}
    key = theirs.get(error.param or "")
    return ConfigError(f"{key}: {error}", param=key) if key else error


def _vocab_size(file: GGUF, keys: Keys, name: str) -> int:
    """The rows of the embedding: some converters leave the key out or count without padding."""
    keys.take(f"{name}.vocab_size", default=None)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path.name} lacks the tensor 'token_embd.weight'")
    return embedding.shape[0]


def _biases(file: GGUF, model_type: str) -> tuple[bool | None, bool | None]:
    if model_type in ("gpt2", "qwen2"):  # fixed by the family
        return None, None
    return "blk.0.attn_q.bias" in file.tensors, "blk.0.ffn_up.bias" in file.tensors or None


def _eos_token_ids(keys: Keys) -> list[int]:
    """End of text, of turn and of message, each once, in that order."""
    names = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
    found = (keys.integer(name, default=None, low=0) for name in names)
    return list(dict.fromkeys(token for token in found if token is not None))


def _rope_scaling(keys: Keys, name: str) -> dict[str, Any] | None:
    prefix = f"{name}.rope.scaling."
    kind = keys.text(prefix + "type", default="none")
    factor = keys.number(prefix + "factor", default=None)
    original = keys.take(prefix + "original_context_length", default=None)
    attention = keys.number(prefix + "attn_factor", default=None)
    keys.take(prefix + "finetuned", default=None)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        if attention is not None and factor is not None and factor > 1:
            # llama.cpp multiplies its own ln-term by the stored factor
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return {key: value for key, value in scaling.items() if value is not None}


def _rope_factors(file: GGUF, config: ModelConfig) -> tuple[float, ...]:
    """Llama 3's divisors, which the converter computed and stored as a tensor."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type != "F32" or tensor.shape != (config.head_dim // 2,):
        raise CheckpointError(
            f"{file.path.name}: tensor 'rope_freqs.weight' must be F32 of {config.head_dim // 2}, "
            f"got {tensor.type} of {tensor.shape}"
        )
    factors = tuple(tensor.data.cast("f").tolist())
    if not all(0 < factor < math.inf for factor in factors):
        raise CheckpointError(f"{file.path.name}: tensor 'rope_freqs.weight' must be positive")
    return factors

"""Which tensors a model has: one row a tensor with its name here, its name in a GGUF, its shape.

Names are transformers' own, in one form a family: ``model.layers.3.self_attn.q_proj.weight`` and
``lm_head.weight``; for GPT-2 ``h.3.attn.c_attn.weight``, whose four linear weights a layer are
(in, out) as in its checkpoints, all others (out, in). A tied head has no tensor of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stairs.config import ModelConfig
from stairs.errors import CheckpointError

__all__ = ["TensorSpec", "check_names", "our_name", "tensor_specs"]

# Buffers that older programs saved beside the weights.
_NOT_WEIGHTS = re.compile(r".*(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. ``rotated_heads``: llama.cpp stores the rows of each of that many heads
    interleaved for its own rope; 0: as they are. ``transposed``: a GGUF has it the other way."""

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    rotated_heads: int = 0
    transposed: bool = False


def tensor_specs(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """Every tensor that this model's checkpoint must have, by name; it may have no other."""
    specs = _gpt2_specs(config) if config.model_type == "gpt2" else _llama_specs(config)
    return {spec.name: spec for spec in specs}


def check_names(found: Collection[str], expected: Collection[str], where: str) -> None:
    """Refuse a checkpoint that lacks a tensor or has one that nothing reads."""
    for problem, names in (
        ("lacks tensor", set(expected) - set(found)),
        ("has the unknown tensor", set(found) - set(expected)),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{where} {problem} {min(names)!r}{more}")


def our_name(stored: str, config: ModelConfig) -> str | None:
    """The name here of a tensor that safetensors hold; None for what is no weight of ours."""
    if _NOT_WEIGHTS.fullmatch(stored):
        return None
    if stored == "lm_head.weight" and config.tie_word_embeddings:
        return None
    if config.model_type == "gpt2":
        return stored.removeprefix("transformer.")
    bare = stored.startswith(("layers.", "embed_tokens.", "norm."))  # saved without its head
    return "model." + stored if bare else stored


# llama.cpp turns pairs of neighbours in these architectures, so its converter interleaves the rows
# of q and k; in the others it turns halves, as transformers does.
_ROTATED = frozenset({"llama", "smollm3"})  # a Mistral GGUF says llama


def _llama_specs(c: ModelConfig) -> list[TensorSpec]:
    width, inner = c.hidden_size, c.intermediate_size
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    rotated = c.model_type in _ROTATED
    specs = [
        TensorSpec("model.embed_tokens.weight", "token_embd.weight", (c.vocab_size, width)),
        TensorSpec("model.norm.weight", "output_norm.weight", (width,)),
    ]
    if not c.tie_word_embeddings:
        specs.append(TensorSpec("lm_head.weight", "output.weight", (c.vocab_size, width)))
    linears = (
        ("self_attn.q_proj", "attn_q", queries, width, c.attention_bias, c.num_heads * rotated),
        ("self_attn.k_proj", "attn_k", keys, width, c.attention_bias, c.num_kv_heads * rotated),
        ("self_attn.v_proj", "attn_v", keys, width, c.attention_bias, 0),
        ("self_attn.o_proj", "attn_output", width, queries, c.attention_output_bias, 0),
        ("mlp.gate_proj", "ffn_gate", inner, width, c.mlp_bias, 0),
        ("mlp.up_proj", "ffn_up", inner, width, c.mlp_bias, 0),
        ("mlp.down_proj", "ffn_down", width, inner, c.mlp_bias, 0),
    )
    norms = [
        ("input_layernorm", "attn_norm", width),
        ("post_attention_layernorm", "ffn_norm", width),
    ]
    if c.qk_norm:
        norms.append(("self_attn.q_norm", "attn_q_norm", c.head_dim))
        norms.append(("self_attn.k_norm", "attn_k_norm", c.head_dim))
    for layer in range(c.num_layers):
        here, there = f"model.layers.{layer}.", f"blk.{layer}."
        for name, gguf_name, rows, columns, bias, heads in linears:
            specs.append(
                TensorSpec(
                    f"{here}{name}.weight", f"{there}{gguf_name}.weight", (rows, columns), heads
                )
            )
            if bias:
                specs.append(
                    TensorSpec(f"{here}{name}.bias", f"{there}{gguf_name}.bias", (rows,), heads)
                )
        for name, gguf_name, size in norms:
            specs.append(TensorSpec(f"{here}{name}.weight", f"{there}{gguf_name}.weight", (size,)))
    return specs


def _gpt2_specs(c: ModelConfig) -> list[TensorSpec]:
    width, inner = c.hidden_size, c.intermediate_size
    specs = [
        TensorSpec("wte.weight", "token_embd.weight", (c.vocab_size, width)),
        TensorSpec("wpe.weight", "position_embd.weight", (c.max_position_embeddings, width)),
        TensorSpec("ln_f.weight", "output_norm.weight", (width,)),
        TensorSpec("ln_f.bias", "output_norm.bias", (width,)),
    ]
    if not c.tie_word_embeddings:
        specs.append(TensorSpec("lm_head.weight", "output.weight", (c.vocab_size, width)))
    linears = (
        ("attn.c_attn", "attn_qkv", width, 3 * width),
        ("attn.c_proj", "attn_output", width, width),
        ("mlp.c_fc", "ffn_up", width, inner),
        ("mlp.c_proj", "ffn_down", inner, width),
    )
    for layer in range(c.num_layers):
        here, there = f"h.{layer}.", f"blk.{layer}."
        for name, gguf_name, into, out in linears:
            specs.append(
                TensorSpec(
                    f"{here}{name}.weight",
                    f"{there}{gguf_name}.weight",
                    (into, out),
                    transposed=True,
                )
            )
            specs.append(TensorSpec(f"{here}{name}.bias", f"{there}{gguf_name}.bias", (out,)))
        for name, gguf_name in (("ln_1", "attn_norm"), ("ln_2", "ffn_norm")):
            for part in ("weight", "bias"):
                specs.append(
                    TensorSpec(f"{here}{name}.{part}", f"{there}{gguf_name}.{part}", (width,))
                )
    return specs

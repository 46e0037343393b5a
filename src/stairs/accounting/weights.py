"""How many parameters a model has, the bytes they take, and the bytes a step reads of them.

``HeldWeights`` is how they lie in a memory: dense, packed as in the file, or both;
``dense_weights`` of a config alone, ``checkpoints.residence`` of a file's own types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stairs.accounting import costs
from stairs.config import ModelConfig

__all__ = [
    "FEW_ROWS",
    "HeldPart",
    "HeldWeights",
    "dense_weights",
    "expected_experts",
    "parameter_count",
    "parameters",
    "stored_weight_bytes",
    "weight_bytes",
    "weight_bytes_read",
]

# A step of more rows reads the dense copy of a packed matrix, where there is one: with vectors of
# 256 bits two rows are as quick as BLAS from cache, from memory four.
FEW_ROWS = 4
_MATRICES = ("q", "k", "v", "latent", "o", "mlp", "experts")


def parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part, all layers. A tied head is the embedding and counts once."""
    c = config
    parts = costs.linear_macs(c) | {"head": 0 if c.tie_word_embeddings else costs.head_macs(c)}
    if c.mla is not None:
        wide = c.num_heads * (c.mla.nope_head_dim + c.mla.v_head_dim)
        parts["latent"] = c.num_layers * c.mla.kv_lora_rank * wide
    if c.moe is not None:  # every expert is stored, not only those a token visits
        parts["experts"] = parts["experts"] // c.moe.experts_per_token * c.moe.num_experts
    parts["embedding"] = c.vocab_size * c.hidden_size
    if c.rope_theta is None:
        parts["positions"] = c.max_position_embeddings * c.hidden_size
    return parts | {"norms": _norms(c), "biases": _biases(c)}


def parameter_count(config: ModelConfig) -> int:
    return sum(parameters(config).values())


def _norms(c: ModelConfig) -> int:
    """Scales; models with learned positions (GPT-2) use LayerNorm, which has a shift too."""
    values = (c.num_layers * c.norms_per_layer + 1) * c.hidden_size
    if c.qk_norm:
        values += c.num_layers * 2 * c.head_dim
    if c.mla is not None:
        values += c.num_layers * (c.mla.kv_lora_rank + (c.mla.q_lora_rank or 0))
    return 2 * values if c.rope_theta is None else values


def _biases(c: ModelConfig) -> int:
    values = 0
    if c.attention_bias:
        values += c.num_layers * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    if c.attention_output_bias:
        values += c.num_layers * c.hidden_size
    if c.attention_sinks:
        values += c.num_layers * c.num_heads
    up = 2 if c.gated_mlp else 1
    if c.mlp_bias:
        values += c.num_layers * (up * c.intermediate_size + c.hidden_size)
    if c.moe is not None:
        experts = costs.moe_layers(c) * c.moe.num_experts
        if c.moe.expert_bias:
            values += experts * (up * c.moe.expert_size + c.hidden_size)
        if c.moe.router_bias:
            values += experts
    return values


def weight_bytes(config: ModelConfig, itemsize: int) -> dict[str, int]:
    """Bytes by part. ``itemsize`` is that of what the checkpoint does not pack: fp8 packs every
    matrix but the embedding, router and head (1 byte, and an fp32 scale a 128 x 128 tile), mxfp4
    the experts (4 bits, and a scale byte every 32)."""
    parts = {part: count * itemsize for part, count in parameters(config).items()}
    counts = parameters(config)
    if config.weight_format == "fp8":
        tile = 128 * 128
        parts |= {p: counts[p] + counts[p] * 4 // tile for p in _MATRICES if p in counts}
    elif config.weight_format == "mxfp4":
        parts["experts"] = counts["experts"] // 2 + counts["experts"] // 32
    return parts


def stored_weight_bytes(config: ModelConfig, itemsize: int) -> int:
    return sum(weight_bytes(config, itemsize).values())


def expected_experts(config: ModelConfig, tokens: int) -> float:
    """Experts of a layer that ``tokens`` tokens visit, if routing is uniform and independent:
    E·(1 - (1 - k/E)^T)."""
    assert config.moe is not None
    num, each = config.moe.num_experts, config.moe.experts_per_token
    return float(num * (1 - (1 - each / num) ** tokens))


@dataclass(frozen=True, slots=True)
class HeldPart:
    """Bytes of one part: dense, packed as in the file, and a dense copy of what is packed."""

    dense: int = 0
    packed: int = 0
    copy: int = 0

    def __add__(self, other: HeldPart) -> HeldPart:
        return HeldPart(
            self.dense + other.dense, self.packed + other.packed, self.copy + other.copy
        )

    @property
    def total(self) -> int:
        return self.dense + self.packed + self.copy

    def read(self, rows: int) -> int:
        """Bytes that a product with ``rows`` rows reads, each matrix once."""
        return self.dense + (self.copy if self.copy and rows > FEW_ROWS else self.packed)


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A model's weights by part. ``form`` says in words how its matrices lie."""

    parts: Mapping[str, HeldPart]
    form: str

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts.values())

    def reads_packed(self, rows: int) -> bool:
        """Whether a product with ``rows`` rows makes most of its weights from packed values."""
        packed = sum(p.packed for p in self.parts.values() if not (p.copy and rows > FEW_ROWS))
        return 2 * packed > sum(part.read(rows) for part in self.parts.values())


def dense_weights(config: ModelConfig, itemsize: int, *, form: str = "dense") -> HeldWeights:
    """As ``weight_bytes`` has them: dense, or in the config's own format on a GPU."""
    parts = weight_bytes(config, itemsize)
    return HeldWeights({part: HeldPart(dense=size) for part, size in parts.items()}, form)


def weight_bytes_read(
    config: ModelConfig, weights: HeldWeights, *, tokens: int, logits_rows: int
) -> dict[str, int]:
    """Weights one step reads: each matrix once, experts as expected, the head for logits.

    The input embedding is a gather of a few rows, not a read; a tied head reads the same table.
    """
    held = dict(weights.parts)
    table = held.pop("embedding")
    held.pop("positions", None)
    head = held.pop("head", HeldPart())
    head = head if head.total else table
    parts = {part: found.read(tokens) if tokens else 0 for part, found in held.items()}
    if config.moe is not None:
        share = expected_experts(config, tokens) / config.moe.num_experts
        parts["experts"] = round(parts["experts"] * share)
    return parts | {"head": head.read(logits_rows) if logits_rows else 0}

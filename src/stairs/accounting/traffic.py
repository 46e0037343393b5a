"""Bytes that move between main memory and the compute units: predictions and bounds, never stored
bytes. What a kernel reads and writes is a list, so a different fusion is a different list.

A step's prediction counts each operand of each kernel once: *compulsory* traffic. Attention that
walks K/V once per query tile asks for more; how much of that reaches main memory depends on the
caches between, so it lies in [compulsory, tile form].
"""

from __future__ import annotations

from dataclasses import dataclass

from stairs.accounting import costs
from stairs.accounting.costs import Work
from stairs.accounting.weights import HeldWeights, weight_bytes_read
from stairs.config import ModelConfig

__all__ = [
    "EAGER_KERNELS",
    "MASKED_KERNELS",
    "STANDARD_KERNELS",
    "ScoreKernel",
    "ValueKernel",
    "activation_values",
    "compulsory_bytes",
    "kv_bytes_read",
    "layer_kernels",
    "materialised_bytes",
    "score_traffic",
    "step_moved_bytes",
    "tile_bytes",
    "tile_pairs",
]


@dataclass(frozen=True, slots=True)
class ScoreKernel:
    """A kernel that touches the n x n scores: elements read and written per score, and the
    bytes of each (0: the dtype of the model)."""

    name: str
    read: int
    written: int
    read_bytes: int = 0
    written_bytes: int = 0

    def bytes_per_score(self, itemsize: int) -> int:
        read = self.read * (self.read_bytes or itemsize)
        return read + self.written * (self.written_bytes or itemsize)


# FlashAttention (Dao et al. 2022), algorithm 0: write S, read S, write P, read P = 4·n²·b.
STANDARD_KERNELS = (
    ScoreKernel("QK^T", 0, 1),
    ScoreKernel("softmax", 1, 1),
    ScoreKernel("PV", 1, 0),
)
# The same with scale and mask as a kernel of their own: 6·n²·b.
MASKED_KERNELS = (
    STANDARD_KERNELS[0],
    ScoreKernel("scale and mask", 1, 1),
    *STANDARD_KERNELS[1:],
)
# transformers' eager path in 16 bit with a softmax in fp32: 24 bytes a score.
EAGER_KERNELS = (
    ScoreKernel("QK^T", 0, 1),
    ScoreKernel("scale", 1, 1),
    ScoreKernel("mask", 1, 1),
    ScoreKernel("softmax", 1, 1, written_bytes=4),
    ScoreKernel("cast", 1, 1, read_bytes=4),
    ScoreKernel("PV", 1, 0),
)


def score_traffic(kernels: tuple[ScoreKernel, ...], scores: int, itemsize: int) -> int:
    """Bytes that a kernel list moves for ``scores`` materialised scores."""
    return scores * sum(kernel.bytes_per_score(itemsize) for kernel in kernels)


# One head of one layer: new queries, context keys, head_dim d


def compulsory_bytes(new: int, context: int, head_dim: int, itemsize: int) -> int:
    """Q read, O written, K and V read once: 2·T·d·b + 2·C·d·b. No exact attention moves less."""
    return 2 * (new + context) * head_dim * itemsize


def materialised_bytes(
    new: int,
    context: int,
    head_dim: int,
    itemsize: int,
    *,
    kernels: tuple[ScoreKernel, ...] = STANDARD_KERNELS,
) -> int:
    """Standard attention: its operands once, and every trip of the T x C scores."""
    scores = score_traffic(kernels, new * context, itemsize)
    return scores + compulsory_bytes(new, context, head_dim, itemsize)


def tile_bytes(
    new: int, context: int, head_dim: int, itemsize: int, *, q_tile: int, causal: bool
) -> int:
    """FlashAttention's tile form: Q and O once, K and V once per query tile up to its last
    visible key. What tiles ask for, not what reaches main memory: caches serve part of it."""
    keys = 0
    for start in range(0, new, q_tile):
        end = min(start + q_tile, new)
        keys += context - new + end if causal else context
    return 2 * (new + keys) * head_dim * itemsize


def tile_pairs(new: int, context: int, *, q_tile: int, k_tile: int) -> int:
    """Pairs a causal tiled kernel multiplies, masked ones in edge tiles included:
    the sum over query tiles of Br·Bc·ceil(visible keys / Bc)."""
    pairs = 0
    for start in range(0, new, q_tile):
        visible = context - new + min(start + q_tile, new)
        pairs += q_tile * k_tile * -(-visible // k_tile)
    return pairs


# A step of a whole model


@dataclass(frozen=True, slots=True)
class ValueKernel:
    """A kernel between the matrices: activation values it reads and writes per token."""

    name: str
    read: int
    written: int


def layer_kernels(config: ModelConfig, *, intermediate_size: int) -> tuple[ValueKernel, ...]:
    """One layer, unfused: activations only (weights, K/V pool and scores are counted apart)."""
    hidden, ffn = config.hidden_size, intermediate_size
    kernels = [
        ValueKernel("norm", hidden, hidden),
        *_attention_kernels(config),
        ValueKernel("residual", 2 * hidden, hidden),
        ValueKernel("norm", hidden, hidden),
    ]
    if config.gated_mlp:
        kernels += [
            ValueKernel("gate and up", hidden, 2 * ffn),
            ValueKernel("activation", 2 * ffn, ffn),
        ]
    else:
        kernels += [ValueKernel("up", hidden, ffn), ValueKernel("activation", ffn, ffn)]
    return (
        *kernels,
        ValueKernel("down", ffn, hidden),
        ValueKernel("residual", 2 * hidden, hidden),
    )


def _attention_kernels(config: ModelConfig) -> list[ValueKernel]:
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    if config.mla is not None:  # absorbed: q and the output pass through the latent's width
        mla = config.mla
        latent, rope = config.num_heads * mla.kv_lora_rank, config.num_heads * mla.rope_head_dim
        out = config.num_heads * mla.v_head_dim
        stored = mla.kv_lora_rank + mla.rope_head_dim
        return [
            ValueKernel("q and latent", hidden, heads + stored),
            ValueKernel("rope", rope + mla.rope_head_dim, rope + mla.rope_head_dim),
            ValueKernel("absorb", heads - rope, latent),
            ValueKernel("attention", latent + rope + stored, latent),
            ValueKernel("expand", latent, out),
            ValueKernel("o", out, hidden),
        ]
    kv = config.num_kv_heads * config.head_dim
    rope = heads + kv if config.rope_theta is not None else 0
    return [
        ValueKernel("qkv", hidden, heads + 2 * kv),
        *([ValueKernel("rope", rope, rope)] if rope else []),
        ValueKernel("attention", heads + 2 * kv, heads),
        ValueKernel("o", heads, hidden),
    ]


def activation_values(config: ModelConfig) -> int:
    """Activation values one token moves in all layers; an expert counts for each token it takes."""

    def layer(ffn: int) -> int:
        kernels = layer_kernels(config, intermediate_size=ffn)
        return sum(kernel.read + kernel.written for kernel in kernels)

    routed = costs.moe_layers(config)
    total = (config.num_layers - routed) * layer(config.intermediate_size)
    if config.moe is not None:
        moe = config.moe
        visited = moe.experts_per_token * moe.expert_size + moe.shared_size
        total += routed * (layer(visited) + config.hidden_size + moe.num_experts)
    return total


def kv_bytes_read(config: ModelConfig, new: int, context: int, itemsize: int) -> int:
    """K/V a step reads of one sequence, each row once: all of it, or what a window shows."""
    if not new:
        return 0
    layer = costs.kv_values_per_token(config) * itemsize
    return sum(
        layers * layer * (context if window is None else min(context, window - 1 + new))
        for layers, window in costs.attention_groups(config)
    )


def step_moved_bytes(
    config: ModelConfig,
    work: Work,
    *,
    logits_rows: int,
    weights: HeldWeights,
    itemsize: int,
    kv_itemsize: int,
    score_kernels: tuple[ScoreKernel, ...] = (),
) -> dict[str, int]:
    """Predicted bytes of one step by part; ``itemsize`` is that of activations.

    weights, head: each matrix once, experts as expected; the embedding is gathered, not read.
    kv_read, kv_written: each sequence's K/V once. activations: ``layer_kernels``. scores: the
    trips of ``score_kernels``, none when attention is tiled. logits: written once.
    """
    tokens = sum(new for new, _ in work)
    scores = sum(costs.square_pairs(new, context) for new, context in work)
    scores *= config.num_heads * config.num_layers
    read = weight_bytes_read(config, weights, tokens=tokens, logits_rows=logits_rows)
    head = read.pop("head")
    return {
        "weights": sum(read.values()),
        "head": head,
        "kv_read": sum(kv_bytes_read(config, new, context, kv_itemsize) for new, context in work),
        "kv_written": tokens * costs.kv_bytes_per_token(config, kv_itemsize),
        "activations": tokens * activation_values(config) * itemsize,
        "scores": score_traffic(score_kernels, scores, itemsize),
        "logits": logits_rows * config.vocab_size * itemsize,
    }

"""What a model costs, in exact integers: pairs, multiply-adds, stored bytes; a formula each.

A *pair* is one (query token, key token) dot product in one head of one layer. MAC: one
multiply-add, 2 FLOP. ``new`` tokens are fed, ``context`` tokens are known once they are
(``context`` includes ``new``); ``work`` is a step's list of (new, context), one a sequence.
Matrix products only: norms, rope, softmax and activations are element operations, not here.
Bytes that move are in ``traffic``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from stairs.config import ModelConfig

__all__ = [
    "Convention",
    "LatentForm",
    "Work",
    "attention_groups",
    "attention_macs",
    "blocks_for",
    "causal_pairs",
    "decode_steps",
    "flops",
    "head_macs",
    "kv_bytes_per_token",
    "kv_fixed_and_growing",
    "kv_pool_bytes",
    "kv_sequence_bytes",
    "kv_values_per_token",
    "kv_waste_bytes",
    "largest_step",
    "linear_macs",
    "model_pairs",
    "moe_layers",
    "prefill_steps",
    "prefix_hit",
    "score_bytes",
    "square_pairs",
    "step_macs",
]

Work = Sequence[tuple[int, int]]
Convention = Literal["causal", "square"]
LatentForm = Literal["absorbed", "expanded"]  # MLA only: attend over latents, or over K and V


# Pairs


def causal_pairs(new: int, context: int, window: int | None = None) -> int:
    """Pairs of the last ``new`` queries of ``context`` tokens under a causal mask.

    C(C+1)/2 - (C-T)(C-T+1)/2. With a window W a query sees itself and the W - 1 before it:
    f(C) - f(C-T), f(n) = n(n+1)/2 up to W and W(W+1)/2 + (n-W)W beyond.
    """
    _check_step(new, context)
    return _triangle(context, window) - _triangle(context - new, window)


def square_pairs(new: int, context: int) -> int:
    """Pairs of the full rectangle, masked ones included: what counters of matmul shapes see."""
    _check_step(new, context)
    return new * context


def model_pairs(config: ModelConfig, new: int, context: int) -> int:
    """Causal pairs summed over every query head of every layer: what the kernels count."""
    return config.num_heads * sum(
        layers * causal_pairs(new, context, window) for layers, window in attention_groups(config)
    )


def largest_step(work: Work) -> int:
    """The largest rows x keys rectangle among one request's steps; 0 without any."""
    return max((square_pairs(new, context) for new, context in work), default=0)


def attention_groups(config: ModelConfig) -> tuple[tuple[int, int | None], ...]:
    """(layers, window) of each kind of layer; window None sees everything before it."""
    if config.sliding_window is None:
        return ((config.num_layers, None),)
    full = config.full_attention_layers
    groups = ((full, None), (config.num_layers - full, config.sliding_window))
    return tuple((layers, window) for layers, window in groups if layers)


# Steps of one request


def prefill_steps(
    prompt: int, *, chunk: int, cached: int = 0, chunks_per_step: int = 1
) -> list[tuple[int, int]]:
    """(new, context) of each step that feeds a prompt of which ``cached`` tokens are there.

    Chunks end at absolute multiples of ``chunk``, so after a hit inside one the first is short.
    """
    if not 0 <= cached < prompt:
        raise ValueError(f"cached {cached} must lie in [0, prompt {prompt})")
    if chunk < 1 or chunks_per_step < 1:
        raise ValueError(f"chunk {chunk} and chunks_per_step {chunks_per_step} must be positive")
    steps = []
    while cached < prompt:
        end = min(prompt, (cached // chunk + chunks_per_step) * chunk)
        steps.append((end - cached, end))
        cached = end
    return steps


def decode_steps(prompt: int, answer: int) -> list[tuple[int, int]]:
    """(1, context) of each step after the prefill, which gave the first of ``answer`` tokens.

    The last token is never fed, so an answer of N tokens takes N - 1 one-row steps.
    """
    return [(1, prompt + i) for i in range(1, answer)]


def prefix_hit(shared: int, prompt: int, *, block_size: int) -> int:
    """Tokens of a prompt that a prefix of ``shared`` equal tokens saves: full blocks only, and
    at least one token is recomputed, because its logits are needed."""
    return min(shared, prompt - 1) // block_size * block_size


# Multiply-adds


def linear_macs(config: ModelConfig) -> dict[str, int]:
    """MACs of one token in the linear layers by part, all layers, without the head.

    q: D·H·d, k and v: D·K·d each, o: H·d·D, mlp: 3·D·F gated and 2·D·F plain. MoE: experts
    k·3·D·F_e, the shared one in mlp, router D·E. MLA: q and k by way of their latents; the
    latent's expansion to K and V is in ``attention_macs``, because its count depends on the form.
    """
    parts = {part: config.num_layers * macs for part, macs in _projection_macs(config).items()}
    matrices = (3 if config.gated_mlp else 2) * config.hidden_size
    if config.moe is None:
        return parts | {"mlp": config.num_layers * matrices * config.intermediate_size}
    moe = config.moe
    layers = moe_layers(config)
    dense = moe.num_dense_layers * config.intermediate_size + layers * moe.shared_size
    return parts | {
        "mlp": matrices * dense,
        "router": layers * config.hidden_size * moe.num_experts,
        "experts": layers * moe.experts_per_token * matrices * moe.expert_size,
    }


def _projection_macs(config: ModelConfig) -> dict[str, int]:
    """MACs of one token in one layer's q, k, v and o."""
    c = config
    if c.mla is None:
        kv = c.hidden_size * c.num_kv_heads * c.head_dim
        heads = c.hidden_size * c.num_heads * c.head_dim
        return {"q": heads, "k": kv, "v": kv, "o": heads}
    width = c.num_heads * c.head_dim
    rank = c.mla.q_lora_rank
    return {
        "q": c.hidden_size * width if rank is None else rank * (c.hidden_size + width),
        "k": c.hidden_size * (c.mla.kv_lora_rank + c.mla.rope_head_dim),
        "v": 0,
        "o": c.num_heads * c.mla.v_head_dim * c.hidden_size,
    }


def moe_layers(config: ModelConfig) -> int:
    """Layers that route to experts."""
    return 0 if config.moe is None else config.num_layers - config.moe.num_dense_layers


def head_macs(config: ModelConfig) -> int:
    """MACs of one row of logits: D·V. A server needs one row a sequence, not one a token."""
    return config.hidden_size * config.vocab_size


def attention_macs(
    config: ModelConfig,
    new: int,
    context: int,
    *,
    convention: Convention = "causal",
    form: LatentForm = "absorbed",
) -> dict[str, int]:
    """MACs of QK^T and PV of one sequence, all heads and layers: H·d·pairs each.

    ``square`` counts masked pairs too, as torch's FlopCounterMode does; a kernel that skips
    masked tiles lies between the two. MLA adds the latent's expansion: once a context token when
    K and V are rebuilt, once a new token when it is absorbed into q and the output, where a pair
    then costs kv_lora_rank + rope for QK^T and kv_lora_rank for PV.
    """
    if convention == "causal":
        pairs = model_pairs(config, new, context)
    else:
        pairs = config.num_layers * config.num_heads * square_pairs(new, context)
    mla = config.mla
    if mla is None:
        return {"qk": config.head_dim * pairs, "pv": config.head_dim * pairs}
    expansion = mla.kv_lora_rank * config.num_heads * (mla.nope_head_dim + mla.v_head_dim)
    if form == "absorbed":
        qk, pv, rows = mla.kv_lora_rank + mla.rope_head_dim, mla.kv_lora_rank, new
    else:
        qk, pv, rows = config.head_dim, mla.v_head_dim, context
    return {"qk": qk * pairs, "pv": pv * pairs, "latent": config.num_layers * rows * expansion}


def step_macs(
    config: ModelConfig,
    work: Work,
    *,
    logits_rows: int,
    convention: Convention = "causal",
    form: LatentForm = "absorbed",
) -> dict[str, int]:
    """MACs of one step by part: those of ``linear_macs`` and ``attention_macs``, and head."""
    tokens = sum(new for new, _ in work)
    total = {part: tokens * macs for part, macs in linear_macs(config).items()}
    for new, context in work:
        macs = attention_macs(config, new, context, convention=convention, form=form)
        for part, count in macs.items():
            total[part] = total.get(part, 0) + count
    total["head"] = logits_rows * head_macs(config)
    return total


def flops(macs: dict[str, int]) -> int:
    """FLOP of a breakdown in MACs: a multiply and an add each."""
    return 2 * sum(macs.values())


# Stored bytes


def kv_values_per_token(config: ModelConfig) -> int:
    """Values one token leaves in one layer: K and V, 2·K·d; MLA its latent and one rope key,
    no factor 2. Q is never stored."""
    if config.mla is not None:
        return config.mla.kv_lora_rank + config.mla.rope_head_dim
    return 2 * config.num_kv_heads * config.head_dim


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """K/V bytes of one token in all layers: 2·L·K·d·b, while no window has passed it."""
    return config.num_layers * kv_values_per_token(config) * itemsize


def kv_fixed_and_growing(config: ModelConfig, itemsize: int) -> tuple[int, int]:
    """(bytes a request holds once it is past every window, bytes each further token adds).

    A model with windows has these two numbers; one "bytes a token" for it means nothing.
    """
    layer = kv_values_per_token(config) * itemsize
    groups = attention_groups(config)
    fixed = sum(layers * window * layer for layers, window in groups if window is not None)
    return fixed, sum(layers * layer for layers, window in groups if window is None)


def kv_sequence_bytes(
    config: ModelConfig, tokens: int, itemsize: int, *, block_size: int = 1
) -> int:
    """K/V bytes one sequence of ``tokens`` holds, in whole blocks; a windowed layer keeps the
    last W tokens only."""
    layer = kv_values_per_token(config) * itemsize
    return sum(
        layers * layer * block_size * blocks_for(min(tokens, window or tokens), block_size)
        for layers, window in attention_groups(config)
    )


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens``: the last one may be part empty."""
    return -(-tokens // block_size)


def kv_pool_bytes(
    config: ModelConfig, sequences: Iterable[int], itemsize: int, *, block_size: int
) -> int:
    """K/V bytes that sequences of these lengths hold together, sharing nothing."""
    return sum(
        kv_sequence_bytes(config, tokens, itemsize, block_size=block_size) for tokens in sequences
    )


def kv_waste_bytes(config: ModelConfig, tokens: int, itemsize: int, *, block_size: int) -> int:
    """Bytes of a sequence's last blocks that hold no token: at most block_size - 1 tokens."""
    held = kv_sequence_bytes(config, tokens, itemsize, block_size=block_size)
    return held - kv_sequence_bytes(config, tokens, itemsize)


def score_bytes(rows: int, keys: int, itemsize: int, *, heads: int = 1) -> int:
    """Bytes of a materialised score matrix: rows·keys·b a head. Tiled attention holds none."""
    return rows * keys * heads * itemsize


def _triangle(n: int, window: int | None) -> int:
    if window is None or n <= window:
        return n * (n + 1) // 2
    return window * (window + 1) // 2 + (n - window) * window


def _check_step(new: int, context: int) -> None:
    if not 0 <= new <= context:
        raise ValueError(f"new {new} must lie in [0, context {context}]")

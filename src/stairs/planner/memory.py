"""Who takes a device's memory, and how many users fit in what is left for K/V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stairs.accounting import costs
from stairs.accounting.hardware import Device, has_wide_vectors
from stairs.accounting.table import Quantity, show
from stairs.accounting.weights import HeldWeights, dense_weights
from stairs.attention.tiles import Card
from stairs.attention.workspace import engine_tiles, workspace_bytes
from stairs.checkpoints.configs import FAMILIES
from stairs.checkpoints.residence import held_weights, plain_types
from stairs.config import DTYPE_BYTES, EngineConfig, ModelConfig
from stairs.engine.resolve import (
    CPU_POOL_FRACTION,
    available_memory,
    cpu_pool_budget,
    dense_weights_budget,
    residence_of,
)

__all__ = [
    "Memory",
    "activation_peak",
    "most_partial_bytes",
    "peak_bytes",
    "plan_memory",
    "plan_weights",
    "users_that_fit",
]

# CUDA context, libraries, their workspaces, captured graphs; an engine measures its own at start.
GPU_OVERHEAD_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device; ``pool`` is what K/V may take, negative if the rest is too much."""

    total: Quantity
    usable: Quantity
    weights: Quantity
    activations: Quantity
    workspace: Quantity
    pool: Quantity

    @property
    def pool_bytes(self) -> int:
        return int(self.pool.value or 0)


def plan_weights(
    config: ModelConfig, types: Mapping[str, str] | None, *, device: Device, dtype: str
) -> HeldWeights:
    """The weights as an engine on ``device`` will hold them; dense for a family that none runs.

    ``types``: of the file's matrices; None: a checkpoint in the config's own dtype.
    """
    if config.model_type not in FAMILIES or not device.is_cpu:
        form = config.weight_format or dtype
        return dense_weights(config, DTYPE_BYTES[dtype], form=f"parameters of the config, {form}")
    budget = dense_weights_budget(available_memory())
    engine = EngineConfig(device="cpu", dtype=dtype, dense_weights_memory_bytes=budget)
    residence = residence_of(config, engine, wide_vectors=has_wide_vectors())
    return held_weights(config, types or plain_types(config), residence)


def activation_peak(
    config: ModelConfig, *, tokens: int, logits_rows: int, itemsize: int
) -> dict[str, int]:
    """Largest activations held at once in a step of ``tokens``, by what holds them.

    residual T·D·b, beside the widest of: q, k, v, attention's output and its copy
    T·(2H + 2K)·d·b; the MLP's T·3·F·b (2 plain); logits n·V·(b + 4) with their fp32 copy.
    """
    c = config
    width = c.intermediate_size
    if c.moe is not None:
        routed = c.moe.experts_per_token * c.moe.expert_size + c.moe.shared_size
        width = max(routed, width if c.moe.num_dense_layers else 0)
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return {
        "residual": tokens * c.hidden_size * itemsize,
        "attention": tokens * heads * itemsize,
        "mlp": tokens * (3 if c.gated_mlp else 2) * width * itemsize,
        "logits": logits_rows * c.vocab_size * (itemsize + 4),
    }


def peak_bytes(parts: dict[str, int]) -> int:
    """The residual stays; the others take turns."""
    return parts["residual"] + max(parts["attention"], parts["mlp"], parts["logits"])


def most_partial_bytes(
    config: ModelConfig, device: Device, *, itemsize: int, num_tokens: int, num_seqs: int
) -> int:
    """What attention's partial results take at most in a step on a card, with the kernels that
    an engine has for it."""
    assert device.capability is not None
    card = Card(device.capability, int(device.tile_memory.value), device.units)
    group = config.num_heads // config.num_kv_heads
    return workspace_bytes(
        engine_tiles(config.head_dim, group, itemsize=itemsize, card=card),
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        num_heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_sms=device.units,
    )


def plan_memory(
    config: ModelConfig,
    device: Device,
    *,
    weights: HeldWeights,
    dtype: str,
    step_tokens: int,
    max_num_seqs: int,
    utilization: float,
    most_kv: int,
    devices: int = 1,
) -> Memory:
    """On a GPU the pool is what is left; on a CPU the engine's own share of what is free.

    ``most_kv``: K/V of all sequences at full length, which a CPU's pool never exceeds. All figures
    are sums over ``devices`` that split the weights and each keep their own rest.
    """
    itemsize = DTYPE_BYTES[dtype]
    held = Quantity(weights.total, "B", "stored bytes", "exact", weights.form)
    peak = activation_peak(config, tokens=step_tokens, logits_rows=max_num_seqs, itemsize=itemsize)
    activations = Quantity(
        peak_bytes(peak), "B", "stored bytes", "estimate",
        f"a step of {step_tokens} tokens and {max_num_seqs} rows of logits",
    )  # fmt: skip
    if device.is_cpu:
        free = available_memory()
        total = Quantity(free, "B", "stored bytes", "measured", "free on this machine now")
        workspace = Quantity(0, "B", "stored bytes", "estimate", "none kept on a CPU")
        pool = Quantity(
            min(cpu_pool_budget(free), most_kv, _left(free, held, activations, workspace)),
            "B", "stored bytes", "exact",
            f"at most {CPU_POOL_FRACTION:g} of what is free, or all sequences whole",
        )  # fmt: skip
        return Memory(total, total, held, activations, workspace, pool)
    assert device.memory is not None
    total = replace(device.memory, value=device.memory.value * devices).quantity(
        "B", "stored bytes"
    )
    usable = Quantity(
        int(device.memory.value * devices * utilization), "B", "stored bytes", total.kind,
        f"gpu_memory_utilization {utilization:g}",
    )  # fmt: skip
    activations = replace(activations, value=int(activations.value or 0) * devices)
    partials = devices * most_partial_bytes(
        config, device, itemsize=itemsize, num_tokens=step_tokens, num_seqs=max_num_seqs
    )
    workspace = Quantity(
        GPU_OVERHEAD_BYTES * devices + partials, "B", "stored bytes", "estimate",
        f"context, libraries, graphs: {show(GPU_OVERHEAD_BYTES * devices, 'B')} assumed, measured "
        f"at an engine's start; attention's partial results: at most {show(partials, 'B')}",
    )  # fmt: skip
    pool = Quantity(
        _left(int(usable.value or 0), held, activations, workspace),
        "B", "stored bytes", "estimate", "usable - weights - activations - workspace",
    )  # fmt: skip
    return Memory(total, usable, held, activations, workspace, pool)


def _left(usable: int, *taken: Quantity) -> int:
    return usable - sum(int(quantity.value or 0) for quantity in taken)


def users_that_fit(
    config: ModelConfig,
    pool_bytes: int,
    *,
    context: int,
    kv_itemsize: int,
    block_size: int,
    shared: int = 0,
) -> int:
    """Users of ``context`` tokens each that the pool holds, when their first ``shared`` tokens
    are the same: its full blocks are stored once. A windowed layer soon drops a prefix, so
    nothing of it is shared there."""
    each = costs.kv_sequence_bytes(config, context, kv_itemsize, block_size=block_size)
    _, growing = costs.kv_fixed_and_growing(config, kv_itemsize)
    once = costs.prefix_hit(shared, context, block_size=block_size) * growing
    block = costs.kv_values_per_token(config) * kv_itemsize * block_size * config.num_layers
    whole = pool_bytes // block * block
    if once > whole:
        return 0
    return (whole - once) // (each - once)

"""Tables of single figures: a plan's memory, a running engine's, and a device's two memories."""

from __future__ import annotations

from stairs.accounting import costs
from stairs.accounting.hardware import Device
from stairs.accounting.table import Quantity, Table, card
from stairs.accounting.weights import HeldWeights, parameter_count
from stairs.config import DTYPE_BYTES, EngineConfig, ModelConfig
from stairs.planner.memory import activation_peak, peak_bytes, users_that_fit
from stairs.planner.phases import Setting
from stairs.planner.plan import Plan
from stairs.planner.targets import devices_needed
from stairs.planner.techniques import Q_TILE

__all__ = ["memory_table", "startup_table", "tile_memory", "two_memories"]


def memory_table(plan: Plan) -> Table:
    """What takes a device's memory, and how many users fit in what is left."""
    answer, setting = plan.answer, plan.answer.setting
    memory, config = answer.memory, plan.config
    rows = [
        (setting.device.title, memory.total),
        ("usable", memory.usable),
        ("weights", memory.weights),
        ("activations", memory.activations),
        ("workspace", memory.workspace),
        ("K/V pool", memory.pool),
        *_kv_rows(config, setting.context, setting.kv_itemsize, setting.block_size),
    ]
    users = plan.options.users
    if users is not None:
        together = _bytes(users * setting.kv_bytes(setting.context), f"{users} sequences apart")
        rows.append((f"K/V of {users} users", together))
    fitting = _user_rows(answer.users_apart, setting.context, setting.block_size)
    if setting.shared:
        shared = costs.prefix_hit(setting.shared, setting.context, block_size=setting.block_size)
        source = f"the system prompt's {shared} tokens in whole blocks stored once"
        sharing = Quantity(answer.users, kind="estimate", source=source)
        fitting.insert(1, ("users that share it", sharing))
    rows += fitting
    title = f"{plan.name}, {parameter_count(config):,} parameters ({plan.origin})"
    title += f"\nMemory, {setting.dtype} on {setting.device.name}"
    return card(title, rows, _notes(plan))


def _bytes(value: int, source: str) -> Quantity:
    return Quantity(value, "B", "stored bytes", "exact", source)


def startup_table(
    config: ModelConfig, engine: EngineConfig, *, name: str, weights: HeldWeights
) -> Table:
    """What a running engine holds, from its resolved configuration: its start-up card."""
    cache, context = engine.cache, engine.max_model_len
    assert cache.num_blocks is not None and context is not None
    itemsize = DTYPE_BYTES[engine.dtype]
    tokens = engine.max_num_batched_tokens + engine.max_num_seqs
    parts = activation_peak(
        config, tokens=tokens, logits_rows=engine.max_num_seqs, itemsize=itemsize
    )
    kv_itemsize = DTYPE_BYTES[cache.dtype]
    block = cache.block_size * costs.kv_bytes_per_token(config, kv_itemsize)
    pool = cache.num_blocks * block
    users = users_that_fit(
        config,
        pool,
        context=context,
        kv_itemsize=kv_itemsize,
        block_size=cache.block_size,
    )
    rows = [
        ("weights", _bytes(weights.total, weights.form)),
        (
            "activations",
            Quantity(
                peak_bytes(parts),
                "B",
                "stored bytes",
                "estimate",
                f"a step of {tokens} tokens and {engine.max_num_seqs} rows of logits",
            ),
        ),
        ("K/V pool", _bytes(pool, f"{cache.num_blocks} blocks of {block} B")),
        *_kv_rows(config, context, kv_itemsize, cache.block_size),
        *_user_rows(users, context, cache.block_size),
    ]
    return card(f"{name}, {parameter_count(config):,} parameters, at start", rows)


def _user_rows(users: int, context: int, block_size: int) -> list[tuple[str, Quantity]]:
    apart = f"of {context} tokens each, sharing nothing"
    return [
        ("users that fit", Quantity(users, kind="estimate", source=apart)),
        (
            "smallest prefix that hits",
            Quantity(block_size, source="tokens: one block; only whole blocks are shared"),
        ),
    ]


def _kv_rows(
    config: ModelConfig, context: int, itemsize: int, block_size: int
) -> list[tuple[str, Quantity]]:
    fixed, growing = costs.kv_fixed_and_growing(config, itemsize)
    layer = costs.kv_values_per_token(config)
    if config.mla is not None:
        formula = f"{config.num_layers} layers x {layer} latent and rope values x {itemsize} B"
    else:
        formula = (
            f"2 x {config.num_layers} layers x {config.num_kv_heads} kv heads x "
            f"{config.head_dim} x {itemsize} B"
        )
    rows = [("K/V of a token", _bytes(costs.kv_bytes_per_token(config, itemsize), formula))]
    if fixed:
        window = f"once past the window of {config.sliding_window}"
        rows = [
            ("K/V fixed, a request", _bytes(fixed, f"windowed layers, {window}")),
            ("K/V growing, a token", _bytes(growing, "layers that see everything")),
        ]
    whole = costs.kv_sequence_bytes(config, context, itemsize, block_size=block_size)
    waste = costs.kv_waste_bytes(config, context, itemsize, block_size=block_size)
    sequence = f"{context} tokens in blocks of {block_size}, {waste} B of it empty"
    return [*rows, ("K/V of a sequence", _bytes(whole, sequence))]


def _notes(plan: Plan) -> list[str]:
    answer, device = plan.answer, plan.answer.setting.device
    notes = []
    if plan.options.gpu == "auto":
        notes.append(
            f"--gpu auto took the {device.name}: the card in this machine, or where none is "
            "known the one we measured."
        )
    if answer.users < 1 and device.is_cpu:
        notes.append("It does not fit: not one user's K/V is left in the pool.")
    elif answer.users < 1:
        needed = devices_needed(plan.config, plan.options)
        advice = f"it takes {needed} of them" if needed else "nor on 64 of them"
        notes.append(f"It does not fit: not one user fits on this card; {advice}, split evenly.")
    return notes


def tile_memory(head_dim: int, itemsize: int, *, q_tile: int, k_tile: int, stages: int) -> int:
    """On-chip bytes of one tile set: Q once, K and V in each pipeline stage."""
    return (q_tile + 2 * stages * k_tile) * head_dim * itemsize


def two_memories(setting: Setting) -> Table:
    device: Device = setting.device
    bandwidth, chip = device.reachable_bandwidth(), device.on_chip_bandwidth
    width, size = setting.config.head_dim, setting.itemsize
    rows = [
        ("memory size", _memory_size(device)),
        ("memory bandwidth", device.bandwidth.quantity("B/s", "moved bytes")),
        ("memory bandwidth, reachable", bandwidth.quantity("B/s", "moved bytes")),
        ("last cache", device.cache.quantity("B", "stored bytes")),
        ("on-chip size", device.on_chip.quantity("B", "stored bytes")),
        ("on-chip bandwidth", chip.quantity("B/s", "moved bytes")),
        (
            "on-chip over memory",
            Quantity(chip.value / bandwidth.value, "", "count", "estimate", "bandwidths"),
        ),
        ("tiles may take", device.tile_memory.quantity("B", "stored bytes")),
    ]
    for k_tile, stages in ((128, 2), (128, 1), (64, 1)):
        needed = tile_memory(width, size, q_tile=Q_TILE, k_tile=k_tile, stages=stages)
        fits = "fits" if needed <= device.tile_memory.value else "does not fit"
        name = f"tiles {Q_TILE} x {k_tile}, {stages} stage{'s' if stages > 1 else ''}"
        source = f"(Br + 2·stages·Bc)·d·b at d {width}, b {size}: {fits}"
        rows.append((name, Quantity(needed, "B", "stored bytes", "exact", source)))
    return card(f"The two memories of {device.title}", rows)


def _memory_size(device: Device) -> Quantity:
    if device.memory is None:
        return Quantity(None, "B", "stored bytes", "measured", "this machine's, see Memory")
    return device.memory.quantity("B", "stored bytes")

"""What each technique changes for one model, axis by axis: FLOPs, stored bytes, moved bytes.

Each row compares the same work without and with the technique; equal numbers are shown, because
that a technique leaves an axis alone is half of what there is to know about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stairs.accounting import costs, traffic
from stairs.accounting.table import Axis, Kind, Quantity, Unit
from stairs.planner.phases import Setting, chunk_steps
from stairs.planner.timing import KV_DTYPE_BYTES, StepCost, step_cost

__all__ = ["Effect", "techniques"]

# DeepSeek-V3's widths, for a model that has no latent of its own.
MLA_RANK, MLA_ROPE = 512, 64
Q_TILE = 128


@dataclass(frozen=True, slots=True)
class Effect:
    """One technique on one axis."""

    technique: str
    what: str
    before: Quantity
    after: Quantity

    @property
    def factor(self) -> float | None:
        """After over before; None where nothing became something."""
        return self.after.value / self.before.value if self.before.value else None  # type: ignore


def techniques(setting: Setting) -> list[Effect]:
    parts: tuple[Callable[[Setting], list[Effect]], ...] = (
        _kv_cache,
        _chunked_prefill,
        _flash_attention,
        _grouped_heads,
        _absorbed,
        _prefix,
        _paging,
        _eight_bit,
    )
    return [effect for part in parts for effect in part(setting)]


def _effect(
    technique: str,
    axis: Axis,
    what: str,
    before: int,
    after: int,
    *,
    kind: Kind = "exact",
    unit: Unit = "B",
) -> Effect:
    unit = "FLOP" if axis == "FLOPs" else unit
    return Effect(
        technique, what, Quantity(before, unit, axis, kind), Quantity(after, unit, axis, kind)
    )


def _kv_cache(s: Setting) -> list[Effect]:
    name = "KV cache"
    without = s.step([(s.context, s.context)], logits_rows=1)
    cached = s.step([(1, s.context)], logits_rows=1)
    what = f"token {s.context}"
    return [
        _effect(name, "FLOPs", what, without.flop, cached.flop),
        _effect(name, "stored bytes", "a sequence", 0, s.kv_bytes(s.context)),
        _effect(name, "moved bytes", what, without.moved, cached.moved, kind="predicted"),
    ]


def _chunked_prefill(s: Setting) -> list[Effect]:
    name = f"prefill in steps of {s.budget}"
    steps = chunk_steps(s, s.context)
    whole = s.step([(s.context, s.context)], logits_rows=1)
    chunks = [s.step([step], logits_rows=int(step is steps[-1])) for step in steps]
    rows = max(new for new, _ in steps)
    what = f"a prompt of {s.context}"
    return [
        _effect(name, "FLOPs", what, whole.flop, sum(c.flop for c in chunks)),
        _effect(
            name, "stored bytes", "activations at once", s.activations(s.context, 1),
            s.activations(rows, 1), kind="estimate",
        ),
        _effect(
            name, "moved bytes", what, whole.moved, sum(c.moved for c in chunks), kind="predicted"
        ),
        _effect(
            name, "count", "largest step, rows x keys", s.context * s.context,
            costs.largest_step(steps), unit="",
        ),
    ]  # fmt: skip


def _flash_attention(s: Setting) -> list[Effect]:
    name = "FlashAttention"
    n, heads = s.context, s.config.num_heads
    macs = costs.flops(costs.attention_macs(s.config, n, n, convention="square"))
    width = s.config.head_dim
    layers = heads * s.config.num_layers
    scores = costs.score_bytes(n, n, s.itemsize, heads=heads)
    standard = traffic.materialised_bytes(n, n, width, s.itemsize)
    tiled = traffic.tile_bytes(n, n, width, s.itemsize, q_tile=Q_TILE, causal=True)
    what = f"attention, prefill of {n}"
    return [
        _effect(name, "FLOPs", f"{what}, no tile skipped", macs, macs),
        _effect(name, "stored bytes", "scores of a layer", scores, 0),
        _effect(name, "moved bytes", what, layers * standard, layers * tiled, kind="bound"),
    ]  # fmt: skip


def _grouped_heads(s: Setting) -> list[Effect]:
    """From one K/V head a query head to what the model has, and on to MQA and MLA."""
    c = s.config
    wide = 2 * c.head_dim if c.mla is None else c.head_dim + c.mla.v_head_dim
    variants = {"MHA to MQA": wide}
    if 1 < c.group_size < c.num_heads:
        variants = {f"MHA to GQA of {c.num_kv_heads} heads": c.num_kv_heads * wide} | variants
    effects = []
    for name, values in variants.items():
        effects += _stored_and_read(s, name, c.num_heads * wide, values)
        per_token = 2 * c.hidden_size * c.num_layers  # a MAC for each input of each value
        effects.append(
            _effect(
                name,
                "FLOPs",
                "K and V of a token",
                per_token * c.num_heads * wide,
                per_token * values,
            )
        )
    rank = MLA_RANK if c.mla is None else c.mla.kv_lora_rank
    rope = MLA_ROPE if c.mla is None else c.mla.rope_head_dim
    name = f"MHA to MLA of {rank} + {rope}"
    pairs = costs.model_pairs(c, 1, s.context)
    return [
        *effects,
        *_stored_and_read(s, name, c.num_heads * wide, rank + rope),
        _effect(
            name,
            "FLOPs",
            "attention of a decode, absorbed",
            2 * pairs * wide,
            2 * pairs * (rank + rope + rank),
        ),
    ]


def _absorbed(s: Setting) -> list[Effect]:
    """The two ways to attend over a latent: rebuild K and V, or fold that into q and the output."""
    c = s.config
    if c.mla is None:
        return []
    name = "MLA expanded to absorbed"

    def flop(new: int, form: costs.LatentForm) -> int:
        return costs.flops(costs.attention_macs(c, new, s.context, form=form))

    wide = c.num_heads * (c.head_dim + c.mla.v_head_dim)
    effects = [
        _effect(name, "FLOPs", what, flop(new, "expanded"), flop(new, "absorbed"))
        for what, new in (("attention of a decode", 1), ("attention of a prefill", s.context))
    ]
    return effects + _stored_and_read(s, name, wide, costs.kv_values_per_token(c))


def _stored_and_read(s: Setting, name: str, before: int, after: int) -> list[Effect]:
    """K/V of a sequence whose layers keep these many values a token."""
    layers = s.context * s.kv_itemsize * s.config.num_layers
    return [
        _effect(name, "stored bytes", "a sequence, no window", before * layers, after * layers),
        _effect(
            name, "moved bytes", "K/V of a decode", before * layers, after * layers,
            kind="predicted",
        ),
    ]  # fmt: skip


def _prefix(s: Setting) -> list[Effect]:
    """The system prompt's length if one is given, else a quarter of the context."""
    shared = costs.prefix_hit(s.shared or s.context // 4, s.context, block_size=s.block_size)
    if not shared:
        return []
    name = f"shared prefix of {shared}"
    cold = [s.step([x], logits_rows=0) for x in chunk_steps(s, s.context)]
    warm = [s.step([x], logits_rows=0) for x in chunk_steps(s, s.context, cached=shared)]
    _, growing = costs.kv_fixed_and_growing(s.config, s.kv_itemsize)
    users = max(s.batch, 2)
    apart = users * s.kv_bytes(s.context)
    what = f"prefill of {s.context}"
    return [
        _effect(name, "FLOPs", what, _flop(cold), _flop(warm)),
        _effect(
            name, "stored bytes", f"{users} users", apart, apart - (users - 1) * shared * growing
        ),
        _effect(name, "moved bytes", what, _moved(cold), _moved(warm), kind="predicted"),
    ]


def _paging(s: Setting) -> list[Effect]:
    used = max(1, s.context // 2)
    name = f"paging in blocks of {s.block_size}"
    reserved = costs.kv_sequence_bytes(s.config, s.context, s.kv_itemsize)
    step = s.step([(1, used)], logits_rows=1)
    return [
        _effect(name, "FLOPs", f"a decode at {used}", step.flop, step.flop),
        _effect(
            name, "stored bytes", f"{used} tokens of {s.context} reserved", reserved,
            s.kv_bytes(used),
        ),
        _effect(
            name, "moved bytes", f"a decode at {used}, and its block table", step.moved,
            step.moved + 4 * costs.blocks_for(used, s.block_size), kind="predicted",
        ),
    ]  # fmt: skip


def _eight_bit(s: Setting) -> list[Effect]:
    if KV_DTYPE_BYTES[s.kv_dtype] == 1:
        wide, narrow = s.dtype, s.kv_dtype
    else:
        wide, narrow = s.kv_dtype, "fp8"

    def step(kv_dtype: str) -> StepCost:
        return step_cost(
            s.config, [(1, s.context)] * s.batch, logits_rows=s.batch, weights=s.weights,
            dtype=s.dtype, kv_dtype=kv_dtype,
        )  # fmt: skip

    def stored(kv_dtype: str) -> int:
        return costs.kv_sequence_bytes(
            s.config, s.context, KV_DTYPE_BYTES[kv_dtype], block_size=s.block_size
        )

    name, what = f"K/V from {wide} to {narrow}", f"a decode of {s.batch} users"
    before, after = step(wide), step(narrow)
    return [
        _effect(name, "FLOPs", what, before.flop, after.flop),
        _effect(name, "stored bytes", "a sequence", stored(wide), stored(narrow)),
        _effect(name, "moved bytes", what, before.moved, after.moved, kind="predicted"),
    ]


def _flop(steps: list[StepCost]) -> int:
    return sum(step.flop for step in steps)


def _moved(steps: list[StepCost]) -> int:
    return sum(step.moved for step in steps)

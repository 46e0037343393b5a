"""A plan as tables, with the cards of ``cards`` first and last; and the same as JSON."""

from __future__ import annotations

from typing import Any

from stairs.accounting import traffic
from stairs.accounting.hardware import ridge
from stairs.accounting.table import Cell, Column, Kind, Quantity, Table
from stairs.accounting.weights import parameter_count
from stairs.planner.cards import memory_table, two_memories
from stairs.planner.phases import Setting, phases, time_per_token, time_to_first_token
from stairs.planner.plan import Plan
from stairs.planner.targets import judge_targets
from stairs.planner.techniques import Q_TILE, techniques

__all__ = ["plan_json", "plan_tables"]


def plan_tables(plan: Plan) -> list[Table]:
    tables = [memory_table(plan), _phase_table(plan), _time_table(plan)]
    if plan.options.targets:
        tables.append(_target_table(plan))
    return [
        *tables,
        _technique_table(plan.answer.setting),
        _attention_table(plan.answer.setting),
        two_memories(plan.answer.setting),
    ]


def plan_json(plan: Plan) -> dict[str, Any]:
    """The tables, after what they are about."""
    setting = plan.answer.setting
    return {
        "model": {
            "name": plan.name,
            "origin": plan.origin,
            "model_type": plan.config.model_type,
            "parameters": parameter_count(plan.config),
        },
        "device": setting.device.name,
        "dtype": setting.dtype,
        "kv_cache_dtype": setting.kv_dtype,
        "max_model_len": setting.context,
        "recommended_max_num_batched_tokens": plan.budget.tokens,
        "tables": [table.json() for table in plan_tables(plan)],
        "techniques": [
            {
                "technique": effect.technique,
                "axis": effect.before.axis,
                "what": effect.what,
                "without": effect.before.value,
                "with": effect.after.value,
                "kind": effect.before.kind,
            }
            for effect in techniques(setting)
        ],
    }


def _phase_table(plan: Plan) -> Table:
    columns = (
        Column("phase"),
        Column("FLOPs", "FLOP", "FLOPs", "exact"),
        Column("stored bytes", "B", "stored bytes", "estimate"),
        Column("moved bytes", "B", "moved bytes", "predicted"),
        Column("largest step, rows x keys", "", "count", "exact"),
        Column("FLOP a byte", "", "count", "predicted"),
        Column("linear waits for"),
        Column("attention waits for"),
        Column("time", "s", "time", plan.answer.setting.model.kind),
    )
    rows: list[list[Cell]] = [
        [
            phase.name,
            phase.cost.flop,
            phase.stored,
            phase.cost.moved,
            phase.largest_step,
            phase.cost.flop / phase.cost.moved,
            phase.sides["linear"],
            phase.sides["attention"],
            phase.seconds,
        ]
        for phase in phases(plan.answer.setting)
    ]
    setting = plan.answer.setting
    point = ridge(setting.device, setting.dtype)
    notes = [
        f"Ridge {point.value:.0f} FLOP/B ({point.kind}): below it a kernel waits for memory. "
        "MAC: one multiply-add, 2 FLOP. Only visible pairs count (causal). Stored: K/V and "
        "activations, and when training weights, gradients and Adam's state."
    ]
    if setting.config.mla is not None:
        notes.append("Latent attention is absorbed or expanded, whichever takes fewer FLOP.")
    return Table(f"Phases at {setting.context} tokens", columns, rows, notes)


def _time_table(plan: Plan) -> Table:
    setting = plan.answer.setting
    kind, others = setting.model.kind, setting.batch - 1
    columns = (
        Column("what"),
        Column("alone", "s", "time", kind),
        Column(f"beside {others} others", "s", "time", kind),
    )
    prompts = [(p, 0) for p in sorted({128, 1024, 8192, setting.context}) if p <= setting.context]
    cached = setting.cached_prompt
    if cached:
        own = min(128, setting.context - setting.shared)
        prompts += [(setting.shared + own, cached), (setting.context, cached)]
    rows: list[list[Cell]] = []
    for prompt, hit in prompts:
        times = [time_to_first_token(setting, prompt, cached=hit, beside=n) for n in (0, others)]
        rows.append([f"first token, prompt of {prompt}" + (f", {hit} cached" * bool(hit)), *times])
    for name, chunk in (("next token", False), ("next token, a chunk aboard", True)):
        times = [time_per_token(setting, batch=n, chunk=chunk) for n in (1, setting.batch)]
        rows.append([name, *times])
    notes = [
        f"Time model: {setting.model.source}. Waiting behind other prompts comes on top.",
        f"Prompt tokens a step: {plan.budget.tokens} recommended ({plan.budget.reason}); "
        f"{setting.budget} planned here.",
    ]
    return Table(f"Time at {setting.context} tokens", columns, rows, notes)


def _target_table(plan: Plan) -> Table:
    columns = (
        Column("target"),
        Column("asked"),
        Column("planned"),
        Column("met"),
        Column("one change that meets it"),
        Column("then"),
    )
    rows: list[list[Cell]] = []
    for outcome in judge_targets(plan):
        figure = _count if outcome.name == "users" else _time
        rows.append(
            [
                outcome.name,
                figure(outcome.target, "exact"),
                figure(outcome.value, outcome.kind),
                "yes" if outcome.met else "no",
                "" if outcome.met or outcome.changes else "none of those tried",
                "",
            ]
        )
        for change in outcome.changes:
            rows.append(["", "", "", "", change.what, figure(change.value, outcome.kind)])
    notes = [
        "ttft: a prompt that fills the context, its system prompt cached, beside the other users; "
        "tpot: all users decoding with a chunk aboard; users: that fit. Several devices split "
        "evenly and what they say to each other is not counted."
    ]
    return Table("Targets", columns, rows, notes)


def _count(value: float, kind: Kind) -> Quantity:
    return Quantity(int(value), "", "count", kind)


def _time(value: float, kind: Kind) -> Quantity:
    return Quantity(value, "s", "time", kind)


def _technique_table(setting: Setting) -> Table:
    columns = (
        Column("technique"),
        Column("without"),
        Column("with"),
        Column("factor"),
        Column("kind"),
    )
    rows: list[list[Cell]] = []
    technique = ""
    for effect in techniques(setting):
        if effect.technique != technique:
            technique = effect.technique
            rows.append([technique, "", "", "", ""])
        factor, axis = effect.factor, effect.before.axis
        what = f"  {axis}: {effect.what}"
        rows.append([what, effect.before, effect.after, _factor(factor), effect.before.kind])
    return Table("What each technique changes for this model", columns, rows)


def _factor(factor: float | None) -> str:
    if factor is None:
        return "new"
    if abs(factor - 1) < 5e-4:
        return "same"
    if factor == 0:
        return "none left"
    if factor > 1:
        return f"x {factor:.3g}"
    return f"1/{1 / factor:.3g}" if factor > 1e-3 else f"1/{1 / factor:,.0f}"


def _attention_table(setting: Setting) -> Table:
    """One head of one layer, a prefill of the whole context."""
    n, width, size = setting.context, setting.config.head_dim, setting.itemsize
    columns = (
        Column("attention of one head, one layer"),
        Column("score trips"),
        Column("scores"),
        Column("moved", "B", "moved bytes", "bound"),
    )
    rows: list[list[Cell]] = []
    lists = {
        "materialised, two-pass softmax": traffic.STANDARD_KERNELS,
        "materialised, mask apart": traffic.MASKED_KERNELS,
        "materialised, eager with fp32 softmax": traffic.EAGER_KERNELS,
    }
    for name, kernels in lists.items():
        moved = traffic.materialised_bytes(n, n, width, size, kernels=kernels)
        per_score = sum(kernel.bytes_per_score(size) for kernel in kernels)
        trips = ", ".join(kernel.name for kernel in kernels)
        rows.append([name, trips, f"{per_score / size:g}·n²·b", moved])
    tiled = traffic.tile_bytes(n, n, width, size, q_tile=Q_TILE, causal=True)
    rows.append([f"tiled, {Q_TILE} queries, causal: asked of the caches", "none", "0", tiled])
    least = traffic.compulsory_bytes(n, n, width, size)
    rows.append(["tiled, every tile served by a cache: compulsory", "none", "0", least])
    notes = [
        f"n {n}, d {width}, b {size}. What tiled attention takes from memory lies between its two "
        "rows: caches serve the rest. Grouped heads do not shrink the tiles' re-reads."
    ]
    return Table(f"Attention's traffic, prefill of {n}", columns, rows, notes)

"""``stairs plan`` without the flags' parsing: a model's name and options in, text out."""

from __future__ import annotations

import json
from typing import TextIO

from stairs.accounting import figures
from stairs.planner.find import find_model
from stairs.planner.options import PlanOptions
from stairs.planner.phases import Setting, chunk_steps, phases
from stairs.planner.plan import Plan, make_plan
from stairs.planner.report import plan_json, plan_tables

__all__ = ["plan_as_json", "plan_as_svg", "plan_model", "print_plan"]


def plan_model(model: str, options: PlanOptions, *, revision: str | None = None) -> Plan:
    """Read the config that ``model`` names and plan it; loads no weights and no torch."""
    found = find_model(model, revision=revision)
    return make_plan(found.config, options, name=found.name, origin=found.origin, types=found.types)


def print_plan(plan: Plan, stream: TextIO) -> None:
    """The tables as text, in colour on a terminal."""
    for i, table in enumerate(plan_tables(plan)):
        if i:
            stream.write("\n")
        table.print(stream, units="both")


def plan_as_json(plan: Plan) -> str:
    return json.dumps(plan_json(plan), indent=2, ensure_ascii=False) + "\n"


def plan_as_svg(plan: Plan) -> str:
    """The prompt's staircase, the memory bar, and the phases on the roofline."""
    setting = plan.answer.setting
    return figures.document([_staircase(setting), _memory_bar(plan), _roofline(setting)])


def _staircase(setting: Setting) -> figures.Figure:
    """A prompt that fills the context but for a short answer's rows."""
    cached = setting.cached_prompt
    stairs = [figures.Stair(cached, cached, "hit")] if cached else []
    stairs += [
        figures.Stair(new, context, "chunk")
        for new, context in chunk_steps(setting, setting.context, cached=cached)
    ]
    title = f"A prompt of {setting.context} tokens in steps of {setting.budget}"
    return figures.staircase(stairs, title=title)


def _memory_bar(plan: Plan) -> figures.Figure:
    memory, setting = plan.answer.memory, plan.answer.setting
    held = [
        ("weights", memory.weights),
        ("activations", memory.activations),
        ("workspace", memory.workspace),
    ]
    parts = [(name, int(quantity.value or 0)) for name, quantity in held]
    users = plan.options.users or setting.batch
    parts.append((f"K/V of {users} users", users * setting.kv_bytes(setting.context)))
    total = int(memory.usable.value or 1)
    return figures.memory_bar(parts, total, title=f"Usable memory of {setting.device.title}")


def _roofline(setting: Setting) -> figures.Figure:
    dots = [
        figures.Dot(f"{phase.name}, {name}", phase.cost.groups[name].intensity)
        for phase in phases(setting)
        for name in ("linear", "attention")
    ]
    return figures.roofline(
        dots,
        flop_rate=setting.device.reachable_matmul(setting.dtype).value,
        byte_rate=setting.device.reachable_bandwidth().value,
        title=f"Phases under the roof of {setting.device.title}",
    )

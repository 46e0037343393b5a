"""Targets: whether a plan meets them, and which single change would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from stairs.accounting.hardware import DEVICES
from stairs.accounting.table import Kind
from stairs.config import ModelConfig
from stairs.planner.options import PlanOptions
from stairs.planner.phases import Setting
from stairs.planner.plan import BUDGETS, Answer, Plan, evaluate
from stairs.planner.timing import KV_DTYPE_BYTES

__all__ = ["Change", "Outcome", "devices_needed", "judge_targets"]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing changed, all else equal, and the figure it gives."""

    what: str
    value: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """``changes``: each meets the target by itself; empty where the target is met, or where no
    single change here meets it."""

    name: str
    target: float
    value: float
    met: bool
    kind: Kind
    changes: tuple[Change, ...]


def judge_targets(plan: Plan) -> list[Outcome]:
    return [_judge(plan, name, target) for name, target in plan.options.targets.items()]


def _judge(plan: Plan, name: str, target: float) -> Outcome:
    value = _figure(plan.answer, name)
    met = _meets(name, value, target)
    changes = () if met else tuple(_changes(plan, name, target))
    kind = "estimate" if name == "users" else plan.answer.setting.model.kind
    return Outcome(name, target, value, met, kind, changes)


def _figure(answer: Answer, name: str) -> float:
    return {"ttft": answer.ttft, "tpot": answer.tpot, "users": answer.users}[name]


def _meets(name: str, value: float, target: float) -> bool:
    return value >= target if name == "users" else value <= target


def _changes(plan: Plan, name: str, target: float) -> Iterator[Change]:
    """Each knob in turn, where it meets the target; of a knob with many settings the one that
    changes least. A change that is quicker only because fewer users fit is none."""
    options, setting = plan.options, plan.answer.setting

    def value(other: PlanOptions, devices: int = 1) -> float | None:
        answer = evaluate(plan.config, other, types=plan.types, devices=devices)
        found = _figure(answer, name)
        enough = answer.setting.batch >= setting.batch
        return found if enough and _meets(name, found, target) else None

    def tries() -> Iterator[tuple[str, float | None]]:
        if KV_DTYPE_BYTES[setting.kv_dtype] > 1:
            yield "--kv-cache-dtype fp8", value(replace(options, kv_cache_dtype="fp8"))
        if name != "users":
            yield _first(
                _budgets(setting, name),
                lambda n: value(replace(options, max_num_batched_tokens=n)),
                "--max-num-batched-tokens",
            )
        length = _longest(
            setting.context,
            options.system_prompt_tokens,
            lambda n: value(replace(options, max_model_len=n)) is not None,
        )
        if length is not None:
            yield f"--max-model-len {length}", value(replace(options, max_model_len=length))
        if not setting.device.is_cpu:
            yield _first((2, 4, 8), lambda n: value(options, n), f"{setting.device.name} x")
        for device in DEVICES.values():
            if device is not setting.device and not device.is_cpu:
                yield f"--gpu {device.name}", value(replace(options, gpu=device.name))

    for what, found in tries():
        if found is not None:
            yield Change(what, found)


def _budgets(setting: Setting, name: str) -> list[int]:
    """Prompt tokens a step, nearest to what is planned first: fewer for tpot, more for ttft."""
    sizes = [setting.chunk * n for n in BUDGETS]
    if name == "tpot":
        return [size for size in reversed(sizes) if size < setting.budget]
    return [size for size in sizes if size > setting.budget]


def _first(
    sizes: Iterable[int], value: Callable[[int], float | None], flag: str
) -> tuple[str, float | None]:
    """The first size that meets the target, with its flag."""
    for size in sizes:
        found = value(size)
        if found is not None:
            return f"{flag} {size}", found
    return flag, None


def _longest(context: int, shared: int, passes: Callable[[int], bool]) -> int | None:
    """The longest context below this one, in steps of 128, that passes; all shorter ones do."""
    low, high = shared // 128 + 1, (context - 1) // 128
    if high < low or not passes(low * 128):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if passes(middle * 128) else (low, middle - 1)
    return low * 128


def devices_needed(config: ModelConfig, options: PlanOptions) -> int | None:
    """The fewest of 1, 2, 4 to 64 devices on which one user fits; None if none of them."""
    for devices in (1, 2, 4, 8, 16, 32, 64):
        if evaluate(config, options, devices=devices).users >= 1:
            return devices
    return None

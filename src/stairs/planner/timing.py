"""How long a step takes: overheads, and for each group of kernels its arithmetic and its traffic.

    t = step + B·sequence + L·layer + sum over groups g of
        max(FLOP / P, bytes / W)             where nothing was fitted: a bound
        a_g · FLOP / P + m_g · bytes / W     where it was: the two overlap in part

One maximum over the whole step would be wrong: attention can wait for memory while the linear
layers compute. ``fitting.fit`` finds the overheads and factors from an engine's own steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stairs.accounting import costs, traffic
from stairs.accounting.costs import Work
from stairs.accounting.hardware import Device, host_cpu
from stairs.accounting.table import Kind
from stairs.accounting.weights import HeldWeights
from stairs.config import DTYPE_BYTES, ModelConfig

__all__ = [
    "FITTED_GROUPS",
    "FITTED_STEPS",
    "KV_DTYPE_BYTES",
    "SIDES",
    "Group",
    "Side",
    "StepCost",
    "TimeModel",
    "default_model",
    "fitted_group",
    "fitted_model",
    "limits",
    "roofline",
    "step_cost",
]

# 8-bit K/V keep one scale a layer for K and one for V: no bytes a token.
KV_DTYPE_BYTES: Mapping[str, int] = {
    **DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip
Side = Literal["compute", "memory"]
SIDES: tuple[Side, Side] = ("compute", "memory")
# What bench/step_time.py --update wrote last.
FITTED_STEPS = Path(__file__).with_name("cpu_steps.json")
FITTED_GROUPS = ("linear", "row", "packed", "attention")
_ATTENTION = ("qk", "pv")
_FORMS: tuple[costs.LatentForm, ...] = ("absorbed", "expanded")


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels that are limited together: FLOP they do, bytes they move."""

    flop: int
    moved: int
    rows: int = 0  # of the products' left side

    @property
    def intensity(self) -> float:
        return self.flop / self.moved if self.moved else 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step asks of a device, by group."""

    groups: Mapping[str, Group]
    num_sequences: int
    num_layers: int
    dtype: str
    packed: bool = False  # products make their weights from packed values

    @property
    def flop(self) -> int:
        return sum(group.flop for group in self.groups.values())

    @property
    def moved(self) -> int:
        return sum(group.moved for group in self.groups.values())


def step_cost(
    config: ModelConfig,
    work: Work,
    *,
    logits_rows: int,
    weights: HeldWeights,
    dtype: str,
    kv_dtype: str,
    score_kernels: tuple[traffic.ScoreKernel, ...] = (),
) -> StepCost:
    """The groups of one step: attention (scores, K/V), head (logits), linear (all the rest).

    Latent attention takes the form with fewer FLOP: absorbed to decode, expanded for long rows.
    """
    forms = [costs.step_macs(config, work, logits_rows=logits_rows, form=form) for form in _FORMS]
    macs = min(forms, key=costs.flops)
    moved = traffic.step_moved_bytes(
        config,
        work,
        logits_rows=logits_rows,
        weights=weights,
        itemsize=DTYPE_BYTES[dtype],
        kv_itemsize=KV_DTYPE_BYTES[kv_dtype],
        score_kernels=score_kernels,
    )
    tokens = sum(new for new, _ in work)
    attention = sum(macs[part] for part in _ATTENTION)
    linear = sum(macs.values()) - attention - macs["head"]
    groups = {
        "linear": Group(2 * linear, moved["weights"] + moved["activations"], tokens),
        "attention": Group(2 * attention, moved["kv_read"] + moved["kv_written"] + moved["scores"]),
        "head": Group(2 * macs["head"], moved["head"] + moved["logits"], logits_rows),
    }
    packed = weights.reads_packed(tokens)
    return StepCost(groups, len(work), config.num_layers, dtype, packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Overheads in seconds; ``slowdown``: what a group's seconds at the reachable peaks are
    multiplied by on each side, for the groups that were fitted."""

    step: float = 0.0
    sequence: float = 0.0
    layer: float = 0.0
    slowdown: Mapping[tuple[str, Side], float] = field(default_factory=dict)
    kind: Kind = "predicted"
    source: str = ""

    def group_seconds(self, cost: StepCost, device: Device, name: str) -> float:
        fitted, seconds = fitted_group(cost, name), limits(cost, device, name)
        if (fitted, "compute") not in self.slowdown:
            return max(seconds.values())
        return sum(self.slowdown[fitted, side] * seconds[side] for side in SIDES)

    def seconds(self, cost: StepCost, device: Device) -> float:
        overhead = self.step + cost.num_sequences * self.sequence + cost.num_layers * self.layer
        return overhead + sum(self.group_seconds(cost, device, name) for name in cost.groups)


def limits(cost: StepCost, device: Device, name: str) -> dict[Side, float]:
    """Seconds of a group's arithmetic alone and of its traffic alone, at reachable peaks."""
    group = cost.groups[name]
    return {
        "compute": group.flop / device.reachable_matmul(cost.dtype).value,
        "memory": group.moved / device.reachable_bandwidth().value,
    }


def roofline(cost: StepCost, device: Device, name: str) -> tuple[Side, float]:
    """The side of the ridge a group is on at reachable peaks, and the seconds it takes there."""
    seconds = limits(cost, device, name)
    side: Side = "compute" if seconds["compute"] >= seconds["memory"] else "memory"
    return side, seconds[side]


def fitted_group(cost: StepCost, name: str) -> str:
    """Which kernels run a group: attention; products with packed weights; dense ones of a single
    row, which BLAS reads in place, or of more, for which it copies tiles of the matrix first. The
    head is one more linear layer: a fit cannot tell it from the others."""
    if name == "attention":
        return name
    if cost.packed:
        return "packed"
    return "row" if cost.groups[name].rows == 1 else "linear"


def fitted_model(record: Mapping[str, Any], *, host: str) -> TimeModel:
    """The model of a record of ``bench/step_time.py``, as it looks from the machine ``host``."""
    threads = "one thread" if record["threads"] == 1 else f"{record['threads']} threads"
    source = (
        f"fitted to {record['fitted']} steps of {len(record['models'])} models on {threads} of "
        f"an {record['cpu']}, {record['date']}; on {record['held_out']} steps it did not see "
        f"{100 * record['median_error']:.0f} % off in the median, {100 * record['error']:.0f} % "
        "in the mean"
    )
    if host != record["cpu"]:
        source += f". This machine is another ({host}): it will take other times"
    keys = [(group, side) for group in FITTED_GROUPS for side in SIDES]
    return TimeModel(
        step=record["step_ms"] / 1e3,
        sequence=record["sequence_ms"] / 1e3,
        layer=record["layer_ms"] / 1e3,
        slowdown={key: record["slowdown"][" ".join(key)] for key in keys},
        source=source,
    )


def default_model(device: Device, dtype: str) -> TimeModel:
    """Before an engine ran: on a CPU the fit to the machine that was measured, on a GPU reachable
    peaks and the launch overhead of a layer."""
    if device.is_cpu and dtype != "float32":
        return TimeModel(kind="estimate", source=f"roofline; steps in {dtype} were not fitted")
    if device.is_cpu:
        return fitted_model(json.loads(FITTED_STEPS.read_text("utf-8")), host=host_cpu())
    return TimeModel(
        layer=7 * 3.9e-6,
        source="roofline of reachable peaks, and 7 kernels a layer at the 3.9 µs each took in a "
        "decode step captured as one CUDA graph on an H200",
    )

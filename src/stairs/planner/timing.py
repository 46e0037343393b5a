"""How long a step takes: overheads, and for each group of kernels the slower of its two limits.

    t = step + B·sequence + L·layer + sum over groups of slowdown · max(FLOP / P, bytes / W)

One maximum over the whole step would be wrong: attention can wait for memory while the linear
layers compute. ``default_model`` takes the reachable peaks as they are; ``fitting.fit`` finds the
overheads and slowdowns from an engine's own steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stairs.accounting import costs, traffic
from stairs.accounting.costs import Work
from stairs.accounting.hardware import Device
from stairs.accounting.table import Kind
from stairs.accounting.weights import HeldWeights
from stairs.config import DTYPE_BYTES, ModelConfig

__all__ = [
    "KV_DTYPE_BYTES",
    "Group",
    "Side",
    "StepCost",
    "TimeModel",
    "default_model",
    "fitted_group",
    "roofline",
    "step_cost",
]

# 8-bit K/V keep one scale a layer for K and one for V: no bytes a token.
KV_DTYPE_BYTES: Mapping[str, int] = {
    **DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip
Side = Literal["compute", "memory"]
_ATTENTION = ("qk", "pv")
_FORMS: tuple[costs.LatentForm, ...] = ("absorbed", "expanded")


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels that are limited together: FLOP they do, bytes they move."""

    flop: int
    moved: int

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
    attention = sum(macs[part] for part in _ATTENTION)
    linear = sum(macs.values()) - attention - macs["head"]
    groups = {
        "linear": Group(2 * linear, moved["weights"] + moved["activations"]),
        "attention": Group(2 * attention, moved["kv_read"] + moved["kv_written"] + moved["scores"]),
        "head": Group(2 * macs["head"], moved["head"] + moved["logits"]),
    }
    packed = weights.reads_packed(sum(new for new, _ in work))
    return StepCost(groups, len(work), config.num_layers, dtype, packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Overheads in seconds, and how much slower than its roofline each group is on each side:
    1 / a for compute and 1 / m for memory, 1 where nothing is known."""

    step: float = 0.0
    sequence: float = 0.0
    layer: float = 0.0
    slowdown: Mapping[tuple[str, Side], float] = field(default_factory=dict)
    kind: Kind = "predicted"
    source: str = ""

    def group_seconds(self, cost: StepCost, device: Device, name: str) -> float:
        side, seconds = roofline(cost, device, name)
        return seconds * self.slowdown.get((fitted_group(cost, name), side), 1.0)

    def seconds(self, cost: StepCost, device: Device) -> float:
        overhead = self.step + cost.num_sequences * self.sequence + cost.num_layers * self.layer
        return overhead + sum(self.group_seconds(cost, device, name) for name in cost.groups)


def roofline(cost: StepCost, device: Device, name: str) -> tuple[Side, float]:
    """The side of the ridge a group is on at reachable peaks, and the seconds it takes there."""
    group = cost.groups[name]
    arithmetic = group.flop / device.reachable_matmul(cost.dtype).value
    memory = group.moved / device.reachable_bandwidth().value
    return ("compute", arithmetic) if arithmetic >= memory else ("memory", memory)


def fitted_group(cost: StepCost, name: str) -> str:
    """The head is one more linear layer: a fit cannot tell it from the others."""
    if name == "attention":
        return name
    return "packed" if cost.packed else "linear"


def default_model(device: Device) -> TimeModel:
    """Before an engine ran: reachable peaks, and on a GPU the launch overhead of a layer."""
    if device.is_cpu:
        return TimeModel(
            kind="bound", source="roofline of measured peaks: no step can be faster than this"
        )
    return TimeModel(
        layer=7 * 3.9e-6,
        source="roofline of reachable peaks, and 7 kernels a layer at the 3.9 µs each took in a "
        "decode step captured as one CUDA graph on an H200",
    )

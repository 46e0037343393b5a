"""A time model fitted to steps that an engine ran, with its error on steps it did not see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stairs.accounting.hardware import Device
from stairs.accounting.record import Phase, StepRecord
from stairs.accounting.weights import HeldWeights
from stairs.config import ModelConfig
from stairs.planner.timing import Side, StepCost, TimeModel, fitted_group, roofline, step_cost

__all__ = ["Fit", "Sample", "fit", "nonnegative_least_squares", "samples_of"]

_SIDES: tuple[tuple[str, Side], ...] = (
    ("linear", "compute"),
    ("linear", "memory"),
    ("packed", "compute"),
    ("packed", "memory"),
    ("attention", "compute"),
    ("attention", "memory"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One step that ran, and how long it took in seconds."""

    cost: StepCost
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """``error``: mean of |predicted - measured| / measured over the held-out steps."""

    model: TimeModel
    error: float
    num_fitted: int
    num_held_out: int


def samples_of(
    records: Iterable[StepRecord],
    config: ModelConfig,
    *,
    weights: HeldWeights,
    dtype: str,
    kv_dtype: str,
) -> list[Sample]:
    """An engine's records as samples. Only decoding rows are sure to need logits."""
    samples = []
    for record in records:
        work = [(int(row["new_tokens"]), int(row["context"])) for row in record.rows]
        logits_rows = int((record.rows["phase"] == Phase.DECODE).sum())
        cost = step_cost(
            config, work, logits_rows=logits_rows, weights=weights, dtype=dtype, kv_dtype=kv_dtype
        )
        samples.append(Sample(cost, record.host_seconds + record.device_seconds))
    return samples


def fit(samples: Sequence[Sample], device: Device) -> Fit:
    """Non-negative least squares of relative errors; every fourth step is held out."""
    held_out = samples[3::4]
    seen = [sample for i, sample in enumerate(samples) if i % 4 != 3]
    assert held_out, "a fit needs at least four steps"
    features = np.zeros((len(seen), 2 + len(_SIDES)))
    for row, sample in zip(features, seen, strict=True):
        row[0], row[1] = 1.0, sample.cost.num_sequences
        for name in sample.cost.groups:
            side, seconds = roofline(sample.cost, device, name)
            row[2 + _SIDES.index((fitted_group(sample.cost, name), side))] += seconds
        row /= sample.seconds
    found = nonnegative_least_squares(features, np.ones(len(seen)))
    seen_side = [bool(column.any()) for column in features.T]
    model = TimeModel(
        step=float(found[0]),
        sequence=float(found[1]),
        slowdown={key: float(found[2 + i]) for i, key in enumerate(_SIDES) if seen_side[2 + i]},
    )
    errors = [abs(model.seconds(s.cost, device) / s.seconds - 1) for s in held_out]
    return Fit(model, sum(errors) / len(errors), len(seen), len(held_out))


def nonnegative_least_squares(
    a: NDArray[np.float64], b: NDArray[np.float64]
) -> NDArray[np.float64]:
    """x >= 0 that minimises |a x - b| (Lawson and Hanson 1974, chapter 23).

    a: (M, N), b: (M,), x: (N,). Columns are scaled first, so their units do not matter.
    """
    norms = np.linalg.norm(a, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    a = a / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10:
            break
        free[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                x = trial
                break
            step = (x[below] / (x[below] - trial[below])).min()
            x = x + step * (trial - x)
            free &= x > 1e-14
    solution: NDArray[np.float64] = x / scale
    return solution

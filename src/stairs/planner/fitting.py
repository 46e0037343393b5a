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
from stairs.planner.timing import (
    FITTED_GROUPS,
    SIDES,
    Side,
    StepCost,
    TimeModel,
    fitted_group,
    limits,
    step_cost,
)

__all__ = ["Fit", "Sample", "fit", "nonnegative_least_squares", "samples_of"]

_KEYS: tuple[tuple[str, Side], ...] = tuple((g, side) for g in FITTED_GROUPS for side in SIDES)

_ROUNDS = 12  # of weighing steps by how far off they are; it settles in a handful


@dataclass(frozen=True, slots=True)
class Sample:
    """One step that ran, and how long it took in seconds."""

    cost: StepCost
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Errors are |predicted - measured| / measured over steps that the fit did not see: their
    mean, their median, and what nine of ten stay below."""

    model: TimeModel
    error: float
    median_error: float
    ninth_error: float
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


def fit(
    samples: Sequence[Sample], device: Device, *, held_out: Sequence[Sample] | None = None
) -> Fit:
    """Overheads and slowdowns that are wrong by the least share of each step's time.

    ``held_out``: steps to judge by; None: every fourth of ``samples``, which is then not fitted.
    Steps that another program disturbed are far off whatever the model: after Huber (1964) an
    error counts linearly from 1.5 times the median on.
    """
    if held_out is None:
        held_out = samples[3::4]
        samples = [sample for i, sample in enumerate(samples) if i % 4 != 3]
    assert held_out, "a fit needs at least four steps"
    features = np.array([_features(sample.cost, device) / sample.seconds for sample in samples])
    used = _columns_used(samples, features)
    found = np.zeros(features.shape[1])
    weights = np.ones(len(samples))
    for _ in range(_ROUNDS):
        scaled = features[:, used] * weights[:, None]
        found[used] = nonnegative_least_squares(scaled, weights)
        errors = np.abs(features @ found - 1)
        limit = max(1.5 * float(np.median(errors)), 1e-9)
        weights = np.sqrt(np.minimum(1, limit / np.maximum(errors, 1e-12)))
    model = TimeModel(
        step=float(found[0]),
        sequence=float(found[1]),
        layer=float(found[2]),
        slowdown={key: float(found[3 + i]) for i, key in enumerate(_KEYS) if used[3 + i]},
    )
    off = np.array([abs(model.seconds(s.cost, device) / s.seconds - 1) for s in held_out])
    return Fit(
        model,
        float(off.mean()),
        float(np.median(off)),
        float(np.quantile(off, 0.9)),
        len(samples),
        len(held_out),
    )


def _features(cost: StepCost, device: Device) -> NDArray[np.float64]:
    """What each coefficient is multiplied by in ``TimeModel.seconds``."""
    row = np.zeros(3 + len(_KEYS))
    row[:3] = 1.0, cost.num_sequences, cost.num_layers
    for name in cost.groups:
        for side, seconds in limits(cost, device, name).items():
            row[3 + _KEYS.index((fitted_group(cost, name), side))] += seconds
    return row


def _columns_used(samples: Sequence[Sample], features: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Steps of one model cannot tell what a layer costs from what a step does."""
    used: NDArray[np.bool_] = np.any(features, axis=0)
    used[2] = len({sample.cost.num_layers for sample in samples}) > 1
    return used


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

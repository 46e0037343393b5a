"""The fit finds what made the numbers, never a negative time, and tells its error honestly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from stairs.accounting.hardware import DEVICES
from stairs.accounting.record import ROW, Phase, StepRecord
from stairs.accounting.weights import dense_weights
from stairs.config import ModelConfig
from stairs.planner.fitting import Sample, fit, nonnegative_least_squares, samples_of
from stairs.planner.timing import SIDES, StepCost, TimeModel, step_cost

CPU = DEVICES["cpu"]
TRUE = TimeModel(
    step=2e-3,
    sequence=5e-4,
    slowdown={
        ("linear", "compute"): 1.4,
        ("linear", "memory"): 1.2,
        ("row", "compute"): 0.2,
        ("row", "memory"): 1.1,
        ("attention", "compute"): 3.0,
        ("attention", "memory"): 2.5,
    },
)
STEPS: list[list[tuple[int, int]]] = [
    *([(1, n)] * b for b, n in itertools.product((1, 2, 8, 32), (10, 500, 4000))),
    *([(c, e)] for c, e in itertools.product((16, 128, 512), (512, 2048, 8192))),
    *([(1, 700)] * b + [(128, 640)] for b in (1, 4, 16)),
]


def costs_of(config: ModelConfig) -> list[StepCost]:
    return [
        step_cost(
            config,
            work,
            logits_rows=len(work),
            weights=dense_weights(config, 4),
            dtype="float32",
            kv_dtype="float32",
        )
        for work in STEPS
    ]


def test_it_recovers_the_model_that_made_the_times(
    model: Callable[[str], ModelConfig],
) -> None:
    samples = [Sample(cost, TRUE.seconds(cost, CPU)) for cost in costs_of(model("smollm2"))]
    found = fit(samples, CPU)
    assert found.error < 1e-6
    assert found.num_held_out == len(samples) // 4
    # One model reads the same weights in every step: that they take is not told from overheads.
    for side in SIDES:
        key = "attention", side
        assert found.model.slowdown[key] == pytest.approx(TRUE.slowdown[key], rel=1e-3)


def test_steps_that_something_disturbed_do_not_move_it(
    model: Callable[[str], ModelConfig],
) -> None:
    """Every seventh step took four times as long, because another program had the processor."""
    costs = costs_of(model("smollm2"))
    samples = [
        Sample(cost, TRUE.seconds(cost, CPU) * (4 if i % 7 == 0 else 1))
        for i, cost in enumerate(costs)
    ]
    quiet = [Sample(cost, TRUE.seconds(cost, CPU)) for cost in costs]
    found = fit(samples, CPU, held_out=quiet)
    assert found.ninth_error < 0.05
    assert found.num_held_out == len(quiet)


def test_models_of_different_depth_tell_layers_from_steps(
    model: Callable[[str], ModelConfig],
) -> None:
    true = replace(TRUE, layer=1e-4)
    costs = [cost for name in ("smollm2", "gpt2") for cost in costs_of(model(name))]
    found = fit([Sample(cost, true.seconds(cost, CPU)) for cost in costs], CPU).model
    assert found.layer == pytest.approx(true.layer, rel=1e-2)
    assert found.step == pytest.approx(true.step, rel=1e-2)
    assert found.slowdown == pytest.approx(true.slowdown, rel=1e-2)


def test_its_error_is_that_of_steps_it_did_not_see(model: Callable[[str], ModelConfig]) -> None:
    """Held-out steps that take twice as long as the others say must show as half missing."""
    samples = [
        Sample(cost, TRUE.seconds(cost, CPU) * (2 if i % 4 == 3 else 1))
        for i, cost in enumerate(costs_of(model("smollm2")))
    ]
    assert fit(samples, CPU).error == pytest.approx(0.5, abs=0.01)


def test_no_coefficient_is_negative(model: Callable[[str], ModelConfig]) -> None:
    """Times that fall with work would need one."""
    samples = [Sample(cost, 1 / (1 + cost.flop)) for cost in costs_of(model("smollm2"))]
    found = fit(samples, CPU).model
    assert min([found.step, found.sequence, found.layer, *found.slowdown.values()]) >= 0


def test_too_few_steps() -> None:
    with pytest.raises(AssertionError, match="four"):
        fit([], CPU)


def best_subset(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The least residual over all supports whose plain solution is not negative."""
    best = float(np.linalg.norm(b))
    for size in range(1, a.shape[1] + 1):
        for columns in itertools.combinations(range(a.shape[1]), size):
            part = a[:, list(columns)]
            x = np.linalg.lstsq(part, b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(part @ x - b)))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_non_negative_least_squares_is_as_good_as_trying_every_support(seed: int) -> None:
    random = np.random.default_rng(seed)
    a = random.normal(size=(12, 5)) * 10.0 ** random.integers(-6, 6, size=5)
    if seed % 3 == 0:
        a[:, 4] = a[:, 3]  # columns that cannot be told apart
    b = random.normal(size=12)
    x = nonnegative_least_squares(a, b)
    assert (x >= 0).all()
    assert np.linalg.norm(a @ x - b) == pytest.approx(best_subset(a, b), rel=1e-6)


def test_an_engines_records_become_samples(model: Callable[[str], ModelConfig]) -> None:
    rows = np.zeros(2, dtype=ROW)
    rows[0]["phase"], rows[0]["new_tokens"], rows[0]["context"] = Phase.PREFILL, 16, 48
    rows[1]["phase"], rows[1]["new_tokens"], rows[1]["context"] = Phase.DECODE, 1, 9
    record = StepRecord(
        step=1,
        rows=rows,
        host_seconds=0.25,
        device_seconds=0.5,
        num_preempted=0,
        blocks_owned=3,
        blocks_cached=0,
    )
    config = model("smollm2")
    (sample,) = samples_of(
        [record], config, weights=dense_weights(config, 4), dtype="float32", kv_dtype="float32"
    )
    assert sample.seconds == 0.75
    assert sample.cost == step_cost(
        config,
        [(16, 48), (1, 9)],
        logits_rows=1,
        weights=dense_weights(config, 4),
        dtype="float32",
        kv_dtype="float32",
    )

"""A step's groups and how long they take; figures worked out by hand at stated peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stairs.accounting.hardware import DEVICES, Device, Figure
from stairs.accounting.traffic import STANDARD_KERNELS
from stairs.accounting.weights import dense_weights
from stairs.config import ModelConfig
from stairs.planner.timing import Group, StepCost, TimeModel, default_model, roofline, step_cost

Configs = Callable[[str], ModelConfig]


@pytest.fixture
def h200() -> Device:
    """At 790 TFLOP/s and 4.3 TB/s, the peaks of the figures below."""
    return replace(
        DEVICES["h200"],
        measured_bandwidth=Figure(4.3e12, "measured", "test"),
        measured_matmul={"bfloat16": Figure(790e12, "measured", "test")},
    )


def cost_of(config: ModelConfig, work: list[tuple[int, int]], **options: object) -> StepCost:
    asked = {
        "logits_rows": 1,
        "weights": dense_weights(config, 2),
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
    } | options
    return step_cost(config, work, **asked)  # type: ignore[arg-type]


def test_llama_8b_prefill_of_8192_has_a_floor_of_167_ms(model: Configs, h200: Device) -> None:
    cost = cost_of(model("llama-3.1-8b"), [(8192, 8192)])
    assert roofline(cost, h200, "linear")[0] == "compute"
    assert roofline(cost, h200, "attention")[0] == "compute"
    assert round(TimeModel().seconds(cost, h200) * 1e3) == 167


def test_llama_8b_decode_at_8192_takes_3_74_ms(model: Configs, h200: Device) -> None:
    cost = cost_of(model("llama-3.1-8b"), [(1, 8192)])
    assert {roofline(cost, h200, name)[0] for name in cost.groups} == {"memory"}
    assert round(TimeModel().seconds(cost, h200) * 1e3, 2) == 3.74
    assert round(cost.flop / cost.moved, 1) == 1.2


def test_intensities_of_decode(model: Configs) -> None:
    """Linear: about the tokens of a step. Attention: query heads a K/V head; MLA at the ridge."""
    llama, gpt2 = model("llama-3.1-8b"), model("gpt2")
    many = cost_of(llama, [(1, 8192)] * 32, logits_rows=32)
    assert many.groups["linear"].intensity == pytest.approx(32, rel=0.03)
    assert many.groups["attention"].intensity == pytest.approx(4, rel=0.01)
    assert cost_of(gpt2, [(1, 1024)]).groups["attention"].intensity == pytest.approx(1, rel=0.01)
    deepseek = cost_of(model("deepseek-v3"), [(1, 8192)])
    assert deepseek.groups["attention"].intensity == pytest.approx(242, rel=0.01)


def test_one_maximum_a_group_not_one_a_step(h200: Device) -> None:
    """Attention waits for memory while the linear layers compute: the times add."""
    arithmetic, memory = Group(10**12, 10**6), Group(10**6, 10**10)
    cost = StepCost({"linear": arithmetic, "attention": memory}, 1, 1, "bfloat16")
    seconds = TimeModel().seconds(cost, h200)
    assert seconds == pytest.approx(1e12 / 790e12 + 1e10 / 4.3e12)
    both = Group(10**12 + 10**6, 10**10 + 10**6)
    joined = StepCost({"linear": both}, 1, 1, "bfloat16")
    assert seconds > TimeModel().seconds(joined, h200)


def test_overheads_and_slowdowns(h200: Device) -> None:
    cost = StepCost({"linear": Group(79, 0), "attention": Group(0, 43)}, 3, 5, "bfloat16")
    model = TimeModel(
        step=1.0,
        sequence=0.1,
        layer=0.01,
        slowdown={("linear", "compute"): 2.0, ("attention", "memory"): 3.0},
    )
    expected = 1.35 + 2 * 79 / 790e12 + 3 * 43 / 4.3e12
    assert model.seconds(cost, h200) == pytest.approx(expected)


def test_8_bit_kv_halves_only_what_moves_of_the_cache(model: Configs) -> None:
    config = model("llama-3.1-8b")
    wide, narrow = (cost_of(config, [(1, 8192)], kv_dtype=kv) for kv in ("bfloat16", "fp8"))
    assert wide.flop == narrow.flop
    assert wide.groups["linear"] == narrow.groups["linear"]
    assert wide.groups["attention"].moved == 2 * narrow.groups["attention"].moved


def test_materialised_scores_move_with_attention(model: Configs) -> None:
    config = model("gpt2")
    tiled = cost_of(config, [(512, 1024)])
    materialised = cost_of(config, [(512, 1024)], score_kernels=STANDARD_KERNELS)
    extra = materialised.groups["attention"].moved - tiled.groups["attention"].moved
    assert extra == 4 * 512 * 1024 * 12 * 12 * 2
    assert materialised.flop == tiled.flop


def test_a_cpu_starts_with_a_bound_and_a_gpu_with_launches() -> None:
    assert default_model(DEVICES["cpu"]).kind == "bound"
    assert default_model(DEVICES["h200"]).kind == "predicted"
    assert default_model(DEVICES["h200"]).layer > 0

"""A step's groups and how long they take; figures worked out by hand at stated peaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from stairs.accounting.hardware import DEVICES, Device, Figure
from stairs.accounting.traffic import STANDARD_KERNELS
from stairs.accounting.weights import HeldPart, HeldWeights, dense_weights
from stairs.checkpoints.residence import Residence, held_weights
from stairs.config import ModelConfig
from stairs.planner.find import find_model
from stairs.planner.timing import (
    FITTED_STEPS,
    Group,
    StepCost,
    TimeModel,
    default_model,
    fitted_group,
    fitted_model,
    roofline,
    step_cost,
)

Configs = Callable[[str], ModelConfig]
PACKED = Residence(
    device="cpu", dtype="float32", packed=False, batch_invariant=False, wide_vectors=True
)


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
    model = TimeModel(
        step=1.0,
        sequence=0.1,
        layer=0.01,
        slowdown={("linear", "compute"): 2.0, ("linear", "memory"): 3.0},
    )
    arithmetic, memory = 79 / 790e12, 43 / 4.3e12
    both = Group(79, 43, rows=2)
    cost = StepCost({"linear": both, "attention": both}, 3, 5, "bfloat16")
    # What was fitted adds both sides, the rest is the slower of the two.
    expected = 1.35 + 2 * arithmetic + 3 * memory + max(arithmetic, memory)
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


def test_one_row_many_rows_and_packed_weights_are_fitted_apart(model: Configs) -> None:
    config = model("smollm2")
    packed = HeldWeights({"o": HeldPart(packed=10), "embedding": HeldPart(packed=9)}, "Q4_1")
    copied = HeldWeights({"o": HeldPart(packed=10, copy=60), "embedding": HeldPart(packed=9)}, "")
    for weights, new, groups in (
        (dense_weights(config, 4), 1, ["row", "attention", "row"]),
        (dense_weights(config, 4), 128, ["linear", "attention", "row"]),
        (packed, 1, ["packed", "attention", "packed"]),
        (packed, 128, ["packed", "attention", "packed"]),
        (copied, 128, ["linear", "attention", "row"]),
    ):
        cost = cost_of(config, [(new, 500)], weights=weights)
        assert [fitted_group(cost, name) for name in cost.groups] == groups


def test_a_step_with_packed_weights_moves_them_packed(model: Configs) -> None:
    config = model("smollm2")
    weights = HeldWeights({"o": HeldPart(packed=10), "embedding": HeldPart(packed=9)}, "Q4_1")
    dense = cost_of(config, [(1, 8)]).groups
    cost = cost_of(config, [(1, 8)], weights=weights).groups
    tables = 2 * config.vocab_size * config.hidden_size
    assert dense["head"].moved - cost["head"].moved == tables - 9
    assert dense["linear"].moved - cost["linear"].moved == 2 * 134_515_008 - tables - 10
    assert dense["linear"].flop == cost["linear"].flop


def test_the_shipped_fit_says_where_it_is_from_and_how_far_off_it_was() -> None:
    record = json.loads(FITTED_STEPS.read_text())
    at_home = fitted_model(record, host=record["cpu"])
    assert record["cpu"] in at_home.source and "% off in the median" in at_home.source
    assert "another" not in at_home.source
    assert "This machine is another (Abacus 1)" in fitted_model(record, host="Abacus 1").source
    assert 0 < record["median_error"] < record["ninth_error"]
    assert record["held_out"] > 50 < record["fitted"]
    assert {len(key.split()) for key in record["slowdown"]} == {2}


def test_the_shipped_fit_predicts_steps_of_the_size_that_were_measured(model: Configs) -> None:
    """A token of the default model took 7 ms on two threads, 512 prompt tokens 0.3 s; dense in
    float32 six times the bytes are read for a token."""
    found = find_model("smollm2")
    cpu = DEVICES["cpu"]
    weights = held_weights(found.config, found.types or {}, PACKED)
    dense = dense_weights(found.config, 4)
    times = default_model(cpu, "float32")

    def seconds(work: list[tuple[int, int]], held: HeldWeights) -> float:
        options = {"dtype": "float32", "kv_dtype": "float32", "weights": held}
        return times.seconds(cost_of(found.config, work, **options), cpu)

    assert 2e-3 < seconds([(1, 100)], weights) < 30e-3
    assert 0.1 < seconds([(512, 512)], weights) < 2
    assert seconds([(1, 100)], dense) > 2 * seconds([(1, 100)], weights)
    assert seconds([(1, 8000)], weights) > seconds([(1, 100)], weights)


def test_a_cpu_starts_with_a_fit_and_a_gpu_with_launches() -> None:
    assert default_model(DEVICES["cpu"], "float32").kind == "predicted"
    assert default_model(DEVICES["cpu"], "bfloat16").kind == "estimate"
    assert default_model(DEVICES["h200"], "bfloat16").kind == "predicted"
    assert default_model(DEVICES["h200"], "bfloat16").layer > 0

"""Plans: users, budgets, targets, options, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stairs.config import ModelConfig
from stairs.errors import ConfigError
from stairs.planner.options import PlanOptions, parse_targets
from stairs.planner.phases import phases, time_per_token, time_to_first_token
from stairs.planner.plan import Plan, evaluate
from stairs.planner.targets import devices_needed, judge_targets

Plans = Callable[..., Plan]


def test_users_that_fit_alone_and_sharing(plan_for: Plans) -> None:
    apart = plan_for("llama-3.1-8b", max_model_len=8192).answer
    sharing = plan_for("llama-3.1-8b", max_model_len=8192, system_prompt_tokens=2000).answer
    assert apart.users == apart.users_apart == 109
    assert sharing.users_apart == 109 < sharing.users


def test_a_batch_is_what_was_asked_or_64_and_never_more_than_fits(plan_for: Plans) -> None:
    assert plan_for("llama-3.1-8b", max_model_len=8192).answer.setting.batch == 64
    assert plan_for("llama-3.1-8b", max_model_len=8192, users=3).answer.setting.batch == 3
    crowd = plan_for("llama-3.1-8b", max_model_len=8192, users=5000).answer
    assert crowd.setting.batch == crowd.users < 110


def test_what_does_not_fit_says_how_many_cards_it_takes(plan_for: Plans) -> None:
    plan = plan_for("deepseek-v3", max_model_len=8192)
    assert plan.answer.users == 0
    assert plan.answer.memory.pool_bytes < 0
    needed = devices_needed(plan.config, plan.options)
    assert needed == 8
    assert evaluate(plan.config, plan.options, devices=8).users >= 1
    assert evaluate(plan.config, plan.options, devices=4).users == 0


def test_dtypes(plan_for: Plans) -> None:
    assert plan_for("gpt2").answer.setting.dtype == "bfloat16"  # its config says none
    assert plan_for("gpt2", gpu="cpu").answer.setting.dtype == "float32"
    assert plan_for("gpt2", dtype="float32").answer.setting.kv_dtype == "float32"
    assert plan_for("gpt2", kv_cache_dtype="int8").answer.setting.kv_itemsize == 1


def test_phases_are_the_ones_named(plan_for: Plans) -> None:
    plan = plan_for("llama-3.1-8b", max_model_len=8192, users=4)
    rows = {phase.name: phase for phase in phases(plan.answer.setting)}
    assert list(rows) == [
        "training step, 1 x 8192",
        "prefill at once",
        "last chunk of 512",
        "decode, 1 user",
        "decode, 4 users",
        "decode, 4 users, and a chunk",
    ]
    chunk, four, mixed = list(rows.values())[2], list(rows.values())[4], list(rows.values())[5]
    assert mixed.largest_step == chunk.largest_step + four.largest_step
    assert chunk.largest_step == 512 * 8192
    # The weights are read once for both; their attention adds.
    assert mixed.cost.groups["linear"].moved < (
        chunk.cost.groups["linear"].moved + four.cost.groups["linear"].moved
    )
    attention = [phase.cost.groups["attention"].flop for phase in (chunk, four, mixed)]
    assert attention[2] == attention[0] + attention[1]
    # Seven tenths of a training step's stored bytes are weights, gradients and Adam's state.
    assert rows["training step, 1 x 8192"].stored > 16 * 8_030_261_248


def test_a_training_step_is_three_forwards(plan_for: Plans) -> None:
    setting = plan_for("gpt2").answer.setting
    step = next(phase for phase in phases(setting) if phase.name.startswith("training"))
    forward = setting.step([(1024, 1024)], logits_rows=1024)
    assert step.cost.flop == 3 * forward.flop


def test_times_grow_with_company_and_shrink_with_hits(plan_for: Plans) -> None:
    setting = plan_for("llama-3.1-8b", max_model_len=8192).answer.setting
    alone = time_to_first_token(setting, 4096)
    assert time_to_first_token(setting, 4096, beside=8) > alone
    assert time_to_first_token(setting, 4096, cached=4000) < alone / 5
    assert time_per_token(setting, batch=8, chunk=False) > time_per_token(
        setting, batch=1, chunk=False
    )
    assert time_per_token(setting, batch=8, chunk=True) > time_per_token(
        setting, batch=8, chunk=False
    )


def test_the_recommended_budget_hides_reading_the_weights(plan_for: Plans) -> None:
    plan = plan_for("llama-3.1-8b", max_model_len=8192)
    assert plan.budget.tokens == 256  # the first multiple of 128 past the ridge of 171 FLOP/B
    assert "hides reading the weights" in plan.budget.reason
    # A CPU's ridge is 5 FLOP/B: one chunk is enough.
    assert plan_for("llama-3.1-8b", gpu="cpu", max_model_len=8192).budget.tokens == 128


def test_a_targets_budget_is_the_least_that_meets_it(plan_for: Plans) -> None:
    plan = plan_for("llama-3.1-8b", max_model_len=8192, users=64, targets={"ttft": 0.4})
    size = plan.budget.tokens

    def ttft(budget: int) -> float:
        setting = replace(plan.answer.setting, budget=budget)
        return time_to_first_token(setting, 8192, beside=63)

    assert ttft(size) <= 0.4 < ttft(size - 128 if size <= 512 else size * 2 // 3)
    plan = plan_for("llama-3.1-8b", max_model_len=8192, users=64, targets={"tpot": 0.03})
    size = plan.budget.tokens
    setting = plan.answer.setting
    assert time_per_token(replace(setting, budget=size), batch=64, chunk=True) <= 0.03
    assert time_per_token(replace(setting, budget=2 * size), batch=64, chunk=True) > 0.03


def test_each_change_meets_its_target_by_itself(plan_for: Plans) -> None:
    plan = plan_for(
        "llama-3.1-8b",
        max_model_len=8192,
        users=100,
        system_prompt_tokens=2000,
        targets={"users": 200, "ttft": 0.3, "tpot": 0.025},
    )
    flags = {
        "--kv-cache-dtype": lambda o, v: replace(o, kv_cache_dtype=v),
        "--max-num-batched-tokens": lambda o, v: replace(o, max_num_batched_tokens=int(v)),
        "--max-model-len": lambda o, v: replace(o, max_model_len=int(v)),
        "--gpu": lambda o, v: replace(o, gpu=v),
    }
    seen = set()
    for outcome in judge_targets(plan):
        assert not outcome.met
        assert outcome.changes
        for change in outcome.changes:
            flag, _, value = change.what.partition(" ")
            seen.add(flag)
            if flag == "h200":  # "h200 x 2"
                answer = evaluate(plan.config, plan.options, devices=int(value.split()[-1]))
            else:
                answer = evaluate(plan.config, flags[flag](plan.options, value))
            figure = {"users": answer.users, "ttft": answer.ttft, "tpot": answer.tpot}
            assert figure[outcome.name] == change.value
            met = change.value >= outcome.target
            assert met if outcome.name == "users" else change.value <= outcome.target
    assert {"--kv-cache-dtype", "--max-model-len", "h200"} <= seen


def test_a_smaller_card_is_no_way_to_be_quicker(plan_for: Plans) -> None:
    """An h100 holds fewer users, so each of them waits less: that is not what was asked."""
    plan = plan_for("llama-3.1-8b", max_model_len=8192, users=100, targets={"ttft": 0.3})
    (outcome,) = judge_targets(plan)
    assert "--gpu h100" not in [change.what for change in outcome.changes]


def test_the_longest_context_that_meets_a_target_is_found(plan_for: Plans) -> None:
    plan = plan_for("llama-3.1-8b", max_model_len=8192, targets={"users": 150})
    (outcome,) = judge_targets(plan)
    what = next(c.what for c in outcome.changes if c.what.startswith("--max-model-len"))
    length = int(what.split()[1])
    assert length % 128 == 0
    assert evaluate(plan.config, replace(plan.options, max_model_len=length)).users >= 150
    assert evaluate(plan.config, replace(plan.options, max_model_len=length + 128)).users < 150


def test_a_met_target_needs_no_change(plan_for: Plans) -> None:
    plan = plan_for("gpt2", targets={"users": 10, "ttft": 60.0})
    for outcome in judge_targets(plan):
        assert outcome.met
        assert outcome.changes == ()


def test_an_impossible_target_has_none(plan_for: Plans) -> None:
    (outcome,) = judge_targets(plan_for("deepseek-v3", gpu="4090", targets={"ttft": 1e-6}))
    assert not outcome.met
    assert outcome.changes == ()


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"max_model_len": 0}, "max_model_len", "at least 1"),
        ({"users": 0}, "users", "at least 1"),
        ({"users": -3}, "users", "-3"),
        ({"system_prompt_tokens": -1}, "system_prompt_tokens", "at least 0"),
        ({"max_num_batched_tokens": 500}, "max_num_batched_tokens", "multiple of"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", "at least 1"),
        ({"block_size": 48}, "prefill_chunk_size", "multiple of block_size 48"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization", r"\(0, 1\]"),
        ({"dtype": "int3"}, "dtype", "float32"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype", "fp8"),
    ],
)
def test_nonsense_options_are_named(options: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        PlanOptions(**options)  # type: ignore[arg-type]
    assert refused.value.param == param
    assert "\n" not in str(refused.value)


def test_limits_of_the_model_and_unknown_cards(model: Callable[[str], ModelConfig]) -> None:
    gpt2 = model("gpt2")
    for options, param in (
        ({"max_model_len": 1025}, "max_model_len"),
        ({"system_prompt_tokens": 1024}, "system_prompt_tokens"),
        ({"gpu": "tpu"}, "gpu"),
    ):
        with pytest.raises(ConfigError) as refused:
            evaluate(gpt2, PlanOptions(**options))  # type: ignore[arg-type]
        assert refused.value.param == param


def test_targets_are_parsed() -> None:
    assert parse_targets(["ttft=0.5s", "tpot=30ms", "users=200"]) == {
        "ttft": 0.5,
        "tpot": 0.03,
        "users": 200,
    }
    assert parse_targets([]) == {}


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=", "ttft=0.5", "ttft=0s", "ttft=1h", "speed=3", "users=0", "users=2.5"],
)
def test_a_nonsense_target_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="target") as refused:
        parse_targets([text])
    assert refused.value.param == "target"
    assert "\n" not in str(refused.value)

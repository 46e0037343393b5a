"""What each technique changes, and above all what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stairs.accounting import costs, traffic
from stairs.config import ModelConfig
from stairs.planner.phases import chunk_steps
from stairs.planner.plan import Plan
from stairs.planner.techniques import Effect, techniques

GIB = 2**30
Plans = Callable[..., Plan]


def effects(plan: Plan, technique: str) -> dict[str, Effect]:
    found = {
        effect.before.axis: effect
        for effect in techniques(plan.answer.setting)
        if effect.technique.startswith(technique)
    }
    assert found, f"no {technique}"
    return found


def test_the_kv_cache_trades_flops_for_stored_bytes(plan_for: Plans) -> None:
    found = effects(plan_for("gpt2"), "KV cache")
    assert found["FLOPs"].factor is not None
    assert 1 / found["FLOPs"].factor == pytest.approx(679, abs=1)
    assert (found["stored bytes"].before.value, found["stored bytes"].after.value) == (
        0,
        36 * 2**20,
    )
    assert found["stored bytes"].factor is None


def test_gpt2s_1024th_token_costs_746_times_less_as_full_squares_count(
    model: Callable[[str], ModelConfig],
) -> None:
    config = model("gpt2")
    without = costs.step_macs(config, [(1024, 1024)], logits_rows=1, convention="square")
    cached = costs.step_macs(config, [(1, 1024)], logits_rows=1, convention="square")
    assert costs.flops(without) // costs.flops(cached) == 746


def test_chunks_leave_flops_alone_and_read_more(plan_for: Plans) -> None:
    plan = plan_for("llama-3.1-8b", max_model_len=8192)
    found = effects(plan, "prefill in steps")
    assert found["FLOPs"].before == found["FLOPs"].after
    assert found["count"].before.value == 67_108_864
    assert found["count"].after.value == 4_194_304
    assert found["stored bytes"].factor == 512 / 8192
    assert (found["moved bytes"].factor or 0) > 1


def test_chunks_re_read_k_and_v_8_5_times_and_weights_once_each(plan_for: Plans) -> None:
    setting = plan_for("llama-3.1-8b", max_model_len=8192).answer.setting
    steps = chunk_steps(setting, 8192)
    read = sum(traffic.kv_bytes_read(setting.config, *step, 2) for step in steps)
    assert read == 8.5 * GIB
    assert traffic.kv_bytes_read(setting.config, 8192, 8192, 2) == GIB
    weights = [
        traffic.step_moved_bytes(
            setting.config,
            [step],
            logits_rows=1,
            weights=setting.weights,
            itemsize=2,
            kv_itemsize=2,
        )
        for step in steps
    ]
    assert round(sum(w["weights"] + w["head"] for w in weights) / 1e9) == 240


def test_flash_attention_moves_less_and_computes_the_same(plan_for: Plans) -> None:
    found = effects(plan_for("llama-3.1-8b", max_model_len=32768), "FlashAttention")
    assert found["FLOPs"].before == found["FLOPs"].after
    assert found["stored bytes"].before.value == 32 * 2 * GIB  # every head of one layer
    assert found["stored bytes"].after.value == 0
    moved = found["moved bytes"]
    assert moved.before.kind == "bound"
    assert 1 / (moved.factor or 1) == pytest.approx(4, rel=0.01)  # 2 to 4 times, never 9


def test_fewer_kv_heads_store_and_read_less_and_save_only_two_projections(
    plan_for: Plans,
) -> None:
    plan = plan_for("llama-3.1-8b", max_model_len=8192)
    for name, share in (("MHA to GQA of 8 heads", 1 / 4), ("MHA to MQA", 1 / 32)):
        found = effects(plan, name)
        assert [found[axis].factor for axis in ("stored bytes", "moved bytes", "FLOPs")] == [
            share
        ] * 3
    own = effects(plan, "MHA to GQA")["stored bytes"].after.value
    assert own == plan.answer.setting.kv_bytes(8192)
    assert not [e for e in techniques(plan_for("gpt2").answer.setting) if "GQA" in e.technique]


def test_latent_attention_stores_less_and_computes_more(plan_for: Plans) -> None:
    found = effects(plan_for("deepseek-v3", max_model_len=8192), "MHA to MLA")
    assert round(1 / (found["stored bytes"].factor or 1)) == 71
    assert round(found["FLOPs"].factor or 0, 1) == 3.4


def test_a_latent_is_absorbed_to_decode_and_expanded_to_prefill(plan_for: Plans) -> None:
    setting = plan_for("deepseek-v3", max_model_len=8192).answer.setting
    decode, prefill = [
        effect
        for effect in techniques(setting)
        if effect.technique == "MLA expanded to absorbed" and effect.before.axis == "FLOPs"
    ]
    assert (decode.factor or 1) < 1 / 50
    assert 2 < (prefill.factor or 0) < 3.4
    macs = {
        form: costs.flops(costs.step_macs(setting.config, [(8192, 8192)], logits_rows=1, form=form))
        for form in ("absorbed", "expanded")
    }
    assert setting.step([(8192, 8192)], logits_rows=1).flop == min(macs.values())
    assert min(macs, key=macs.__getitem__) == "expanded"


def test_a_shared_prefix_saves_the_prompts_rows_and_all_but_one_copy(plan_for: Plans) -> None:
    plan = plan_for("llama-3.1-8b", max_model_len=8192, users=10, system_prompt_tokens=6000)
    found = effects(plan, "shared prefix of 6000")
    linear = 2 * sum(costs.linear_macs(plan.config).values())
    pairs = 4 * 32 * 32 * 128
    assert found["FLOPs"].before.value == 8192 * linear + 33_558_528 * pairs
    assert found["FLOPs"].after.value == 2192 * linear + 15_555_528 * pairs
    assert found["stored bytes"].before.value == 10 * GIB
    assert found["stored bytes"].after.value == 10 * GIB - 9 * 6000 * 128 * 1024


def test_paging_stores_what_is_used_and_moves_a_table_more(plan_for: Plans) -> None:
    found = effects(plan_for("llama-3.1-8b", max_model_len=8000), "paging")
    assert found["FLOPs"].before == found["FLOPs"].after
    assert found["stored bytes"].factor == 0.5
    assert (found["moved bytes"].after.value or 0) - (found["moved bytes"].before.value or 0) == (
        4 * 250
    )


def test_8_bit_kv_halves_what_is_stored_and_leaves_flops(plan_for: Plans) -> None:
    for options in ({}, {"kv_cache_dtype": "fp8"}):
        found = effects(
            plan_for("llama-3.1-8b", max_model_len=8192, **options), "K/V from bfloat16"
        )
        assert found["FLOPs"].before == found["FLOPs"].after
        assert found["stored bytes"].factor == 0.5
        assert 0.5 < (found["moved bytes"].factor or 0) < 1


@pytest.mark.parametrize("name", ["gpt2", "gemma-3-27b-it", "gpt-oss-20b", "deepseek-v3"])
def test_every_technique_speaks_of_three_axes(plan_for: Plans, name: str) -> None:
    by_technique: dict[str, set[str]] = {}
    for effect in techniques(plan_for(name, max_model_len=1000).answer.setting):
        by_technique.setdefault(effect.technique, set()).add(effect.before.axis)
        assert effect.before.axis == effect.after.axis
        assert effect.before.unit == effect.after.unit
    for axes in by_technique.values():
        assert axes >= {"FLOPs", "stored bytes", "moved bytes"}
    assert len(by_technique) >= 8

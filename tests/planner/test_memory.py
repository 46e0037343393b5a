"""Memory and users: published examples, and the traps other planners fell into."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stairs.accounting import costs
from stairs.accounting.hardware import DEVICES, Device
from stairs.accounting.weights import dense_weights
from stairs.attention.tiles import CARDS
from stairs.config import ModelConfig
from stairs.engine.resolve import CPU_POOL_FRACTION
from stairs.planner import memory as planned
from stairs.planner.memory import (
    activation_peak,
    most_partial_bytes,
    peak_bytes,
    plan_memory,
    users_that_fit,
)

GIB, MIB = 2**30, 2**20
Configs = Callable[[str], ModelConfig]


def fit(config: ModelConfig, pool: int, context: int, **options: int) -> int:
    asked = {"kv_itemsize": 2, "block_size": 16} | options
    return users_that_fit(config, pool, context=context, **asked)


def test_llama_8b_on_an_h200_holds_108_users_at_8k(model: Configs) -> None:
    """140.4 GiB at 0.9, less weights and 3 GiB of the rest: 108 GiB, 888k tokens."""
    config = model("llama-3.1-8b")
    pool = int(0.9 * 140.4 * GIB) - 2 * 8_030_261_248 - 3 * GIB
    assert pool // GIB == 108
    assert pool // costs.kv_bytes_per_token(config, 2) // 1000 == 888
    assert fit(config, pool, 8192) == 108


def test_sharing_a_system_prompt_stores_its_whole_blocks_once(model: Configs) -> None:
    config = model("llama-3.1-8b")
    pool = 108 * GIB
    shared = 2000 * 128 * 1024  # 125 blocks of 16
    assert fit(config, pool, 8192, shared=2000) == (pool - shared) // (GIB - shared)
    assert fit(config, pool, 8192, shared=2015) == fit(config, pool, 8192, shared=2000)
    assert fit(config, pool, 8192, shared=15) == fit(config, pool, 8192)
    assert fit(config, shared - 1, 8192, shared=2000) == 0


def test_users_are_counted_in_whole_blocks(model: Configs) -> None:
    config = model("llama-3.1-8b")
    block = 16 * 128 * 1024
    assert fit(config, 10 * block, 33) == 3  # three blocks each, one left over
    assert fit(config, 3 * block - 1, 33) == 0
    assert fit(config, -5, 33) == 0


def test_a_window_bounds_what_a_user_holds_and_shares(model: Configs) -> None:
    config = model("gpt-oss-20b")
    each = 12 * 2048 * 8192 + 12 * 2048 * 128
    assert fit(config, 32 * each, 8192) == 32
    assert fit(config, 32 * each - 1, 8192) == 31
    shared = 12 * 2048 * 4096  # the windowed layers have dropped it
    assert fit(config, 32 * each, 8192, shared=4096) == (32 * each - shared) // (each - shared)


def test_activation_terms_of_llama_8b_at_8192(model: Configs) -> None:
    config = model("llama-3.1-8b")
    parts = activation_peak(config, tokens=8192, logits_rows=256, itemsize=2)
    assert parts["residual"] == 64 * MIB
    assert parts["mlp"] == (448 + 224) * MIB  # gate and up, and their product
    assert parts["attention"] == 8192 * 80 * 128 * 2
    # fp32 logits of 256 rows are 125 MiB, of all rows 3.9 GiB; their 16-bit form comes on top.
    assert round(256 * 128256 * 4 / MIB) == 125
    assert parts["logits"] == 256 * 128256 * 6
    every = activation_peak(config, tokens=8192, logits_rows=8192, itemsize=2)["logits"]
    assert round(every * 4 / 6 / GIB, 1) == 3.9
    assert peak_bytes(parts) == parts["residual"] + parts["mlp"]


def test_experts_activate_what_a_token_visits(model: Configs) -> None:
    mixtral = activation_peak(model("mixtral-8x7b-v0.1"), tokens=10, logits_rows=1, itemsize=2)
    assert mixtral["mlp"] == 10 * 3 * 2 * 14336 * 2
    deepseek = activation_peak(model("deepseek-v3"), tokens=10, logits_rows=1, itemsize=2)
    assert deepseek["mlp"] == 10 * 3 * max(18432, 9 * 2048) * 2


def test_the_parts_of_a_cards_memory_add_up(model: Configs) -> None:
    memory = plan_memory(
        model("llama-3.1-8b"),
        DEVICES["h200"],
        weights=dense_weights(model("llama-3.1-8b"), 2),
        dtype="bfloat16",
        step_tokens=576,
        max_num_seqs=64,
        utilization=0.9,
        most_kv=0,
    )
    parts = (memory.weights, memory.activations, memory.workspace, memory.pool)
    assert sum(int(part.value or 0) for part in parts) == memory.usable.value
    assert memory.weights.value == 16_060_522_496
    assert memory.weights.kind == "exact"
    assert memory.workspace.kind == "estimate"


def test_the_workspace_counts_attentions_partial_results(model: Configs) -> None:
    """Llama 8B on 108 SMs: tall tiles of 128 rows, cut for 13 programs of each of 8 kv heads."""
    config, card = model("llama-3.1-8b"), DEVICES["a100"]
    most = most_partial_bytes(config, card, itemsize=2, num_tokens=576, num_seqs=64)
    assert most == (13 + 12 - 1) * 8 * 128 * (128 + 1) * 4
    workspace = plan_memory(
        config, card, weights=dense_weights(config, 2), dtype="bfloat16", step_tokens=576,
        max_num_seqs=64, utilization=0.9, most_kv=0, devices=2,
    ).workspace  # fmt: skip
    assert workspace.value == 2 * (planned.GPU_OVERHEAD_BYTES + most)
    assert workspace.source.startswith("context, libraries, graphs: 4 GiB assumed")
    assert workspace.source.endswith("attention's partial results: at most 24.19 MiB")
    for device in DEVICES.values():  # one decode in as many pieces as fit a card at a time
        if not device.is_cpu:
            alone = most_partial_bytes(config, device, itemsize=2, num_tokens=1, num_seqs=1)
            assert device.units // 8 * 16 * 8 * 129 * 4 <= alone


@pytest.mark.parametrize(
    "device", [row for row in DEVICES.values() if not row.is_cpu], ids=lambda row: row.name
)
def test_the_planners_cards_are_the_kernels(device: Device) -> None:
    assert device.capability is not None
    assert CARDS[device.capability].shared == device.tile_memory.value


def test_a_cpus_pool_is_the_engines_share_of_what_is_free(
    model: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "available_memory", lambda: 16 * GIB)

    def pool(most_kv: int) -> int:
        return plan_memory(
            model("smollm2"),
            DEVICES["cpu"],
            weights=dense_weights(model("smollm2"), 4),
            dtype="float32",
            step_tokens=576,
            max_num_seqs=64,
            utilization=0.9,
            most_kv=most_kv,
        ).pool_bytes

    assert pool(10**15) == 16 * GIB * CPU_POOL_FRACTION
    assert pool(GIB) == GIB

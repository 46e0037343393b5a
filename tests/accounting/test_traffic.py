"""Moved bytes: kernel lists, the tile form, and a decode step written out by hand."""

from __future__ import annotations

from stairs.accounting import costs, traffic
from stairs.accounting.weights import dense_weights
from stairs.config import ModelConfig

GIB = 2**30
N = 32_768


def test_trips_are_a_kernel_list_not_a_constant() -> None:
    assert traffic.score_traffic(traffic.STANDARD_KERNELS, N * N, 2) == 4 * N * N * 2
    assert traffic.score_traffic(traffic.MASKED_KERNELS, N * N, 2) == 6 * N * N * 2
    assert traffic.score_traffic(traffic.EAGER_KERNELS, 1, 2) == 24
    assert len(traffic.STANDARD_KERNELS) == 3


def test_standard_attention_at_32k_moves_8_gib_a_head_and_tiles_2_to_4() -> None:
    standard = traffic.materialised_bytes(N, N, 128, 2)
    assert standard - traffic.compulsory_bytes(N, N, 128, 2) == 8 * GIB
    full = traffic.tile_bytes(N, N, 128, 2, q_tile=128, causal=False)
    assert full - 2 * N * 128 * 2 == 4 * GIB
    causal = traffic.tile_bytes(N, N, 128, 2, q_tile=128, causal=True)
    assert round(causal / GIB, 1) == 2.0


def test_one_query_tile_is_compulsory() -> None:
    assert traffic.tile_bytes(64, 500, 128, 2, q_tile=64, causal=True) == traffic.compulsory_bytes(
        64, 500, 128, 2
    )


def test_tile_executed_pairs() -> None:
    assert traffic.tile_pairs(8192, 8192, q_tile=128, k_tile=128) == 34_078_720
    assert round(traffic.tile_pairs(1024, 1024, q_tile=192, k_tile=128) / 524_800, 2) == 1.50


def test_llama_decode_moves_16_gb_and_does_one_flop_a_byte(llama_8b: ModelConfig) -> None:
    moved = traffic.step_moved_bytes(
        llama_8b,
        [(1, 8192)],
        logits_rows=1,
        weights=dense_weights(llama_8b, 2),
        itemsize=2,
        kv_itemsize=2,
    )
    without_activations = sum(moved.values()) - moved["activations"]
    assert round(without_activations / 1e9, 2) == 16.08
    macs = costs.step_macs(llama_8b, [(1, 8192)], logits_rows=1)
    assert round(costs.flops(macs) / without_activations, 1) == 1.2
    assert moved["kv_read"] == 2**30
    assert moved["kv_written"] == 128 * 1024
    assert moved["scores"] == 0


def test_materialised_scores_and_activations_are_lines_of_their_own(gpt2: ModelConfig) -> None:
    moved = traffic.step_moved_bytes(
        gpt2,
        [(4, 10), (1, 7)],
        logits_rows=2,
        weights=dense_weights(gpt2, 4),
        itemsize=4,
        kv_itemsize=4,
        score_kernels=traffic.STANDARD_KERNELS,
    )
    assert moved["scores"] == 4 * 4 * 12 * 12 * (4 * 10 + 1 * 7)
    # norm, qkv, attention, o, residual, norm, up, activation, down, residual, in units of 768
    per_layer = 2 + 4 + 4 + 2 + 3 + 2 + 5 + 8 + 5 + 3
    assert moved["activations"] == 5 * 12 * per_layer * 768 * 4
    assert moved["logits"] == 2 * 50257 * 4
    assert moved["head"] == 768 * 50257 * 4


def test_a_step_without_logits_reads_no_head(gpt2: ModelConfig) -> None:
    moved = traffic.step_moved_bytes(
        gpt2, [(4, 4)], logits_rows=0, weights=dense_weights(gpt2, 4), itemsize=4, kv_itemsize=4
    )
    assert (moved["head"], moved["logits"]) == (0, 0)

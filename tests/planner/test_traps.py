"""What other planners got wrong (research: each was seen in a named tool), one test a trap."""

from __future__ import annotations

from collections.abc import Callable

from stairs.accounting import costs, traffic
from stairs.accounting.hardware import DEVICES
from stairs.accounting.record import Phase
from stairs.accounting.table import show
from stairs.accounting.weights import dense_weights
from stairs.cache.blocks import BlockPool
from stairs.cache.prefix import PrefixCache
from stairs.checkpoints.planned import read_any_config
from stairs.config import CacheConfig, EngineConfig, ModelConfig, SamplingParams
from stairs.engine.scheduler import Scheduler
from stairs.engine.sequence import Sequence
from stairs.planner.catalogue import CATALOGUE
from stairs.planner.plan import Plan

Configs = Callable[[str], ModelConfig]


def test_head_dim_is_read_not_divided(model: Configs) -> None:
    config = model("qwen3-0.6b")
    assert config.head_dim == 128 != config.hidden_size // config.num_heads
    assert costs.kv_bytes_per_token(config, 2) == 112 * 1024


def test_latent_values_are_not_bytes_and_have_no_factor_2(model: Configs) -> None:
    config = model("deepseek-v3")
    assert costs.kv_values_per_token(config) == 576
    assert costs.kv_bytes_per_token(config, 2) == 61 * 1152
    generic = 2 * config.num_layers * 128 * (7168 // 128) * 2  # hidden / heads, kv heads, a 2
    assert round(generic / costs.kv_bytes_per_token(config, 2)) == 25


def test_counting_t_times_c_makes_chunking_look_like_a_saving() -> None:
    exact = costs.causal_pairs(8192, 8192)
    excess = {
        chunk: sum(costs.square_pairs(*step) for step in costs.prefill_steps(8192, chunk=chunk))
        / exact
        - 1
        for chunk in (8192, 2048, 512)
    }
    assert [round(100 * value) for value in excess.values()] == [100, 25, 6]


def test_flash_attention_writes_its_output_once_not_n_times() -> None:
    """Outputs and queries grow with n; only K and V are read again for each query tile."""
    n, d = 4096, 128
    moved = traffic.tile_bytes(n, n, d, 2, q_tile=n, causal=False)
    assert moved == 4 * n * d * 2


def test_k_and_v_use_kv_heads(model: Configs) -> None:
    config = model("llama-3.1-8b")
    read = traffic.kv_bytes_read(config, 1, 1000, 2)
    assert read == 1000 * 2 * 32 * 8 * 128 * 2


def test_a_decode_reads_the_cache_and_writes_one_token(model: Configs) -> None:
    moved = traffic.step_moved_bytes(
        config := model("llama-3.1-8b"),
        [(1, 8192)],
        logits_rows=1,
        weights=dense_weights(config, 2),
        itemsize=2,
        kv_itemsize=2,
    )
    assert moved["kv_read"] == 8192 * moved["kv_written"]


def test_kv_does_not_scale_with_packed_weights(model: Configs) -> None:
    packed = dict(CATALOGUE["openai/gpt-oss-20b"])
    plain = packed | {"quantization_config": None}
    kv = [costs.kv_sequence_bytes(read_any_config(raw), 8192, 2) for raw in (packed, plain)]
    assert kv[0] == kv[1]
    llama = costs.kv_sequence_bytes(model("llama-3.1-8b"), 8192, 2)
    assert round(llama / 1e9, 1) == 1.1  # and not the 11.5 of a planner that scales with size


def test_kv_dtype_is_not_the_weights_dtype(plan_for: Callable[..., Plan]) -> None:
    wide, narrow = (
        plan_for("llama-3.1-8b", max_model_len=8192, kv_cache_dtype=dtype).answer
        for dtype in ("auto", "fp8")
    )
    assert wide.memory.weights == narrow.memory.weights
    assert narrow.setting.kv_bytes(8192) * 2 == wide.setting.kv_bytes(8192)


def test_the_pools_tokens_are_not_users(plan_for: Callable[..., Plan]) -> None:
    answer = plan_for("llama-3.1-8b", max_model_len=8192).answer
    tokens = answer.memory.pool_bytes // costs.kv_bytes_per_token(answer.setting.config, 2)
    assert answer.users_apart == tokens // 8192 < tokens


def test_a_one_token_chunk_is_prefill() -> None:
    assert costs.prefill_steps(513, chunk=512)[-1] == (1, 513)
    config = EngineConfig(
        prefill_chunk_size=16, max_num_batched_tokens=16, cache=CacheConfig(num_blocks=8)
    )
    pool = BlockPool(8)
    scheduler = Scheduler(config, pool, PrefixCache(pool, 16))
    scheduler.add(
        Sequence(
            request=0,
            tokens=list(range(17)),
            sampling=SamplingParams(),
            max_tokens=1,
            stop_ids=frozenset(),
            seed=0,
        )
    )
    scheduler.commit(scheduler.schedule(), [])
    (item,) = scheduler.schedule().work
    assert (item.num_new, item.phase) == (1, Phase.PREFILL)


def test_peaks_without_sparsity_gb_and_gib_mac_and_flop() -> None:
    assert all(
        device.matmul["bfloat16"].value < 1e15
        for device in DEVICES.values()
        if "bfloat16" in device.matmul
    )
    assert show(100 * 36 * 2**20, "B", "both") == "3,600 MiB (3.77 GB)"
    assert show(2e9, "FLOP", "both") == "2 GFLOP (1 GMAC)"


def test_a_kernels_padded_tiles_are_not_the_models_pairs() -> None:
    """One decoding row fills one of 64 rows of a tensor-core tile."""
    assert traffic.tile_pairs(1, 8192, q_tile=64, k_tile=128) == 64 * costs.causal_pairs(1, 8192)


def test_llama_7b_of_128_tokens_is_1700_gflop() -> None:
    config = read_any_config(
        {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "rms_norm_eps": 1e-5,
            "vocab_size": 32000,
        }
    )
    macs = costs.step_macs(config, [(128, 128)], logits_rows=128, convention="square")
    assert round(costs.flops(macs) / 1e9, 2) == 1700.00
    assert round(costs.kv_sequence_bytes(config, 8192, 2) / 1e9, 1) == 4.3

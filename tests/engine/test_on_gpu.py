"""The engine on a GPU: the CPU's tokens, its memory as the card says, nothing that runs out."""

from __future__ import annotations

import random

import pytest
import torch

from harness import GREEDY, Tiny, generate, run_all
from stairs.config import CacheConfig, EngineConfig, SamplingParams
from stairs.engine.build import build_engine
from stairs.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def make_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(211) for _ in range(length)]


PROMPTS = [make_prompt(i, n) for i, n in enumerate((1, 17, 130, 300, 600))]


@pytest.mark.parametrize("backend", ["auto", "online"])
def test_the_cpu_s_greedy_tokens(tiny: Tiny, backend: str) -> None:
    on_cpu = tiny.engine(dtype="float32", device="cpu")
    on_gpu = tiny.engine(dtype="float32", device="cuda", attention_backend=backend)
    expected = [generate(on_cpu, prompt) for prompt in PROMPTS]
    assert [generate(on_gpu, prompt) for prompt in PROMPTS] == expected
    requests = [on_gpu.add(prompt, GREEDY) for prompt in PROMPTS]  # all at once, prefixes cached
    answers = run_all(on_gpu)
    assert [answers[request] for request in requests] == expected
    assert on_gpu.kv.layers[0].k.is_cuda


def test_float64_runs_in_torch(tiny: Tiny) -> None:
    expected = generate(tiny.engine(device="cpu"), PROMPTS[2])
    assert generate(tiny.engine(device="cuda"), PROMPTS[2]) == expected


def test_counters_equal_predictions(tiny: Tiny) -> None:
    engine = tiny.engine(dtype="bfloat16", device="cuda")
    engine.count_visits()
    for prompt in PROMPTS:
        engine.add(prompt, GREEDY)
    run_all(engine)
    total = engine.ledger.total
    assert total.pairs == total.pairs_counted > 0
    assert total.kv_bytes_read == total.kv_bytes_read_counted
    assert total.kv_bytes_written == total.kv_bytes_written_counted


def test_seeded_answers_do_not_depend_on_company(tiny: Tiny) -> None:
    engine = tiny.engine(dtype="float32", device="cuda")
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12, logprobs=3)
    alone = generate(engine, PROMPTS[3], sampling)
    requests = [engine.add(prompt, sampling) for prompt in PROMPTS]
    assert run_all(engine)[requests[3]] == alone


def test_the_pool_is_what_is_left_and_can_be_used_whole(tiny: Tiny) -> None:
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 6 * 2**30) / total
    config = EngineConfig(device="cuda", gpu_memory_utilization=share, max_num_seqs=256)
    engine = build_engine(tiny.config, tiny.source, config)
    capacity = engine.capacity
    assert capacity is not None
    assert capacity.pool == engine.kv.nbytes
    assert capacity.in_use <= capacity.usable <= total
    assert capacity.pool > 0.9 * (5 * 2**30)
    left = torch.cuda.mem_get_info()[0]
    assert abs((total - left) - (capacity.in_use - capacity.step)) <= 0.05 * capacity.in_use
    # 95 % of the blocks in use by requests of every length.
    count = int(engine.pool.num_blocks * 0.95) * 16 // 900
    for i in range(min(count, 300)):
        engine.add(make_prompt(i, 880), SamplingParams(temperature=1.0, max_tokens=20))
    run_all(engine)
    used = total - torch.cuda.mem_get_info()[0]
    assert used <= capacity.usable * 1.01
    assert len(capacity.lines()) == 5


def test_what_does_not_fit_is_refused_before_the_pool(tiny: Tiny) -> None:
    cache = CacheConfig(memory_bytes=2**42)
    with pytest.raises(ConfigError, match=r"K/V blocks take 4096\.00 GiB") as refused:
        build_engine(tiny.config, tiny.source, EngineConfig(device="cuda", cache=cache))
    assert refused.value.param == "kv_cache_memory_bytes"
    with pytest.raises(ConfigError, match=r"0\.00 GiB are left of .*gpu_memory_utilization"):
        build_engine(
            tiny.config, tiny.source, EngineConfig(device="cuda", gpu_memory_utilization=0.001)
        )


def test_bfloat16_is_the_default(tiny: Tiny) -> None:
    engine = tiny.engine(dtype="auto", num_blocks=64)
    assert engine.config.device == "cuda" and engine.config.dtype == "bfloat16"
    assert engine.kv.layers[0].k.dtype == torch.bfloat16

"""Engine against plan on the CPU: five models, ten workloads; K/V bytes, blocks and pairs equal."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from stairs.accounting import costs
from stairs.checkpoints.configs import read_config
from stairs.checkpoints.dummy import DummyTensors
from stairs.config import CacheConfig, EngineConfig, ModelConfig
from stairs.engine.build import build_engine
from stairs.engine.core import Engine
from stairs.planner.catalogue import CATALOGUE
from stairs.planner.replay import Request, replay
from stairs.planner.verify import predict, standard_rounds, verify

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
}


def config(name: str, **changes: object) -> ModelConfig:
    return read_config(dict(CATALOGUE[name]) | changes)


MODELS = {
    "gpt2, MHA": config(
        "openai-community/gpt2", n_embd=48, n_head=4, n_layer=3, n_positions=512, vocab_size=101
    ),
    "llama, GQA": config("meta-llama/Llama-3.1-8B", **SMALL),
    "llama, MQA": config("meta-llama/Llama-3.1-70B", **SMALL | {"num_key_value_heads": 1}),
    "qwen3, wide heads": config("Qwen/Qwen3-0.6B", **SMALL, head_dim=16, max_window_layers=2),
    "mistral, inside its window": config("mistralai/Mistral-7B-v0.1", **SMALL, sliding_window=512),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products: handing them to more threads costs more than doing them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 101), k=length)


@dataclass(frozen=True)
class Workload:
    rounds: tuple[tuple[Request, ...], ...]
    pinned: tuple[int, ...] = ()
    num_blocks: int = 128
    dtype: str = "float32"
    kv_dtype: str = "auto"
    chunk: int = 16
    caching: bool = True


ONE = Request(prompt(37), 5)
EIGHT = tuple(Request(prompt(20 + 11 * i, i), 3 + i) for i in range(8))
GROWING = tuple(Request(prompt(30, i), 40) for i in range(3))  # two blocks each, then five
SYSTEM = prompt(70, 99)
WORKLOADS = {
    "one short": Workload(((ONE,),)),
    "one of many chunks": Workload(((Request(prompt(300), 2),),)),
    "one token asked": Workload(((Request(prompt(33), 1),),)),
    "a one-token chunk": Workload(((Request(prompt(65), 4),),)),
    "eight at once": Workload((EIGHT,)),
    "the same twice": Workload(((ONE,), (ONE,))),
    "a pinned prompt shared by eight": Workload(
        (tuple(Request(SYSTEM + r.prompt, r.answer) for r in EIGHT),), pinned=tuple(SYSTEM)
    ),
    "a shared prompt, no cache": Workload(
        (tuple(Request(SYSTEM + r.prompt, r.answer) for r in EIGHT),), caching=False
    ),
    "a pool too small for all": Workload((GROWING,), num_blocks=9),
    "bf16 K/V under long chunks": Workload((EIGHT,), kv_dtype="bfloat16", chunk=64),
}


def engine_for(model: ModelConfig, load: Workload) -> Engine:
    cache = CacheConfig(
        num_blocks=load.num_blocks,
        dtype=load.kv_dtype,
        enable_prefix_caching=load.caching,
        pin_memory_fraction=0.5,
    )
    asked = EngineConfig(
        dtype=load.dtype,
        prefill_chunk_size=load.chunk,
        max_num_batched_tokens=4 * load.chunk,
        cache=cache,
    )
    return build_engine(model, DummyTensors(model), asked)


@pytest.mark.parametrize("load", WORKLOADS)
@pytest.mark.parametrize("model", MODELS)
def test_the_engine_does_what_was_planned(model: str, load: str) -> None:
    work = WORKLOADS[load]
    verdict = verify(engine_for(MODELS[model], work), work.rounds, pinned=work.pinned)
    wrong = [line for line in verdict.lines if not line.holds]
    assert not wrong, verdict.table().text()
    assert verdict.holds


def counted(load: str) -> dict[str, int]:
    work, model = WORKLOADS[load], MODELS["llama, GQA"]
    verdict = verify(engine_for(model, work), work.rounds, pinned=work.pinned)
    return {line.name: line.counted for line in verdict.lines}


def test_counters_equal_closed_forms_of_the_lengths_alone() -> None:
    """No scheduler in these: what the seeds' arithmetic says must be what the kernels visited."""
    eight = counted("eight at once")
    lengths = [(len(r.prompt), r.answer) for r in EIGHT]
    assert eight["pairs, prefill"] == sum(n * (n + 1) // 2 for n, _ in lengths)
    decodes = [context for n, a in lengths for _, context in costs.decode_steps(n, a)]
    assert eight["pairs, decode"] == sum(decodes)
    token = 2 * 2 * 2 * 8 * 4  # K and V, layers, kv heads, head_dim, fp32
    assert eight["K/V written"] == token * sum(n + a - 1 for n, a in lengths)
    assert eight["K/V pool"] == 128 * 16 * token

    pinned = counted("a pinned prompt shared by eight")
    hit = costs.prefix_hit(70, 100, block_size=16)
    assert pinned["K/V rows reused"] == 8 * hit == 8 * 64
    own = sum(costs.causal_pairs(70 + n - hit, 70 + n) for n, _ in lengths)
    assert pinned["pairs, prefill"] == own + costs.causal_pairs(64, 64)
    assert pinned["blocks owned at the end"] == 4  # the pin's

    chunk = counted("a one-token chunk")
    assert chunk["pairs, prefill"] == 65 * 66 // 2
    assert chunk["pairs, decode"] == 66 + 67 + 68


def test_a_small_pool_really_preempts() -> None:
    assert counted("a pool too small for all")["preempted"] > 0


def test_an_engine_that_differs_is_found_out() -> None:
    work = WORKLOADS["one short"]
    engine = engine_for(MODELS["llama, GQA"], work)
    longer = ((Request(ONE.prompt, ONE.answer + 1),),)
    steps = replay(engine.config, longer)
    expected = predict(engine.model_config, engine.config, steps)
    verdict = verify(engine, work.rounds)
    counts = {line.name: line.counted for line in verdict.lines}
    assert expected["pairs, decode"] != counts["pairs, decode"]
    assert expected["pairs, prefill"] == counts["pairs, prefill"]


def test_the_verdict_reads_as_a_table() -> None:
    work = WORKLOADS["eight at once"]
    verdict = verify(engine_for(MODELS["gpt2, MHA"], work), work.rounds)
    text = verdict.table().text()
    assert "NO" not in text
    assert "pairs, prefill" in text
    assert "% off on the" in text
    assert max(map(len, text.splitlines())) <= 100


def test_an_engine_that_has_served_is_refused() -> None:
    work = WORKLOADS["one short"]
    engine = engine_for(MODELS["llama, GQA"], work)
    verify(engine, work.rounds)
    with pytest.raises(AssertionError, match="served before"):
        verify(engine, work.rounds)


@pytest.mark.parametrize("context", [16, 64, 4096])
def test_the_standard_rounds_fit_any_context_and_hold(context: int) -> None:
    rounds, pinned = standard_rounds(101, context)
    for request in [r for requests in rounds for r in requests]:
        assert 1 <= len(request.prompt) < len(request.prompt) + request.answer <= context
        assert request.answer >= 1
        assert 0 <= min(request.prompt) <= max(request.prompt) < 101
    if context > 512:
        work = Workload(tuple(map(tuple, rounds)), pinned=tuple(pinned))
        model = MODELS["llama, MQA"]
        engine = engine_for(
            dataclasses.replace(model, max_position_embeddings=context, rope_factors=()), work
        )
        verdict = verify(engine, work.rounds, pinned=work.pinned)
        assert verdict.holds
        reused = next(line for line in verdict.lines if line.name == "K/V rows reused")
        assert reused.counted == 592 + 8 * 96  # the prompt again, and the pinned blocks

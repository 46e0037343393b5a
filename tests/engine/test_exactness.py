"""The exactness matrix: every way to compute a token gives the same token, in float64.

No cache, and cache x chunk size x alone or in company x prefix cold, hit or pinned x preempted
or not. A row of the matrix that differs is a wrong pair somewhere, never rounding.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from harness import GREEDY, Tiny, generate, run_all
from stairs.config import SamplingParams
from stairs.engine.core import Engine
from stairs.engine.prefix_files import load_prefix, save_prefix

NUM_TOKENS = 12
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PREFIX, OWN = 330, 283  # neither is a multiple of a block or a chunk


def make_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(211) for _ in range(length)]


PROMPT = make_prompt(1, PREFIX) + make_prompt(2, OWN)


def without_cache(model: Tiny) -> list[int]:
    """Each token from a fresh pass over everything before it; scores fully materialised."""
    engine = model.engine(enable_prefix_caching=False, attention_backend="reference")
    tokens = list(PROMPT)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for _ in range(NUM_TOKENS):
        tokens += generate(engine, tokens, one)
    assert engine.ledger.total.new_tokens == sum(len(PROMPT) + i for i in range(NUM_TOKENS))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def no_cache(tiny: Tiny) -> list[int]:
    return without_cache(tiny)


@pytest.fixture(scope="module")
def family_no_cache(family: Tiny) -> list[int]:
    return without_cache(family)


def warm(model: Tiny, engine: Engine, prefix: str, folder: Path) -> None:
    if prefix == "pinned":
        engine.add_prefix("system", PROMPT[:PREFIX])
        run_all(engine)
    elif prefix == "hit":
        generate(engine, [*PROMPT[:PREFIX], 5, 6, 7], SAMPLING)
    elif prefix == "from disk":
        other = model.engine()
        other.add_prefix("system", PROMPT[:PREFIX])
        run_all(other)
        save_prefix(other, "system", file=folder / "system")
        generate(engine, [3] * 50, SAMPLING)
        load_prefix(engine, "system", PROMPT[:PREFIX], file=folder / "system")


def check_records(engine: Engine) -> None:
    total = engine.ledger.total
    assert total.pairs == total.pairs_counted
    assert total.kv_bytes_read == total.kv_bytes_read_counted
    assert total.kv_bytes_written == total.kv_bytes_written_counted


def check_variant(
    model: Tiny, chunk: int, variant: tuple[str, str, str], folder: Path, wanted: list[int]
) -> None:
    company, prefix, preempted = variant
    engine = model.engine(prefill_chunk_size=chunk)
    warm(model, engine, prefix, folder)
    if company == "with seven":
        for i in range(7):
            shared = PREFIX if i % 2 else 0
            engine.add([*PROMPT[:shared], *make_prompt(10 + i, 20 + 40 * i)], SAMPLING)
    request = engine.add(PROMPT, SAMPLING)
    sequence = engine.sequence(request)

    def preempt_twice(step: int) -> None:
        """Once with part of the prompt computed, once in the middle of the answer."""
        running = engine.scheduler.running
        begun = sequence.num_computed > sequence.num_cached
        due = (begun and sequence.num_preemptions == 0) or sequence.num_generated == 5
        if running and running[-1] is sequence and due and sequence.num_preemptions < 2:
            engine.scheduler.preempt_newest()

    answers = run_all(engine, before_step=preempt_twice if preempted == "preempted" else None)
    assert answers[request] == wanted
    assert (sequence.num_preemptions > 0) == (preempted == "preempted")
    hit = PREFIX // 16 * 16 if prefix != "cold" or company == "with seven" else 0
    assert sequence.num_cached_prompt <= hit
    assert prefix == "cold" or sequence.num_cached_prompt == hit
    check_records(engine)


VARIANTS = list(
    itertools.product(
        ("alone", "with seven"), ("cold", "hit", "pinned", "from disk"), ("kept", "preempted")
    )
)


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
@pytest.mark.parametrize("chunk", [16, 128, 512, 1024])
def test_matrix(tiny: Tiny, no_cache, chunk, variant, tmp_path: Path) -> None:
    check_variant(tiny, chunk, variant, tmp_path, no_cache)


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_matrix_of_each_family(family: Tiny, family_no_cache, variant, tmp_path: Path) -> None:
    check_variant(family, 48, variant, tmp_path, family_no_cache)


@pytest.mark.parametrize("backend", ["reference", "online", "auto"])
def test_every_attention_gives_the_same_tokens(tiny: Tiny, no_cache, backend) -> None:
    engine = tiny.engine(attention_backend=backend)
    assert generate(engine, PROMPT, SAMPLING) == no_cache


@pytest.mark.parametrize("block_size", [1, 4, 64, 128])
def test_block_size_changes_nothing(tiny: Tiny, no_cache, block_size) -> None:
    engine = tiny.engine(block_size=block_size, num_blocks=2048 // block_size)
    assert generate(engine, PROMPT, SAMPLING) == no_cache
    check_records(engine)


def test_a_pool_too_small_for_two(tiny: Tiny) -> None:
    """Preemption by real pressure, not by hand: same answers as alone."""
    prompts = [make_prompt(i, 150) for i in range(4)]
    alone = [generate(tiny.engine(), prompt) for prompt in prompts]
    engine = tiny.engine(num_blocks=21)
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    answers = run_all(engine)
    assert [answers[r] for r in requests] == alone
    assert engine.scheduler.num_preemptions > 0
    assert engine.pool.num_owned == 0


def test_salted_twin_recomputes(tiny: Tiny) -> None:
    engine = tiny.engine()
    cached = []
    for salt in ("a", "b", "a"):
        request = engine.add(PROMPT, SAMPLING, salt=salt)
        sequence = engine.sequence(request)
        run_all(engine)
        cached.append(sequence.num_cached_prompt)
    assert cached == [0, 0, len(PROMPT) // 16 * 16]


def test_stale_pool_contents_never_reach_an_output(tiny: Tiny, no_cache) -> None:
    engine = tiny.engine()
    for layer in engine.kv.layers:
        layer.k.fill_(torch.nan)
        layer.v.fill_(torch.nan)
    assert generate(engine, PROMPT, SAMPLING) == no_cache


def test_chunks_keep_the_pairs_and_cut_the_largest_step(tiny: Tiny) -> None:
    largest, pairs = [], []
    for chunk in (64, 1024):
        engine = tiny.engine(prefill_chunk_size=chunk, max_num_batched_tokens=chunk)
        generate(engine, PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
        largest.append(engine.ledger.total.largest_step)
        pairs.append(engine.ledger.total.pairs_counted)
    n = len(PROMPT)
    assert pairs == [n * (n + 1) // 2] * 2
    assert largest == [max(64 * 576, (n - 576) * n), n * n]

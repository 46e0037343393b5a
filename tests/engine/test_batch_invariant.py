"""``batch_invariant``: in float32, the same bits of every logit whatever is computed beside it."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.test_exactness import NUM_TOKENS, PREFIX, PROMPT, SAMPLING, make_prompt
from harness import Tiny, capture_logits, make_tiny, run_all
from stairs.config import EngineConfig
from stairs.engine.resolve import resolve
from stairs.errors import ConfigError

VARIANTS = list(
    itertools.product((16, 128, 1024), ("alone", "with seven"), ("cold", "hit"), (False, True))
)


def logits_of(model: Tiny, chunk: int, company: str, prefix: str, preempted: bool) -> torch.Tensor:
    """(NUM_TOKENS, V): the rows that PROMPT's tokens were drawn from."""
    engine = model.engine(dtype="float32", batch_invariant=True, prefill_chunk_size=chunk)
    if prefix == "hit":
        engine.add(PROMPT[:PREFIX], SAMPLING)
        run_all(engine)
    seen = capture_logits(engine)
    if company == "with seven":
        for i in range(7):
            engine.add(make_prompt(20 + i, 13 + 31 * i), SAMPLING)
    request = engine.add(PROMPT, SAMPLING)
    sequence = engine.sequence(request)

    def preempt_once(step: int) -> None:
        if preempted and sequence.num_generated == 5 and not sequence.num_preemptions:
            engine.scheduler.preempt_newest()

    run_all(engine, before_step=preempt_once)
    assert sequence.num_preemptions == preempted
    assert (sequence.num_cached_prompt > 0) == (prefix == "hit")
    return torch.stack([seen[request, len(PROMPT) + i] for i in range(NUM_TOKENS)])


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def model(request: pytest.FixtureRequest) -> tuple[Tiny, torch.Tensor]:
    tiny = make_tiny(request.param)
    return tiny, logits_of(tiny, 128, "alone", "cold", False)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v)))
def test_the_same_bits(model: tuple[Tiny, torch.Tensor], variant: tuple) -> None:
    tiny, wanted = model
    assert torch.equal(logits_of(tiny, *variant), wanted)


def test_the_default_makes_no_such_promise(model: tuple[Tiny, torch.Tensor]) -> None:
    """The comparison can fail: plain kernels differ in the last bits between these two."""
    tiny, _ = model

    def run(num_others: int) -> torch.Tensor:
        engine = tiny.engine(dtype="float32")
        seen = capture_logits(engine)
        for i in range(num_others):
            engine.add(make_prompt(20 + i, 13 + 31 * i), SAMPLING)
        request = engine.add(PROMPT, SAMPLING)
        run_all(engine)
        return torch.stack([seen[request, len(PROMPT) + i] for i in range(NUM_TOKENS)])

    assert not torch.equal(run(0), run(7))


@pytest.mark.parametrize(
    "options", [{"dtype": "float64"}, {"attention_backend": "online"}, {"device": "cuda"}]
)
def test_what_it_cannot_promise_is_refused(tiny_llama: Tiny, options: dict) -> None:
    with pytest.raises(ConfigError, match="batch_invariant needs"):
        resolve(tiny_llama.config, EngineConfig(batch_invariant=True, **options), memory=2**30)

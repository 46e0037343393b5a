"""What a request can ask of its answers: several of them, their log probabilities, penalties."""

from __future__ import annotations

import pytest
import torch

from harness import Tiny, generate, run_all
from stairs.config import SamplingParams
from stairs.engine.core import Engine, TokenEvent
from stairs.engine.sampling import adjust, sample
from stairs.engine.sequence import Sequence

PROMPT = [(7 * i) % 200 for i in range(75)]  # ends in the middle of a block


def events_of(engine: Engine, prompt: list[int], **sampling) -> list[TokenEvent]:
    request = engine.add(prompt, SamplingParams(ignore_eos=True, **sampling))
    events = []
    while engine.has_work:
        events += [event for event in engine.step() if event.request == request]
    return events


def answers_of(events: list[TokenEvent]) -> list[list[int]]:
    answers: dict[int, list[int]] = {}
    for event in events:
        answers.setdefault(event.index, []).append(event.token)
    return [answers[index] for index in sorted(answers)]


# -- n --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [64, 75])  # a whole number of blocks, and not
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_forks_draw_what_single_requests_draw(tiny: Tiny, length: int, prefix_caching: bool):
    def engine() -> Engine:
        return tiny.engine(enable_prefix_caching=prefix_caching)

    prompt = PROMPT[:length]
    forked = events_of(engine(), prompt, n=3, seed=5, max_tokens=20)
    single = [
        answers_of(events_of(engine(), prompt, seed=5 + i, max_tokens=20))[0] for i in range(3)
    ]
    assert answers_of(forked) == single
    assert len({tuple(answer) for answer in single}) == 3


def test_forks_share_whole_blocks_and_pay_the_prompt_once(tiny_llama: Tiny):
    engine = tiny_llama.engine()
    request = engine.add(PROMPT, SamplingParams(n=4, max_tokens=3, ignore_eos=True, seed=1))
    engine.step()
    answers = [engine.sequence(request, index=i) for i in range(4)]
    assert len({tuple(a.blocks[:4]) for a in answers}) == 1
    assert len({a.blocks[4] for a in answers}) == 4
    assert engine.pool.num_owned == 4 + 4
    assert engine.ledger.total.new_tokens == len(PROMPT)
    costs = []
    while engine.has_work:
        costs += [event.costs for event in engine.step()]
    assert [c is not None for c in costs].count(True) == 1 and costs[-1] is not None
    assert engine.pool.num_owned == 0


def test_forks_without_a_place_wait_and_change_nothing(tiny_llama: Tiny):
    """Fewer seats than answers, and a pool that holds only some of them."""
    wanted = answers_of(events_of(tiny_llama.engine(), PROMPT, n=5, seed=3, max_tokens=30))
    for options in ({"max_num_seqs": 2}, {"num_blocks": 9}):
        engine = tiny_llama.engine(**options)
        got = events_of(engine, PROMPT, n=5, seed=3, max_tokens=30)
        assert answers_of(got) == wanted
        assert engine.pool.num_owned == 0


def test_one_answer_can_be_dropped_and_then_all(tiny_llama: Tiny):
    wanted = answers_of(events_of(tiny_llama.engine(), PROMPT, n=3, seed=3, max_tokens=10))
    engine = tiny_llama.engine()
    request = engine.add(PROMPT, SamplingParams(n=3, seed=3, max_tokens=10, ignore_eos=True))
    events = engine.step()
    assert engine.abort(request, index=1) is None
    while engine.has_work:
        events += engine.step()
    got = answers_of(events)
    assert (got[0], got[2], len(got[1])) == (wanted[0], wanted[2], 1)

    request = engine.add(PROMPT, SamplingParams(n=3, max_tokens=10))
    costs = engine.abort(request)  # its forks are not born yet
    assert costs is not None and not engine.has_work
    request = engine.add(PROMPT, SamplingParams(n=3, max_tokens=10))
    engine.step()
    engine.abort(request)
    assert not engine.has_work and engine.pool.num_owned == 0 and engine.step() == []


# -- seeds ----------------------------------------------------------------------------------


def test_a_seeded_answer_repeats_beside_unseeded_ones(tiny_llama: Tiny):
    seeded = {"seed": 7, "max_tokens": 15, "temperature": 1.5}
    alone = answers_of(events_of(tiny_llama.engine(dtype="float32"), PROMPT, **seeded))
    others = []
    for _ in range(2):
        engine = tiny_llama.engine(dtype="float32")
        other = engine.add(PROMPT, SamplingParams(temperature=1.5, max_tokens=15, ignore_eos=True))
        mine = engine.add(PROMPT, SamplingParams(**seeded, ignore_eos=True))
        answers = run_all(engine)
        assert answers[mine] == alone[0]
        others.append(answers[other])
    assert others[0] != others[1]


def test_a_preempted_answer_draws_the_same(tiny_llama: Tiny):
    sampling = SamplingParams(temperature=1.2, seed=3, max_tokens=20, ignore_eos=True)
    alone = generate(tiny_llama.engine(), PROMPT, sampling)
    engine = tiny_llama.engine()
    request = engine.add(PROMPT, sampling)

    def preempt(step: int) -> None:
        if step in (4, 9):
            engine.scheduler.preempt_newest()

    assert run_all(engine, before_step=preempt)[request] == alone


def test_the_engines_own_seed_fixes_unseeded_requests(tiny_llama: Tiny):
    def draw(seed: int) -> list[int]:
        return answers_of(events_of(tiny_llama.engine(seed=seed), PROMPT, max_tokens=12))[0]

    assert draw(1) == draw(1) != draw(2)


# -- log probabilities ----------------------------------------------------------------------


def test_logprobs_are_transformers_own(tiny: Tiny):
    events = events_of(
        tiny.engine(dtype="float32"), PROMPT, temperature=0.7, seed=2, max_tokens=6, logprobs=5,
        repetition_penalty=1.5, top_k=40,
    )  # fmt: skip
    answer = answers_of(events)[0]
    with torch.no_grad():
        logits = tiny.reference(torch.tensor([PROMPT + answer])).logits[0]
    theirs = logits.log_softmax(dim=-1)[len(PROMPT) - 1 :]
    for event, row in zip(events, theirs, strict=False):
        scores = event.logprobs
        assert scores is not None and scores.token == event.token
        assert scores.logprob == pytest.approx(float(row[event.token]), abs=2e-5)
        assert scores.rank == int((row > row[event.token]).sum()) + 1
        values, ids = row.topk(5)
        assert [token for token, _ in scores.top] == ids.tolist()
        assert [p for _, p in scores.top] == pytest.approx(values.tolist(), abs=2e-5)


@pytest.mark.parametrize("chunk", [16, 32, 1024])
@pytest.mark.parametrize("warm", ["cold", "warm", "preempted"])
def test_prompt_logprobs_have_no_gap(tiny: Tiny, chunk: int, warm: str):
    """S17: one a token but the first, whatever the chunks, the cache or a preemption."""
    engine = tiny.engine(dtype="float32", prefill_chunk_size=chunk)
    if warm == "warm":
        generate(engine, PROMPT)
    request = engine.add(PROMPT, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2))
    events = engine.step()
    if warm == "preempted":
        engine.scheduler.preempt_newest()
    while engine.has_work:
        events += engine.step()
    found = [e.prompt_logprobs for e in events if e.prompt_logprobs is not None]
    assert len(found) == 1 and events[0].request == request
    with torch.no_grad():
        theirs = tiny.reference(torch.tensor([PROMPT])).logits[0].log_softmax(dim=-1)
    assert [scores.token for scores in found[0]] == PROMPT[1:]
    for scores, row in zip(found[0], theirs, strict=False):
        assert scores.logprob == pytest.approx(float(row[scores.token]), abs=2e-5)
        assert len(scores.top) == 2


def test_logprobs_of_one_ask_nothing_of_others(tiny_llama: Tiny):
    engine = tiny_llama.engine(dtype="float32")
    engine.add(PROMPT, SamplingParams(max_tokens=2, logprobs=0))
    engine.add(PROMPT, SamplingParams(max_tokens=2))
    scores = {event.request: event.logprobs for event in engine.step()}
    assert scores[0] is not None and scores[0].top == () and scores[1] is None


# -- penalties and bias ---------------------------------------------------------------------


def sequence(tokens: list[int], num_prompt: int, **sampling) -> Sequence:
    made = Sequence(
        request=0, tokens=tokens[:num_prompt], max_tokens=100, stop_ids=frozenset(), seed=0,
        sampling=SamplingParams(temperature=0.0, **sampling),
    )  # fmt: skip
    made.tokens += tokens[num_prompt:]
    return made


def best(logits: list[float], made: Sequence) -> int:
    return sample(torch.tensor([logits]), (made,))[0][0]


def test_repetition_penalty_is_transformers_own():
    transformers = pytest.importorskip("transformers")
    tokens = [3, 1, 4, 1, 5]
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)) * 3
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits)
    ours = logits[0].clone()
    adjust(ours, sequence(tokens, 3, repetition_penalty=1.7))
    assert torch.equal(ours, theirs[0])


def test_repetition_penalty_counts_the_prompt_others_only_the_answer():
    logits = [1.0, 0.9, 0.0]
    assert best(logits, sequence([0], 1, repetition_penalty=2.0)) == 1
    assert best(logits, sequence([0], 1, presence_penalty=1.0)) == 0
    assert best(logits, sequence([2, 0], 1, presence_penalty=1.0)) == 1
    assert best([1.0, 0.0, 0.0], sequence([2, 0, 0], 1, frequency_penalty=0.6)) == 1
    assert best([1.0, 0.0, 0.0], sequence([2, 0], 1, frequency_penalty=0.6)) == 0
    assert best([-1.0, -1.5, -9.0], sequence([0], 1, repetition_penalty=2.0)) == 1


def test_penalties_see_tokens_whose_kv_came_from_the_cache(tiny_llama: Tiny):
    sampling = SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3, ignore_eos=True)
    cold = generate(tiny_llama.engine(), PROMPT, sampling)
    engine = tiny_llama.engine()
    generate(engine, PROMPT)
    request = engine.add(PROMPT, sampling)
    assert run_all(engine)[request] == cold
    assert engine.scheduler.num_prefix_hits > 0
    assert cold != generate(tiny_llama.engine(), PROMPT)[:12]


def test_bias_forces_and_forbids():
    assert best([1.0, 0.0, 0.5], sequence([0], 1, logit_bias={1: 100})) == 1
    assert best([1.0, 0.0, 0.5], sequence([0], 1, logit_bias={0: -100})) == 2


def test_min_p_keeps_what_is_likely_enough():
    """With min_p 0.3 only tokens at least 0.3 x as likely as the best can be drawn."""
    logits = torch.tensor([0.0, -1.0, -1.3, -5.0]).expand(2000, -1)
    made = [
        Sequence(
            request=0, tokens=[0] * (i + 1), max_tokens=9, stop_ids=frozenset(), seed=4,
            sampling=SamplingParams(temperature=1.0, min_p=0.3),
        )
        for i in range(2000)
    ]  # fmt: skip
    assert set(sample(logits, tuple(made))[0]) == {0, 1}


def test_forced_eos_respects_min_tokens(tiny_llama: Tiny):
    """S20: min_tokens 5 with a bias that forces EOS gives exactly five others, then EOS."""
    eos = tiny_llama.config.eos_token_ids[0]
    engine = tiny_llama.engine(dtype="float32")
    sampling = SamplingParams(temperature=0, max_tokens=20, min_tokens=5, logit_bias={eos: 100})
    answer = generate(engine, PROMPT, sampling)
    assert len(answer) == 6 and answer.index(eos) == 5

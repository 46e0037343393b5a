"""The engine's border: what it refuses, what it pins, what an abort leaves behind."""

from __future__ import annotations

import pytest

from harness import GREEDY, Tiny, generate, run_all
from stairs.accounting.record import Phase
from stairs.config import SamplingParams
from stairs.engine.sequence import FinishReason
from stairs.errors import ContextLengthError, InvalidRequestError

ONE = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "says"),
    [
        ([], ONE, "prompt", "empty"),
        ([0, 211], ONE, "prompt", "token id 211 is outside the vocabulary of 211"),
        ([-1], ONE, "prompt", "token id -1"),
        ([1] * 1024, ONE, "prompt", "1024 tokens; the context holds 1024"),
        ([1] * 1025, ONE, "prompt", "1025 tokens; the context holds 1024"),
        ([1] * 1000, SamplingParams(max_tokens=25), "max_tokens", "1000 .* 25 .* 1024"),
        ([1], SamplingParams(stop_token_ids=(999,)), "stop_token_ids", "token id 999"),
    ],
)
def test_refusals_name_the_field_and_the_limit(tiny_llama: Tiny, prompt, sampling, param, says):
    engine = tiny_llama.engine()
    with pytest.raises(InvalidRequestError, match=says) as caught:
        engine.add(prompt, sampling)
    assert caught.value.param == param
    assert not engine.has_work
    assert generate(engine, [1], ONE)  # and the engine lives


def test_longest_prompt_and_longest_answer_run(tiny_llama: Tiny):
    engine = tiny_llama.engine(dtype="float32")
    assert len(generate(engine, [1] * 1023, ONE)) == 1
    request = engine.add([1] * 1000, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert len(run_all(engine)[request]) == 24


def test_absent_max_tokens_is_what_context_and_pool_leave(tiny_llama: Tiny):
    open_ended = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    engine = tiny_llama.engine(dtype="float32")
    assert len(generate(engine, [1] * 1000, open_ended)) == 24
    engine = tiny_llama.engine(dtype="float32", num_blocks=4)
    assert len(generate(engine, [1] * 50, open_ended)) == 4 * 16 + 1 - 50
    with pytest.raises(ContextLengthError, match=r"5 K/V blocks .* has 4"):
        engine.add([1] * 65, open_ended)


def test_each_eos_and_stop_id_ends_an_answer(tiny_llama: Tiny):
    engine = tiny_llama.engine(dtype="float32")
    free = generate(engine, [3, 4, 5])
    third = free[2]
    stopping = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(third, 210))
    request = engine.add([3, 4, 5], stopping)
    events = []
    while engine.has_work:
        events += engine.step()
    assert [e.token for e in events] == free[: free.index(third) + 1]
    assert events[-1].finish_reason is FinishReason.STOP
    assert all(e.request == request and e.finish_reason is None for e in events[:-1])


def test_min_tokens_holds_stops_back(tiny_llama: Tiny):
    engine = tiny_llama.engine(dtype="float32")
    third = generate(engine, [3, 4, 5])[2]
    sampling = SamplingParams(temperature=0, max_tokens=24, min_tokens=9, stop_token_ids=(third,))
    answer = generate(engine, [3, 4, 5], sampling)
    assert third not in answer[:9] and len(answer) >= 9


def test_costs_of_a_request_come_with_its_last_event(tiny_llama: Tiny):
    engine = tiny_llama.engine(dtype="float32")
    prompt = list(range(100))
    engine.add(prompt, GREEDY)
    engine.add([9] * 50, GREEDY)
    last = {}
    while engine.has_work:
        for event in engine.step():
            if event.costs is not None:
                last[event.request] = event.costs
    prefill, decode = last[0][Phase.PREFILL], last[0][Phase.DECODE]
    assert (prefill.new_tokens, prefill.chunks, decode.new_tokens) == (100, 1, 23)
    assert prefill.pairs == prefill.pairs_counted == 5050
    assert decode.pairs == decode.pairs_counted == sum(range(101, 124))
    assert decode.kv_bytes_written_counted == 23 * 3 * 2 * 2 * 8 * 4
    assert last[1][Phase.PREFILL].new_tokens == 50


# -- pins -----------------------------------------------------------------------------------


def test_pinned_prefix_survives_a_pool_full_of_others(tiny_llama: Tiny):
    engine = tiny_llama.engine(num_blocks=40)
    prefix = [i % 200 for i in range(100)]
    engine.add_prefix("system", prefix)
    run_all(engine)
    pin = engine.prefix.pins["system"]
    assert (pin.num_pinned_tokens, len(pin.blocks)) == (96, 6)
    for i in range(8):
        generate(engine, [i + 1] * 400)
    request = engine.add([*prefix, 7, 8], ONE)
    sequence = engine.sequence(request)
    run_all(engine)
    assert sequence.num_cached_prompt == 96
    engine.unpin("system")
    for i in range(8):
        generate(engine, [i + 20] * 400)
    assert engine.pool.num_owned == 0
    request = engine.add([*prefix, 7, 8], ONE)
    sequence = engine.sequence(request)
    run_all(engine)
    assert sequence.num_cached_prompt == 0


def test_pins_are_refused_by_name_size_and_budget(tiny_llama: Tiny):
    engine = tiny_llama.engine(num_blocks=40)  # budget: 10 blocks
    for prefix, says in (
        ([], "empty"),
        ([1] * 15, "15 tokens; the smallest that can be shared is one block of 16"),
        ([1] * 176, "needs 11 blocks; pinned prefixes would hold 11 of at most 10"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            engine.add_prefix("a", prefix)
    engine.add_prefix("a", [1] * 96)
    with pytest.raises(InvalidRequestError, match="'a' is already pinned"):
        engine.add_prefix("a", [1] * 32)
    with pytest.raises(InvalidRequestError, match="would hold 12 of at most 10"):
        engine.add_prefix("b", [2] * 96)  # "a" is still being computed, and counts
    run_all(engine)
    engine.unpin("a")
    engine.add_prefix("b", [2] * 96)
    run_all(engine)
    assert list(engine.prefix.pins) == ["b"]


def test_a_pin_never_starves_a_live_request(tiny_llama: Tiny):
    engine = tiny_llama.engine(num_blocks=20)
    request = engine.add([1] * 100, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    engine.step()
    with pytest.raises(InvalidRequestError, match="a running request may need all but 1"):
        engine.add_prefix("system", [2] * 64)
    assert len(run_all(engine)[request]) == 199  # and one before
    engine.add_prefix("system", [2] * 64)
    run_all(engine)
    with pytest.raises(ContextLengthError, match="has 16 that are not pinned"):
        engine.add([1] * 100, SamplingParams(max_tokens=200))


def test_pinning_needs_the_prefix_cache(tiny_llama: Tiny):
    engine = tiny_llama.engine(enable_prefix_caching=False)
    with pytest.raises(InvalidRequestError, match="enable_prefix_caching is off"):
        engine.add_prefix("system", [1] * 64)


def test_pinned_under_a_salt_is_hit_under_that_salt_only(tiny_llama: Tiny):
    engine = tiny_llama.engine()
    engine.add_prefix("system", [1] * 64, salt="a")
    run_all(engine)
    cached = []
    for salt in (None, "a"):
        request = engine.add([1] * 70, ONE, salt=salt)
        sequence = engine.sequence(request)
        run_all(engine)
        cached.append(sequence.num_cached_prompt)
    assert cached == [0, 64]


def test_aborted_prefix_is_not_pinned_and_leaves_nothing(tiny_llama: Tiny):
    engine = tiny_llama.engine()
    request = engine.add_prefix("system", [1] * 640)
    engine.step()
    engine.abort(request)
    engine.abort(request)  # twice is once
    assert not engine.prefix.pins and engine.pool.num_owned == 0 and not engine.has_work
    engine.add_prefix("system", [1] * 640)
    run_all(engine)
    assert "system" in engine.prefix.pins


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_abort_leaves_nothing_behind(tiny_llama: Tiny, steps: int):
    engine = tiny_llama.engine()
    alone = generate(tiny_llama.engine(), [5] * 30)
    dropped = engine.add([1] * 700, GREEDY)
    kept = engine.add([5] * 30, GREEDY)
    answers = {}
    for _ in range(steps):
        for event in engine.step():
            answers.setdefault(event.request, []).append(event.token)
    engine.abort(dropped)
    for request, tokens in run_all(engine).items():
        answers.setdefault(request, []).extend(tokens)
    assert answers[kept] == alone
    assert engine.pool.num_owned == 0


def test_idle_step_does_nothing(tiny_llama: Tiny):
    engine = tiny_llama.engine()
    assert engine.step() == [] and engine.ledger.total.steps == 0

"""Scheduler, pool and prefix index together, on random traces, with a model that is a hash.

The fake model's token depends on all tokens before it, so any mix-up of sequences, positions or
prefixes shows as a wrong answer.
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stairs.accounting.record import Phase
from stairs.cache.blocks import BlockPool
from stairs.cache.prefix import PrefixCache
from stairs.config import CacheConfig, EngineConfig, SamplingParams
from stairs.engine.scheduler import Scheduler, StepPlan
from stairs.engine.sequence import FinishReason, Sequence, Status
from stairs.errors import ContextLengthError

BLOCK, CHUNK = 4, 8


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(array("i", tokens).tobytes()) % 50


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Run:
    """A scheduler with a K/V "tensor" that remembers which token each slot was written for."""

    num_blocks: int
    max_num_seqs: int = 64
    chunks_per_step: int = 4
    prefix_caching: bool = True
    scheduler: Scheduler = field(init=False)
    finished: dict[int, list[int]] = field(default_factory=dict)
    num_requests: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        config = EngineConfig(
            max_num_seqs=self.max_num_seqs,
            prefill_chunk_size=CHUNK,
            max_num_batched_tokens=CHUNK * self.chunks_per_step,
            cache=CacheConfig(block_size=BLOCK, enable_prefix_caching=self.prefix_caching),
        )
        self.pool = BlockPool(self.num_blocks)
        self.prefix = PrefixCache(self.pool, BLOCK)
        self.scheduler = Scheduler(config, self.pool, self.prefix)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def add(self, prompt: list[int], max_tokens: int, *, salt: str | None = None) -> Sequence:
        sequence = Sequence(
            request=self.num_requests,
            tokens=list(prompt),
            sampling=SamplingParams(temperature=0),
            max_tokens=max_tokens,
            stop_ids=frozenset(),
            seed=0,
            salt=salt,
        )
        self.scheduler.add(sequence)
        self.num_requests += 1
        return sequence

    def step(self) -> StepPlan:
        decoding = [s for s in self.scheduler.running if s.phase is Phase.DECODE]
        oldest = next(iter([*self.scheduler.running, *self.scheduler.waiting]), None)
        before = oldest.num_computed if oldest else 0
        waiting = set(self.scheduler.waiting)
        plan = self.scheduler.schedule()
        self.check_rules(plan, decoding)
        if plan.preempted:
            assert not waiting & set(self.scheduler.running), "admitted while preempting"
        if oldest is not None:
            fed = [item for item in plan.work if item.sequence is oldest]
            assert fed, "the oldest sequence did not progress"
            assert fed[0].sequence.num_computed >= before
        self.check_and_write_slots(plan)
        tokens = [next_token(s.tokens) for item in plan.work for s in item.sampled]
        done = self.scheduler.commit(plan, tokens)
        for source, target in done.copies:
            for offset in range(BLOCK):
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]
        for sequence, _ in done.tokens:
            if sequence.status is Status.FINISHED:
                answer = sequence.tokens[sequence.num_prompt_tokens :]
                self.finished[sequence.request] = answer
        self.check_pool()
        self.num_steps += 1
        return plan

    def check_rules(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        in_plan = [item.sequence for item in plan.work]
        assert len(in_plan) == len(set(in_plan)) <= self.max_num_seqs
        for sequence in decoding:
            assert sequence in in_plan or sequence in plan.preempted, "a decode waited"
        chunks = sum(item.num_chunks for item in plan.work)
        assert chunks <= self.chunks_per_step
        for item in plan.work:
            if item.phase is Phase.DECODE:
                assert (item.num_new, item.num_chunks) == (1, 0)
            else:
                end = item.sequence.num_computed + item.num_new
                assert end % CHUNK == 0 or end == item.sequence.prefill_end
                assert item.num_new <= item.num_chunks * CHUNK

    def check_and_write_slots(self, plan: StepPlan) -> None:
        """Every key a row reads was written for exactly the tokens up to it."""
        for item in plan.work:
            sequence, start = item.sequence, item.sequence.num_computed
            end = start + item.num_new
            assert len(sequence.blocks) * BLOCK >= end
            for position in range(end):
                slot = (sequence.blocks[position // BLOCK], position % BLOCK)
                content = (hash(sequence.salt), *sequence.tokens[: position + 1])
                if position < start:
                    assert self.slots[slot] == content, "stale or foreign K/V"
                else:
                    assert self.pool.ref_count(slot[0]) == 1, "writes into a shared block"
                    self.slots[slot] = content

    def check_pool(self) -> None:
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_owned == pool.num_blocks
        held: dict[int, int] = {}
        for owner in [*self.scheduler.running, *self.prefix.pins.values()]:
            for block in owner.blocks:
                held[block] = held.get(block, 0) + 1
        assert all(pool.ref_count(b) == held.get(b, 0) for b in range(pool.num_blocks))

    def drain(self, *, most_steps: int = 20_000) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            assert self.num_steps < most_steps, "livelock"
            self.step()
        assert self.pool.num_owned == self.prefix.num_pinned_blocks


requests = st.tuples(
    st.integers(0, 12),  # steps before it arrives
    st.sampled_from([0, 0, 4, 8, 16]),  # tokens of a shared head
    st.integers(1, 40),  # own tokens
    st.integers(1, 20),  # max_tokens
    st.sampled_from([None, None, "a"]),  # salt
    st.sampled_from([None, None, None, 2, 9]),  # steps until it is aborted
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=14),
    st.integers(6, 40),
    st.integers(1, 6),
    st.integers(1, 5),
    st.booleans(),
)
def test_random_traces(trace, num_blocks, max_num_seqs, chunks_per_step, prefix_caching):
    run = Run(num_blocks, max_num_seqs, chunks_per_step, prefix_caching)
    wanted: dict[int, list[int]] = {}
    aborts: dict[int, list[int]] = {}
    now = 0
    for i, (gap, shared, own, max_tokens, salt, abort_after) in enumerate(trace):
        for _ in range(gap):
            if run.scheduler.running or run.scheduler.waiting:
                run.step()
            now += 1
            for request in aborts.pop(now, []):
                for sequence in [*run.scheduler.running, *run.scheduler.waiting]:
                    if sequence.request == request:
                        run.scheduler.abort(sequence)
                run.check_pool()
        prompt = [7] * shared + [(i * 31 + j) % 50 for j in range(own)]
        try:
            sequence = run.add(prompt, max_tokens, salt=salt)
        except ContextLengthError as error:
            assert -(-(len(prompt) + max_tokens - 1) // BLOCK) > num_blocks
            assert str(num_blocks) in str(error)
            continue
        wanted[sequence.request] = expected(prompt, max_tokens)
        if abort_after is not None:
            aborts.setdefault(now + abort_after, []).append(sequence.request)
    run.drain()
    for request, answer in run.finished.items():
        assert answer == wanted[request]
    late = {r for requests in aborts.values() for r in requests}
    assert set(wanted) - set(run.finished) <= set(wanted) - late


def test_a_long_prompt_among_short_ones_stalls_nobody():
    """100k tokens arrive first; each short request still starts within a few steps."""
    run = Run(num_blocks=30_000)
    long = run.add([3] * 100_000, 4)
    run.step()
    for i in range(40):
        run.add([i, i + 1, i + 2], 3)
    first_answers = 0
    for _ in range(50):
        plan = run.scheduler.schedule()
        chunks = {item.sequence: item.num_chunks for item in plan.work}
        waits = any(s is not long for s in chunks if chunks[s])
        assert chunks[long] == (3 if waits else 4)
        tokens = [next_token(s.tokens) for item in plan.work for s in item.sampled]
        done = run.scheduler.commit(plan, tokens).tokens
        first_answers += sum(s is not long and s.num_generated == 1 for s, _ in done)
    assert first_answers == 40  # one short prompt a step beside the long one


def test_tiny_pool_preempts_the_newest_and_everyone_finishes():
    run = Run(num_blocks=12)
    prompts = [[i] * 10 for i in range(4)]
    sequences = [run.add(p, 20) for p in prompts]
    run.drain()
    assert run.finished == {i: expected(p, 20) for i, p in enumerate(prompts)}
    assert run.scheduler.num_preemptions > 0
    assert sequences[0].num_preemptions == 0, "the oldest was preempted"
    assert max(s.num_preemptions for s in sequences) < 10


def test_pool_of_one_and_a_half_requests():
    run = Run(num_blocks=9)
    a, b = run.add([1] * 12, 12), run.add([2] * 12, 12)
    run.drain()
    assert run.finished == {0: expected([1] * 12, 12), 1: expected([2] * 12, 12)}
    assert a.num_preemptions == 0 and b.num_preemptions <= 3


def test_preempted_sequence_hits_its_own_blocks():
    """Growing requests with a common head, in a pool that holds two of three."""
    run = Run(num_blocks=8)
    head = [9] * (2 * BLOCK)
    prompts = [[*head, i] for i in range(3)]
    for prompt in prompts:
        run.add(prompt, 14)
    run.drain()
    assert run.finished == {i: expected(p, 14) for i, p in enumerate(prompts)}
    assert run.scheduler.num_preemptions > 0


def test_twins_in_one_step_do_not_read_unwritten_blocks():
    run = Run(num_blocks=40)
    prompt = [5] * (3 * BLOCK)
    run.add(prompt, 3)
    run.add(prompt, 3)
    plan = run.step()
    assert [item.num_new for item in plan.work] == [
        12,
        12,
    ]  # both compute: nothing is published yet
    run.drain()
    assert run.finished[0] == run.finished[1] == expected(prompt, 3)


def test_blocks_become_visible_chunk_by_chunk():
    """A twin that arrives in the middle of a chunked prefill sees computed blocks only."""
    run = Run(num_blocks=60, chunks_per_step=1)
    prompt = [i % 50 for i in range(4 * CHUNK)]
    first = run.add(prompt, 2)
    run.step()
    run.step()
    second = run.add([*prompt, 1], 2)
    done_when_admitted = None
    while second.status is Status.WAITING:
        done_when_admitted = first.num_computed
        run.step()
    assert done_when_admitted is not None and 0 < second.num_cached <= done_when_admitted
    run.drain()
    assert run.finished[1] == expected([*prompt, 1], 2)


def test_fully_cached_prompt_recomputes_its_last_block():
    run = Run(num_blocks=20)
    prompt = [4] * (2 * BLOCK)
    run.add(prompt, 3)
    run.drain()
    again = run.add(prompt, 3)
    plan = run.step()
    assert again.num_cached == BLOCK and plan.work[0].num_new == BLOCK
    run.drain()
    assert run.finished[0] == run.finished[1]


def test_chunk_ends_after_a_hit_are_absolute():
    run = Run(num_blocks=40, chunks_per_step=1)
    run.add([6] * BLOCK + [1], 1)
    run.drain()
    run.add([6] * 20, 1)
    sizes = []
    while run.scheduler.running or run.scheduler.waiting:
        sizes += [item.num_new for item in run.step().work]
    assert sizes == [CHUNK - BLOCK, CHUNK, 4]  # 4 cached, then up to 8, 16, 20


def test_twelve_tokens_in_chunks_of_four():
    """After each chunk 4, 8, 12 rows stand in the cache; 78 pairs, as in one go."""
    config = EngineConfig(
        prefill_chunk_size=4, max_num_batched_tokens=4, cache=CacheConfig(block_size=4)
    )
    pool = BlockPool(8)
    scheduler = Scheduler(config, pool, PrefixCache(pool, 4))
    sequence = Sequence(
        request=0, tokens=list(range(12)), sampling=SamplingParams(), max_tokens=1,
        stop_ids=frozenset(), seed=0,
    )  # fmt: skip
    scheduler.add(sequence)
    cached, pairs = [], 0
    while sequence.status is not Status.FINISHED:
        plan = scheduler.schedule()
        before = sequence.num_computed
        scheduler.commit(plan, [1] * len(plan.work[0].sampled))
        cached.append(sequence.num_computed)
        pairs += sum(range(before + 1, sequence.num_computed + 1))
    assert cached == [4, 8, 12] and pairs == 78


def test_answer_of_200_tokens_is_one_prefill_and_199_rows():
    run = Run(num_blocks=80)
    run.add([1, 2, 3], 200)
    work = []
    while run.scheduler.running or run.scheduler.waiting:
        work += run.step().work
    assert [item.phase for item in work] == [Phase.PREFILL] + [Phase.DECODE] * 199
    assert all(item.num_new == 1 for item in work[1:])


def test_middle_chunk_yields_nothing():
    run = Run(num_blocks=20, chunks_per_step=1)
    run.add([2] * (2 * CHUNK + 1), 1)
    assert [len(run.step().work[0].sampled) for _ in range(3)] == [0, 0, 1]
    assert run.finished[0] == expected([2] * (2 * CHUNK + 1), 1)


def test_refused_at_the_door_with_both_numbers():
    run = Run(num_blocks=4)
    with pytest.raises(ContextLengthError, match=r"5 K/V blocks .* has 4") as caught:
        run.add([1] * (5 * BLOCK), 1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextLengthError):
        run.add([1] * (4 * BLOCK), 2)  # the prompt fits, its answer never could
    assert run.add([1] * (4 * BLOCK), 1)
    run.drain()


def test_abort_gives_blocks_back_at_once():
    run = Run(num_blocks=20)
    sequence = run.add([1] * 10, 5)
    queued = run.add([2] * 10, 5)
    run.step()
    assert run.pool.num_owned > 0
    run.scheduler.abort(sequence)
    run.scheduler.abort(queued)
    assert run.pool.num_owned == 0 and sequence.finish_reason is FinishReason.ABORT
    run.check_pool()

"""Who computes what in the next step. Pure Python: sequences and block ids, no tensors.

A step is one token for every decoding sequence plus at most ``chunks_per_step`` chunks of prompt:

- Prefill never displaces a decode. Chunks end at absolute multiples of the chunk size, so the
  first one after a prefix hit is short. They go to the oldest prompt first, but while another
  prompt waits one prompt takes at most all but one of them (three of four).
- The oldest sequence always progresses. When blocks run out the newest one is preempted: its
  blocks go, its tokens are recomputed later. A step that preempted admits nobody.
- A prompt is admitted, in order of arrival, once its whole prompt fits beside those running.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from stairs.accounting import costs
from stairs.accounting.record import Phase
from stairs.cache.blocks import BlockPool
from stairs.cache.prefix import Entry, PrefixCache
from stairs.config import EngineConfig
from stairs.engine.sequence import FinishReason, Sequence, Status
from stairs.errors import ContextLengthError

__all__ = ["Committed", "Scheduled", "Scheduler", "StepPlan"]

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Scheduled:
    """``num_new`` tokens of ``sequence`` to feed, in ``num_chunks`` chunks (0: a decode).

    ``sampled`` draw a token from the logits of the last of them: nobody in the middle of a prompt,
    else the sequence, and at the end of its prompt its forks too.
    """

    sequence: Sequence
    num_new: int
    num_chunks: int
    phase: Phase
    sampled: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    work: tuple[Scheduled, ...]
    preempted: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step came to: new tokens, prefixes now complete (``release`` them once they are
    pinned), and blocks to copy (from, to) before the next step."""

    tokens: list[tuple[Sequence, int]]
    prefixes: list[Sequence]
    copies: list[tuple[int, int]]


class Scheduler:
    """Owns the queue, the running sequences (both in order of arrival) and their blocks."""

    def __init__(self, config: EngineConfig, pool: BlockPool, prefix: PrefixCache) -> None:
        self.config = config
        self.pool = pool
        self.prefix = prefix
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # prompt tokens looked up, and found
        self.num_prefix_hits = 0

    # -- requests ---------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; refuses one that could never run to its end."""
        need = self._blocks_for(sequence.max_computed)
        limit = self.num_usable_blocks
        if need > limit:
            size = self.config.cache.block_size
            raise ContextLengthError(
                f"prompt of {sequence.num_prompt_tokens} tokens with max_tokens "
                f"{sequence.max_tokens} needs {need} K/V blocks of {size} tokens; the pool has "
                f"{limit} that are not pinned",
                param="max_tokens",
            )
        self.waiting.append(sequence)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks a single request can count on: all that no pin holds."""
        return self.pool.num_blocks - self.prefix.num_pinned_blocks

    @property
    def num_needed_blocks(self) -> int:
        """Blocks that the largest live request may come to hold: pins must leave that many."""
        live = [*self.running, *self.waiting]
        return max((self._blocks_for(sequence.max_computed) for sequence in live), default=0)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence wherever it stands; its blocks are free at once."""
        sequence.forks = ()
        self._finish(sequence, FinishReason.ABORT)

    # -- a step -----------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        preempted: list[Sequence] = []
        work = self._decodes(preempted)
        work += self._chunks(may_admit=not preempted)
        return StepPlan(tuple(work), tuple(preempted))

    def commit(self, plan: StepPlan, tokens: list[int]) -> Committed:
        """Account for a finished forward pass: the one place where sequences change.

        ``tokens``: one for each sequence that the plan's items say is ``sampled``, in order.
        """
        done = Committed([], [], [])
        sampled = iter(tokens)
        for item in plan.work:
            sequence = item.sequence
            sequence.num_computed += item.num_new
            self._publish(sequence)
            if item.sampled and sequence.forks:
                self._fork(sequence, done.copies)
            for branch in item.sampled:
                token = next(sampled)
                branch.tokens.append(token)
                done.tokens.append((branch, token))
                reason = _finish_reason(branch, token)
                if reason is not None:
                    self._finish(branch, reason)
            if sequence.prefill_only and sequence.num_computed == len(sequence.tokens):
                done.prefixes.append(sequence)
        return done

    def release(self, sequence: Sequence) -> None:
        """Let a completed prefix's blocks go, after it was pinned."""
        self._finish(sequence, FinishReason.PREFIX)

    def _decodes(self, preempted: list[Sequence]) -> list[Scheduled]:
        """One token for every decoding sequence, oldest first, and blocks for the oldest prompt."""
        work: list[Scheduled] = []
        i = 0
        while i < len(self.running):
            sequence = self.running[i]
            if sequence.phase is Phase.DECODE:
                if self._make_room(sequence, sequence.num_computed + 1, preempted):
                    work.append(_scheduled(sequence, 1, num_chunks=0))
            elif i == 0:
                self._make_room(sequence, self._chunk_end(sequence, 1), preempted)
            i += 1
        return work

    def _chunks(self, *, may_admit: bool) -> list[Scheduled]:
        """Share out the chunks: oldest prompt first, the last one kept for another that waits."""
        budget = self.config.chunks_per_step
        prompts = [s for s in self.running if s.phase is Phase.PREFILL]
        if may_admit:
            prompts += self._admit(budget - len(prompts))
        shares: dict[Sequence, int] = {}
        for cap in (max(budget - 1, 1) if len(prompts) > 1 else budget, budget):
            for sequence in prompts:  # second round: what the others could not use
                have = shares.get(sequence, 0)
                num = self._grant(sequence, min(budget, cap - have), have)
                shares[sequence] = have + num
                budget -= num
        work = []
        for sequence, num_chunks in shares.items():
            if num_chunks:
                num_new = self._chunk_end(sequence, num_chunks) - sequence.num_computed
                work.append(_scheduled(sequence, num_new, num_chunks=num_chunks))
        return work

    def _grant(self, sequence: Sequence, most: int, have: int) -> int:
        """Blocks for up to ``most`` chunks beyond the ``have`` already granted; how many it got."""
        num = 0
        while num < most and self._chunk_end(sequence, have + num) < sequence.prefill_end:
            if not self._grow(sequence, self._chunk_end(sequence, have + num + 1)):
                break
            num += 1
        return num

    def _admit(self, most: int) -> list[Sequence]:
        """Take waiting sequences in, in order, while their whole prompts fit."""
        admitted: list[Sequence] = []
        # Blocks that prompts already running will still ask for: promised, not yet taken.
        promised = sum(
            self._blocks_for(s.prefill_end) - len(s.blocks)
            for s in self.running
            if s.phase is Phase.PREFILL
        )
        while (
            self.waiting and len(admitted) < most and len(self.running) < self.config.max_num_seqs
        ):
            sequence = self.waiting[0]
            entries = self._match(sequence)
            need = self._blocks_for(len(sequence.tokens)) - len(entries)
            if need > self.pool.num_available - promised:
                self.pool.release(entry.block for entry in reversed(entries))
                break
            promised += need
            self._start(self.waiting.popleft(), entries)
            admitted.append(sequence)
        return admitted

    def _match(self, sequence: Sequence) -> list[Entry]:
        # Log probabilities of a prompt need its logits, so all of it is computed.
        scored = sequence.sampling.prompt_logprobs is not None
        if scored or not self.config.cache.enable_prefix_caching:
            return []
        return self.prefix.match(sequence.tokens, salt=sequence.salt)

    def _start(self, sequence: Sequence, entries: list[Entry]) -> None:
        sequence.entries = entries
        sequence.blocks = [entry.block for entry in entries]
        sequence.num_cached = sequence.num_computed = len(entries) * self.config.cache.block_size
        sequence.prefill_end = len(sequence.tokens)
        if sequence.num_preemptions == 0 and sequence.index == 0:
            sequence.num_cached_prompt = sequence.num_cached
            self.num_prefix_queries += sequence.num_prompt_tokens
            self.num_prefix_hits += sequence.num_cached
        self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)

    def _fork(self, sequence: Sequence, copies: list[tuple[int, int]]) -> None:
        """Let the forks run on the blocks of the prompt just computed: whole ones are shared, the
        last, partial one is copied. Those that find no place wait and recompute."""
        full, tail = divmod(sequence.num_computed, self.config.cache.block_size)
        for fork in sequence.forks:
            fork.num_cached_prompt = sequence.num_cached_prompt
            own = self.pool.allocate(1 if tail else 0)
            if own is None or len(self.running) >= self.config.max_num_seqs:
                self.pool.release(own or ())
                self.waiting.insert(bisect(self.waiting, fork.order, key=_order), fork)
                continue
            for block in sequence.blocks[:full]:
                self.pool.acquire(block)
            fork.blocks = sequence.blocks[:full] + own
            fork.entries = sequence.entries[:full]
            fork.num_computed = fork.prefill_end = sequence.num_computed
            copies += [(sequence.blocks[full], block) for block in own]
            self._run(fork)
        sequence.forks = ()

    # -- blocks -----------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return costs.blocks_for(num_tokens, self.config.cache.block_size)

    def _chunk_end(self, sequence: Sequence, num_chunks: int) -> int:
        """Where ``num_chunks`` more chunks end: a multiple of the chunk size, or the end."""
        if num_chunks == 0:
            return sequence.num_computed
        size = self.config.prefill_chunk_size
        return min((sequence.num_computed // size + num_chunks) * size, sequence.prefill_end)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give it the blocks that ``num_tokens`` need, if the pool has them."""
        missing = self._blocks_for(num_tokens) - len(sequence.blocks)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return False
            sequence.blocks += blocks
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """``_grow``, preempting the newest until it works; False if ``sequence`` itself was."""
        while not self._grow(sequence, num_tokens):
            assert len(self.running) > 1, "a lone sequence always fits: add() saw to it"
            newest = self.preempt_newest()
            preempted.append(newest)
            if newest is sequence:
                return False
        return True

    def preempt_newest(self) -> Sequence:
        """Take the newest running sequence's blocks; it waits first in line to be recomputed."""
        sequence = self.running.pop()
        self._release_blocks(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = sequence.num_cached = 0
        sequence.prefill_end = len(sequence.tokens)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence

    def _publish(self, sequence: Sequence) -> None:
        """Make its newly full blocks findable: their K/V are written now, and not before."""
        if not self.config.cache.enable_prefix_caching:
            return
        entries = sequence.entries
        for i in range(len(entries), sequence.num_computed // self.config.cache.block_size):
            parent = entries[-1] if entries else None
            entries.append(
                self.prefix.publish(
                    sequence.tokens, i, sequence.blocks[i], parent=parent, salt=sequence.salt
                )
            )

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.entries = []

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:  # a fork that is not yet born is in neither
            self.waiting.remove(sequence)
        self._release_blocks(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason


def _scheduled(sequence: Sequence, num_new: int, *, num_chunks: int) -> Scheduled:
    reaches_end = sequence.num_computed + num_new == len(sequence.tokens)
    samples = reaches_end and not sequence.prefill_only
    sampled = (sequence, *sequence.forks) if samples else ()
    return Scheduled(sequence, num_new, num_chunks, sequence.phase, sampled)


def _finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    if token in sequence.stop_ids and sequence.num_generated > sequence.sampling.min_tokens:
        return FinishReason.STOP
    if sequence.num_generated >= sequence.max_tokens:
        return FinishReason.LENGTH
    return None

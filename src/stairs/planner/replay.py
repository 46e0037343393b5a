"""What an engine will do with some requests, step by step, found by running its own scheduler.

No model: every sampled token is 0. The scheduler never looks at what was sampled, but a later
prompt that repeats another's answer would hit its blocks, so answers are taken not to be reused.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from stairs.accounting.record import Phase
from stairs.cache.blocks import BlockPool
from stairs.cache.prefix import PrefixCache
from stairs.config import EngineConfig, SamplingParams
from stairs.engine.scheduler import Scheduler
from stairs.engine.sequence import Sequence

__all__ = ["Request", "Row", "Step", "replay"]


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids of a prompt, and the tokens its answer will have."""

    prompt: Tokens[int]
    answer: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step. ``cached``: K/V rows it found, on its first row only;
    ``request`` None: a prefix computed ahead."""

    request: int | None
    phase: Phase
    new: int
    context: int
    cached: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    rows: tuple[Row, ...]
    blocks_owned: int  # after the step
    num_preempted: int


def replay(
    config: EngineConfig, rounds: Tokens[Tokens[Request]], *, pinned: Tokens[int] = ()
) -> list[Step]:
    """Steps of a resolved ``config`` that computes and pins ``pinned`` first, then takes each
    round of requests at once and runs it to its end."""
    assert config.cache.num_blocks is not None
    pool = BlockPool(config.cache.num_blocks)
    prefix = PrefixCache(pool, config.cache.block_size)
    scheduler = Scheduler(config, pool, prefix)
    steps: list[Step] = []
    whole = len(pinned) // config.cache.block_size * config.cache.block_size
    if whole:
        scheduler.add(_sequence(-1, Request(pinned[:whole], 0), prefill_only=True))
        steps += _run(scheduler, prefix)
    numbered = 0
    for requests in rounds:
        for request in requests:
            scheduler.add(_sequence(numbered, request, prefill_only=False))
            numbered += 1
        steps += _run(scheduler, prefix)
    return steps


def _sequence(number: int, request: Request, *, prefill_only: bool) -> Sequence:
    return Sequence(
        request=number,
        tokens=list(request.prompt),
        sampling=SamplingParams(),
        max_tokens=request.answer,
        stop_ids=frozenset(),
        seed=0,
        prefill_only=prefill_only,
    )


def _run(scheduler: Scheduler, prefix: PrefixCache) -> list[Step]:
    steps = []
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        rows = []
        for item in plan.work:
            sequence = item.sequence
            first = sequence.num_computed == sequence.num_cached
            rows.append(
                Row(
                    request=None if sequence.prefill_only else sequence.request,
                    phase=item.phase,
                    new=item.num_new,
                    context=sequence.num_computed + item.num_new,
                    cached=sequence.num_cached if first else 0,
                    samples=bool(item.sampled),
                )
            )
        done = scheduler.commit(plan, [0] * sum(len(item.sampled) for item in plan.work))
        for sequence in done.prefixes:
            prefix.pin("pinned", sequence.tokens, sequence.blocks)
            scheduler.release(sequence)
        steps.append(Step(tuple(rows), scheduler.pool.num_owned, len(plan.preempted)))
    return steps

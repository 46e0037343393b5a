"""Whether a plan was true: what was predicted beside what an engine's own counters say.

Predicted comes from lengths alone, through the scheduler's replay and the formulas of ``costs``;
counted comes from the kernels' loops, the allocator and the tensors. Equality is demanded of
everything but time, where the fitted model shows its error on steps it did not see.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stairs.accounting import costs
from stairs.accounting.hardware import find_device
from stairs.accounting.record import Phase, StepRecord
from stairs.accounting.table import Axis, Cell, Column, Quantity, Table, Unit
from stairs.accounting.traffic import kv_bytes_read
from stairs.config import DTYPE_BYTES, EngineConfig, ModelConfig, SamplingParams
from stairs.planner.fitting import fit, samples_of
from stairs.planner.replay import Request, Step, replay

if TYPE_CHECKING:
    from stairs.engine.core import Engine

__all__ = ["Line", "Verdict", "predict", "standard_rounds", "verify"]

_LEAST_STEPS = 16  # fewer cannot tell six coefficients and an error


@dataclass(frozen=True, slots=True)
class Line:
    """One figure twice."""

    name: str
    unit: Unit
    axis: Axis
    predicted: int
    counted: int

    @property
    def holds(self) -> bool:
        return self.predicted == self.counted


@dataclass(frozen=True, slots=True)
class Verdict:
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return all(line.holds for line in self.lines)

    def table(self) -> Table:
        columns = (Column("what"), Column("predicted"), Column("counted"), Column("equal"))
        rows: list[list[Cell]] = [
            [
                line.name,
                Quantity(line.predicted, line.unit, line.axis, "exact"),
                Quantity(line.counted, line.unit, line.axis, "counted"),
                "yes" if line.holds else "NO",
            ]
            for line in self.lines
        ]
        return Table("Plan against engine", columns, rows, self.notes)


def verify(
    engine: Engine, rounds: Sequence[Sequence[Request]], *, pinned: Sequence[int] = ()
) -> Verdict:
    """Run ``rounds`` on a fresh engine, after pinning ``pinned``, and compare."""
    assert not engine.ledger.records, "the engine has served before: its cache is not the plan's"
    engine.count_visits()
    expected = predict(
        engine.model_config, engine.config, replay(engine.config, rounds, pinned=pinned)
    )
    if pinned:
        engine.add_prefix("pinned", pinned)
        _drain(engine)
    for requests in rounds:
        for request in requests:
            sampling = SamplingParams(temperature=0.0, max_tokens=request.answer, ignore_eos=True)
            engine.add(list(request.prompt), sampling)
        _drain(engine)
    counted = _count(list(engine.ledger.records)) | {"K/V pool": engine.kv.nbytes}
    lines = tuple(
        Line(name, *_TYPES.get(name, ("", "count")), value, counted[name])
        for name, value in expected.items()
    )
    return Verdict(lines, tuple(_time_notes(engine)))


def standard_rounds(vocab_size: int, context: int) -> tuple[list[list[Request]], list[int]]:
    """What ``stairs verify`` runs, and the prefix it pins first: a prompt of several chunks, the
    same again, then eight of different lengths that share the prefix. Random ids, seeded."""
    source = random.Random(0)

    def tokens(length: int) -> list[int]:
        return source.choices(range(vocab_size), k=max(1, min(length, context // 2)))

    pinned = tokens(100)
    long = Request(tokens(600), min(4, context // 4))
    shared = [
        Request([*pinned, *tokens(20 + 10 * i)][: context // 2], min(2 + i, context // 4))
        for i in range(8)
    ]
    return [[long], [long], shared], pinned


_TYPES: dict[str, tuple[Unit, Axis]] = {
    "K/V pool": ("B", "stored bytes"),
    "K/V written": ("B", "moved bytes"),
    "K/V read": ("B", "moved bytes"),
}


def predict(config: ModelConfig, engine: EngineConfig, steps: Sequence[Step]) -> dict[str, int]:
    """The figures of a replay. Pairs are of one head of one layer, as records have them."""
    size, blocks = DTYPE_BYTES[engine.cache.dtype], engine.cache.num_blocks
    assert blocks is not None
    token = costs.kv_bytes_per_token(config, size)
    rows = [row for step in steps for row in step.rows]

    def pairs(phase: Phase) -> int:
        return sum(costs.causal_pairs(r.new, r.context) for r in rows if r.phase is phase)

    return {
        "K/V pool": blocks * engine.cache.block_size * token,
        "steps": len(steps),
        "preempted": sum(step.num_preempted for step in steps),
        "most blocks owned": max((step.blocks_owned for step in steps), default=0),
        "blocks owned at the end": steps[-1].blocks_owned if steps else 0,
        "query rows fed": sum(row.new for row in rows),
        "K/V rows reused": sum(row.cached for row in rows),
        "pairs, prefill": pairs(Phase.PREFILL),
        "pairs, decode": pairs(Phase.DECODE),
        "largest step": max((sum(r.new * r.context for r in s.rows) for s in steps), default=0),
        "K/V written": sum(row.new for row in rows) * token,
        "K/V read": sum(kv_bytes_read(config, row.new, row.context, size) for row in rows),
    }


def _count(records: Iterable[StepRecord]) -> dict[str, int]:
    """The same figures from an engine's records: what its loops and its allocator counted."""
    records = list(records)
    rows = [row for record in records for row in record.rows]
    owned = [record.blocks_owned for record in records]

    def total(name: str, phase: Phase | None = None) -> int:
        return sum(int(row[name]) for row in rows if phase is None or row["phase"] == phase)

    largest = [
        sum(int(row["new_tokens"]) * int(row["context"]) for row in record.rows)
        for record in records
    ]
    return {
        "steps": len(records),
        "preempted": sum(record.num_preempted for record in records),
        "most blocks owned": max(owned, default=0),
        "blocks owned at the end": owned[-1] if owned else 0,
        "query rows fed": total("new_tokens"),
        "K/V rows reused": total("cached_tokens"),
        "pairs, prefill": total("pairs_counted", Phase.PREFILL),
        "pairs, decode": total("pairs_counted", Phase.DECODE),
        "largest step": max(largest, default=0),
        "K/V written": total("kv_bytes_written_counted"),
        "K/V read": total("kv_bytes_read_counted"),
    }


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _time_notes(engine: Engine) -> list[str]:
    """The time model fitted to this run; not judged, because clocks are not exact."""
    cache = engine.config.cache
    samples = samples_of(
        engine.ledger.records,
        engine.model_config,
        weights=engine.weights,
        dtype=engine.config.dtype,
        kv_dtype=cache.dtype,
    )
    if len(samples) < _LEAST_STEPS:
        return []
    found = fit(samples, find_device("cpu"))
    return [
        f"Time of a step, fitted to {found.num_fitted} of them: {100 * found.error:.0f} % off on "
        f"the {found.num_held_out} held out."
    ]

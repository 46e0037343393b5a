"""Records: sums by request, by phase and in all; a peak is the largest row, a step counts once."""

from __future__ import annotations

import numpy as np

from stairs.accounting.record import ROW, Ledger, Phase, StepRecord


def record(step: int, *rows: dict[str, int]) -> StepRecord:
    array = np.zeros(len(rows), dtype=ROW)
    for target, row in zip(array, rows, strict=True):
        for name, value in row.items():
            target[name] = value
    return StepRecord(step, array, 0.25, 0.5, 0, 0, 0)


def ledger() -> Ledger:
    chunk = {"request": 1, "phase": Phase.PREFILL, "new_tokens": 128, "chunks": 1}
    token = {"request": 2, "phase": Phase.DECODE, "new_tokens": 1}
    ledger = Ledger(keep=1)
    ledger.append(
        record(
            1,
            chunk | {"context": 128, "pairs": 8256, "kv_bytes_stored": 8},
            token | {"context": 300, "pairs": 300, "kv_bytes_allocated": 19},
        )
    )
    ledger.append(
        record(
            2,
            chunk | {"context": 256, "pairs": 24_640, "kv_bytes_stored": 16},
            token | {"context": 301, "pairs": 301, "kv_bytes_allocated": 18},
        )
    )
    return ledger


def test_sums_and_peaks() -> None:
    total, phases = ledger().total, ledger().by_phase
    assert (total.steps, total.new_tokens, total.chunks) == (2, 258, 2)
    assert total.pairs == 8256 + 300 + 24_640 + 301
    assert total.device_seconds == 1.0 and total.host_seconds == 0.5
    assert total.largest_step == 128 * 256 + 301
    assert (total.kv_bytes_stored, total.kv_bytes_allocated) == (16, 19)
    assert phases[Phase.DECODE].pairs == 601 and phases[Phase.DECODE].largest_step == 301
    assert phases[Phase.PREFILL].largest_step == 128 * 256


def test_a_request_is_summed_by_phase_after_its_records_are_gone() -> None:
    book = ledger()
    assert len(book.records) == 1
    sums = book.close(1)
    assert sums[Phase.PREFILL].pairs == 8256 + 24_640 and sums[Phase.PREFILL].steps == 2
    assert sums[Phase.DECODE].steps == 0
    assert book.close(1)[Phase.PREFILL].steps == 0, "closed is forgotten"
    assert book.close(2)[Phase.DECODE].kv_bytes_allocated == 19

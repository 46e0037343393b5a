"""The bench of moved bytes without a card: ncu's page, its refusals, and what is predicted."""

from __future__ import annotations

import importlib
import json
import shlex
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
MIB = 2**20
HEADER = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
PLACE = ["4242", "python3.12", "127.0.0.1"]
METRICS = [
    ("dram__bytes_read.sum", "byte"),
    ("dram__bytes_write.sum", "byte"),
    ("lts__t_sectors_srcunit_tex_op_read.sum", "sector"),
    ("lts__t_sectors_srcunit_tex_op_write.sum", "sector"),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("moved_bytes")


def page(*kernels: tuple[str, tuple[str, ...]], metrics: list[tuple[str, str]] = METRICS) -> str:
    """What ``ncu --csv --page raw --print-units base`` writes."""
    rows = [HEADER + [name for name, _ in metrics], [""] * len(HEADER) + [u for _, u in metrics]]
    for number, (name, figures) in enumerate(kernels):
        rows.append([str(number), *PLACE, name, "1", "7", *figures])
    return "\n".join(
        [
            "==PROF== Connected to process 4242 (/usr/bin/python3.12)",
            '==PROF== Profiling "forward_kernel" - 1: 0%....50%....100% - 2 passes',
            "==PROF== Disconnected from process 4242",
            *(",".join(f'"{field}"' for field in row) for row in rows),
        ]
    )


MARK = ("spin_kernel", ("0", "0", "3", "1"))
TWO_CELLS = page(
    MARK,
    ("forward_kernel", ("12,582,912", "1,024", "393,216", "131,072")),
    MARK,
    ("gemm", ("100", "10", "4", "2")),
    ("softmax", ("200", "20", "6", "1")),
)


def test_a_cell_is_the_sum_of_its_kernels(bench: ModuleType) -> None:
    first, second = bench.kernels_by_cell(TWO_CELLS)
    assert [name for name, _ in second] == ["gemm", "softmax"]
    counted = bench.total(first)
    assert counted["dram_read"] == 12 * MIB and counted["dram_written"] == 1024
    assert counted["l2_read"] == 12 * MIB and counted["l2_written"] == 4 * MIB  # 32 byte sectors
    assert bench.total(second) | {"l2_read": 320, "l2_written": 96} == bench.total(second)
    assert bench.total(second)["dram_read"] == 300


def test_what_was_not_counted_is_none_and_never_a_part(bench: ModuleType) -> None:
    (cell,) = bench.kernels_by_cell(
        page(MARK, ("gemm", ("100", "nan", "4", "2")), ("softmax", ("n/a", "20", "6", "1")))
    )
    counted = bench.total(cell)
    assert counted["dram_read"] is None and counted["dram_written"] is None
    assert counted["l2_read"] == 320
    assert counted["sm_read"] is None, "a metric that the page does not have"
    assert bench.kernels_by_cell("==WARNING== No kernels were profiled.") == []


def test_other_units_are_refused(bench: ModuleType) -> None:
    scaled = [("dram__bytes_read.sum", "Mbyte")]
    with pytest.raises(ValueError, match="'Mbyte'"):
        bench.kernels_of(page(("gemm", ("1.5",)), metrics=scaled))


@pytest.mark.parametrize("causal", [False, True])
def test_the_interval_and_the_materialised_bytes(bench: ModuleType, *, causal: bool) -> None:
    length, heads, width = 1024, 16, 128 * 2  # bytes of a row of one head
    cell = bench.Cell("hopper", length, causal)
    bounds = cell.predicted(128)
    assert bounds["compulsory"] == 4 * length * heads * width
    tiles = length // 128
    keys = 128 * tiles * (tiles + 1) // 2 if causal else tiles * length
    assert bounds["tile_form"] == 2 * (length + keys) * heads * width
    one_tile = cell.predicted(length)
    assert one_tile["tile_form"] == one_tile["compulsory"]

    trips = 8 if causal else 6  # QK^T 1, scale 2, mask 2, softmax 2, PV 1
    materialised = bench.Cell("materialised", length, causal).predicted(None)
    scores = heads * length**2 * 2
    assert materialised["materialised"] == trips * scores + bounds["compulsory"]
    pairs = length * (length + 1) // 2 if causal else length**2
    assert cell.flops == 4 * pairs * heads * 128


def fake_ncu(folder: Path, log: str, told: list[dict[str, object]]) -> str:
    """A program that lists two counters, and writes ``log`` and what the inner process told."""
    (folder / "page").write_text(log)
    (folder / "told").write_text("".join(json.dumps(line) + "\n" for line in told))
    program = folder / "ncu"
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --query-metrics ]; then\n'
        "  echo 'dram__bytes_read     Counter  byte  # of bytes read from DRAM'\n"
        "  echo 'dram__bytes_write    Counter  byte  # of bytes written to DRAM'; exit; fi\n"
        '[ "$1" = --log-file ] || exit 9\n'
        f'cat {shlex.quote(str(folder / "page"))} > "$2"\n'
        f"cat {shlex.quote(str(folder / 'told'))}\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


@pytest.fixture
def records(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines of a run on a card with one length: two cells a side."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(bench, "LENGTHS", (1024,))
    monkeypatch.setattr(bench, "report", lambda **line: lines.append(line))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return lines


def test_a_run_reports_each_cell_beside_its_prediction(
    bench: ModuleType, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    ncu = fake_ncu(tmp_path, TWO_CELLS, [{"rows": 128}, {"rows": 128}])
    metrics = bench.known_metrics(ncu)
    assert metrics == ["dram__bytes_read.sum", "dram__bytes_write.sum"]
    bench.measure("hopper", ncu, metrics=metrics)
    full, causal = records
    assert (full["causal"], causal["causal"]) == (False, True)
    assert full["predicted"] == bench.Cell("hopper", 1024, False).predicted(128)
    assert full["counted"]["l2_read"] == 12 * MIB
    assert causal["kernels"] == {"gemm": 1, "softmax": 1}

    lines = bench.table(records).splitlines()
    assert lines[0] == "| mask | S | GFLOP | compulsory | hopper |"
    assert lines[2] == "| full | 1024 | 9 | 16 | 72 / 16 / 12 + 0 |"
    records[0]["counted"]["l2_read"] = None
    assert "72 / not measured here / 12 + 0" in bench.table(records)


def test_a_cell_that_cannot_run_does_not_shift_the_others(
    bench: ModuleType, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    log = page(MARK, ("forward_kernel", ("7", "0", "1", "0")))
    ncu = fake_ncu(tmp_path, log, [{"problem": "OutOfMemoryError"}, {"rows": 64}])
    bench.measure("hopper", ncu, metrics=["dram__bytes_read.sum"])
    assert records[0]["problem"] == "OutOfMemoryError"
    assert records[1]["causal"] and records[1]["counted"]["dram_read"] == 7


def test_refused_counters_are_told_in_the_words_of_ncu(
    bench: ModuleType, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    words = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    log = f"==PROF== Connected to process 1 (python)\n{words}\n==WARNING== No kernels profiled."
    ncu = fake_ncu(tmp_path, log, [{"rows": 128}, {"rows": 128}])
    bench.measure("hopper", ncu, metrics=["dram__bytes_read.sum"])
    (line,) = records
    assert line["what"] == "not measured here"
    assert words in line["why"] and line["reported"] == "0 of 2 cells"


def test_our_own_failure_is_no_missing_counter(
    bench: ModuleType, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    log = (
        "==ERROR== The application returned an error code (1).\n"
        "==WARNING== No kernels were profiled."
    )
    with pytest.raises(SystemExit, match="ended after 0 of 2 cells"):
        bench.measure("hopper", fake_ncu(tmp_path, log, []), metrics=["dram__bytes_read.sum"])
    assert records == []


def test_without_a_card_one_line_says_so(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench.main([])
    line = json.loads(capsys.readouterr().out)
    assert (line["what"], line["why"]) == ("not measured here", "no NVIDIA GPU")
    assert sys.version.split()[0] in line["machine"]

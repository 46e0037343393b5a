"""What a reader of a table sees: units, kinds, widths; and what a program reads."""

from __future__ import annotations

import io
import json

import pytest

from stairs.accounting.table import Column, Quantity, Table, Unit, card, dumps, show

KIB, MIB, GIB = 2**10, 2**20, 2**30

WIDE = Table(
    "prefill",
    [
        Column("variant"),
        Column("time to first token", "s", "time", "measured"),
        Column("query rows fed", "", "count", "counted"),
        Column("K/V rows computed", "", "count", "counted"),
        Column("K/V rows reused", "", "count", "counted"),
        Column("pairs", "", "count", "counted"),
        Column("largest step", "", "count", "exact"),
        Column("FLOPs", "FLOP", "FLOPs", "exact"),
        Column("stored K/V", "B", "stored bytes", "counted"),
        Column("moved", "B", "moved bytes", "predicted"),
        Column("trips"),
    ],
    [
        (f"variant {i}", 1.5, 8192, 8192, 0, 33_558_528, 67_108_864, 1.3e14, GIB, 1.6e10, "QK, PV")
        for i in range(5)
    ],
    ["Moved bytes are predicted."],
)
NARROW = Table("t", [Column("name"), Column("size", "B", "stored bytes")], [("a", 5), ("b", None)])


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0, "B", "0 B"),
        (1023, "B", "1,023 B"),
        (1536, "B", "1.5 KiB"),
        (128 * KIB, "B", "128 KiB"),
        (3600 * MIB, "B", "3,600 MiB"),  # exact in MiB, not in GiB
        (36_000 * MIB, "B", "36,000 MiB"),
        (4 * GIB, "B", "4 GiB"),
        (16_060_522_496, "B", "14.96 GiB"),
        (999_960_000_000, "FLOP", "1 TFLOP"),
        (291_648_307_200, "FLOP", "291.6 GFLOP"),
        (4.28e12, "B/s", "4.28 TB/s"),
        (0.00374, "s", "3.74 ms"),
        (0.9999, "s", "1 s"),
        (1.2e-6, "s", "1.2 µs"),
        (0, "s", "0 s"),
        (33_558_528, "", "33,558,528"),
        (1.234, "FLOP/B", "1.23 FLOP/B"),
        (None, "s", "unknown"),
        (float("inf"), "s", "inf"),
    ],
)
def test_show(value: float | None, unit: Unit, expected: str) -> None:
    assert show(value, unit) == expected


def test_both_units_are_shown_where_asked() -> None:
    assert show(3600 * MIB, "B", "both") == "3,600 MiB (3.77 GB)"
    assert show(2 * 805_306_368, "FLOP", "both") == "1.61 GFLOP (805.3 MMAC)"
    assert "GB)" not in WIDE.text(units="short")
    assert "(1.07 GB)" in WIDE.text(width=200, units="both")


@pytest.mark.parametrize("units", ["short", "both"])
def test_a_wide_table_is_turned_to_fit_100_columns(units: str) -> None:
    text = WIDE.text(units=units)  # type: ignore[arg-type]
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("33,558,528") == 5
    lines = text.splitlines()
    assert lines[0] == "prefill"
    assert lines[1].split() == [w for i in range(5) for w in ("variant", str(i))]
    assert any(line.startswith("pairs") and "counted" in line for line in lines)


def test_a_narrow_table_keeps_its_columns_and_says_their_kind() -> None:
    lines = ["t", "name   size", "      exact", "----  -----", "a       5 B", "b         -"]
    assert NARROW.text().splitlines() == lines


def test_a_number_and_its_unit_stay_on_one_line() -> None:
    lines = WIDE.text(units="both").splitlines()
    assert not any(line.strip() in {"GB)", "GiB", "TMAC)"} for line in lines)
    assert "\xa0" not in WIDE.text()


def test_a_card_wraps_its_source_not_its_numbers() -> None:
    rows = [("weights", Quantity(4 * GIB, "B", "stored bytes", "estimate", "word " * 40))]
    lines = card("memory", rows).text().splitlines()
    assert max(map(len, lines)) <= 100
    assert "estimate" in lines[3]
    assert "4 GiB" in lines[3]


def test_json_keeps_exact_numbers_and_types() -> None:
    table = json.loads(dumps([WIDE, card("c", [("x", Quantity(7, "B", "moved bytes", "bound"))])]))
    assert table[0]["rows"][0]["pairs"] == 33_558_528
    assert table[0]["columns"][8] == {
        "name": "stored K/V",
        "unit": "B",
        "axis": "stored bytes",
        "kind": "counted",
    }
    assert table[1]["rows"][0]["value"] == {
        "value": 7,
        "unit": "B",
        "axis": "moved bytes",
        "kind": "bound",
        "source": "",
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    pipe, terminal, plain = io.StringIO(), Terminal(), Terminal()
    NARROW.print(pipe)
    NARROW.print(terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    NARROW.print(plain)
    assert pipe.getvalue() == NARROW.text()
    assert "\x1b[36m" in terminal.getvalue()
    assert "\x1b[36m" not in plain.getvalue()
    assert "5 B" in plain.getvalue()

"""The one table every command prints: cells typed by unit, axis and kind, shown as text or JSON.

FLOPs, stored bytes and moved bytes are different axes and never share a column. A kind says how a
number is known: exact (arithmetic), bound, estimate (a constant is in it), predicted (a model of
time or traffic), measured (a clock or an allocator), counted (the loops that ran).
KiB, MiB, GiB are powers of two, kB, MB, GB powers of ten; one multiply-add (MAC) is two FLOP.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

__all__ = [
    "Axis",
    "Cell",
    "Column",
    "Kind",
    "Quantity",
    "Table",
    "Unit",
    "Units",
    "card",
    "dumps",
    "show",
]

_GLUE = "\xa0"  # a space that textwrap does not break at; printed as a plain one

Axis = Literal["FLOPs", "stored bytes", "moved bytes", "time", "count", "none"]
Kind = Literal["exact", "bound", "estimate", "predicted", "measured", "counted"]
Unit = Literal["", "B", "FLOP", "s", "B/s", "FLOP/s", "FLOP/B", "%"]
Units = Literal["short", "both"]  # both: GiB and GB, FLOP and multiply-adds


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number that brings its own type, for a row whose cells are not all alike."""

    value: float | None  # None: not known, and said so
    unit: Unit = ""
    axis: Axis = "count"
    kind: Kind = "exact"
    source: str = ""


Cell = str | int | float | Quantity | None


@dataclass(frozen=True, slots=True)
class Column:
    """Type of the bare numbers below it. Axis "none" is a column of words."""

    name: str
    unit: Unit = ""
    axis: Axis = "none"
    kind: Kind = "exact"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first column names the row."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (
                f"{self.title}: row {row} is not one cell a column"
            )

    def json(self) -> dict[str, Any]:
        """Title, columns with their types, and rows with exact numbers by column name."""
        return {
            "title": self.title,
            "columns": [
                {"name": c.name, "unit": c.unit, "axis": c.axis, "kind": c.kind}
                for c in self.columns
            ],
            "rows": [
                {c.name: _json_cell(cell) for c, cell in zip(self.columns, row, strict=True)}
                for row in self.rows
            ],
            "notes": list(self.notes),
        }

    def text(self, width: int = 100, units: Units = "short") -> str:
        """Aligned plain text. Too wide: words wrap, and if that is not enough the table is turned,
        so that each column becomes a row."""
        header, body = self._layout(width, units)
        return "\n".join([self.title, *header, *body, *self._note_lines(width)]) + "\n"

    def print(self, stream: TextIO, units: Units = "short") -> None:
        """Text for a pipe or a file; on a terminal the same lines in colour unless NO_COLOR."""
        if not stream.isatty():
            stream.write(self.text(units=units))
            return
        from rich.console import Console
        from rich.text import Text

        width = max(60, shutil.get_terminal_size((100, 24)).columns)
        console = Console(
            file=stream, width=width, highlight=False, no_color=bool(os.environ.get("NO_COLOR"))
        )
        header, body = self._layout(width, units)
        console.print(Text(self.title, "bold"), soft_wrap=True)
        for line in header:
            console.print(Text(line, "cyan"), soft_wrap=True)
        for line in body:
            console.print(Text(line), soft_wrap=True)
        for line in self._note_lines(width):
            console.print(Text(line, "dim"), soft_wrap=True)

    def _layout(self, width: int, units: Units) -> tuple[list[str], list[str]]:
        names = [c.name for c in self.columns]
        kinds = ["" if c.axis == "none" else c.kind for c in self.columns]
        body = [
            [_show_cell(c, cell, units) for c, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]
        heads = [names, kinds] if any(kinds) else [names]
        right = [any(_is_number(row[i]) for row in self.rows) for i in range(len(names))]
        words = [i for i in range(len(names)) if not right[i]]
        plain = _align(heads, body, right, words, width)
        if _width(plain) <= width:
            return plain
        turned_body = [
            [f"{names[i]}, {kinds[i]}" if kinds[i] else names[i], *[row[i] for row in body]]
            for i in range(1, len(names))
        ]
        heads, right = [["", *[row[0] for row in body]]], [False] + [True] * len(body)
        turned = _align(heads, turned_body, right, range(len(right)), width)
        return turned if _width(turned) < _width(plain) else plain

    def _note_lines(self, width: int) -> list[str]:
        return [line for note in self.notes for line in textwrap.wrap(note, width)]


def card(title: str, rows: Sequence[tuple[str, Quantity]], notes: Sequence[str] = ()) -> Table:
    """A table of single figures: what, value, kind, where it comes from."""
    columns = (Column("what"), Column("value"), Column("kind"), Column("source"))
    return Table(title, columns, [(n, q, q.kind, q.source) for n, q in rows], notes)


def show(value: float | None, unit: Unit, units: Units = "short") -> str:
    """One number for a reader: exact where that is short, three or four digits elsewhere."""
    if value is None:
        return "unknown"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if unit == "B":
        binary = _binary(value)
        if value == 0:
            return binary
        return f"{binary} ({_decimal(value, 'B')})" if units == "both" else binary
    if unit == "FLOP":
        flop = _decimal(value, "FLOP")
        return f"{flop} ({_decimal(value / 2, 'MAC')})" if units == "both" else flop
    if unit in ("B/s", "FLOP/s"):
        return _decimal(value, unit)
    if unit == "s":
        return _seconds(value)
    number = f"{value:,}" if isinstance(value, int) else _digits(value)
    return f"{number} {unit}".rstrip()


def _binary(value: float) -> str:
    """The largest binary unit, or MiB where only they show the value exactly (3,600 MiB)."""
    names = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(len(names) - 1, max(0, int(abs(value)).bit_length() - 1) // 10)
    exact = round(value / 1024**power, 2) == value / 1024**power
    if not exact and power > 2 and value % 2**20 == 0 and value < 100_000 * 2**20:
        power = 2
        exact = True
    text = f"{value / 1024**power:,.2f}"
    return (text.rstrip("0").rstrip(".") if exact else text) + f" {names[power]}"


def _decimal(value: float, unit: str) -> str:
    power = 0
    while abs(value) >= 999.95 and power < 6:
        value, power = value / 1000, power + 1
    prefix = ["", "k", "M", "G", "T", "P", "E"][power]
    return f"{_digits(value)} {prefix}{unit}"


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    for scale, name in ((1, "s"), (1e-3, "ms")):
        if abs(value) >= 0.9995 * scale:
            return f"{_digits(value / scale)} {name}"
    return f"{_digits(value / 1e-6)} µs"


def _digits(value: float) -> str:
    """Four significant digits from 100 on, three below, without trailing zeros."""
    if value == 0:
        return "0"
    whole = len(str(int(abs(value))))
    decimals = max(0, (1 if whole >= 3 else 3 - whole) if abs(value) >= 1 else 3)
    if abs(value) < 1:
        decimals = 2 - math.floor(math.log10(abs(value)))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float | Quantity)


def _show_cell(column: Column, cell: Cell, units: Units) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    value, unit = (cell.value, cell.unit) if isinstance(cell, Quantity) else (cell, column.unit)
    # A number stays on one line with its unit; only "(16.1 GB)" may go to the next.
    return show(value, unit, units).replace(" ", _GLUE).replace(_GLUE + "(", " (")


def _json_cell(cell: Cell) -> Any:
    if not isinstance(cell, Quantity):
        return cell
    return {
        "value": cell.value,
        "unit": cell.unit,
        "axis": cell.axis,
        "kind": cell.kind,
        "source": cell.source,
    }


def _align(
    heads: list[list[str]],
    body: list[list[str]],
    right: list[bool],
    wrappable: Sequence[int],
    width: int,
) -> tuple[list[str], list[str]]:
    """Header and body lines: columns two spaces apart, header words wrapped to their column; while
    the whole is too wide, the widest ``wrappable`` column gives way, down to its longest word."""

    def longest(texts: list[str]) -> int:
        return max((len(text) for text in texts), default=0)

    widths, floors = [], []
    for i in range(len(heads[0])):
        head_words = [word for head in heads for word in head[i].split()]
        cells = [row[i] for row in body]
        widths.append(max(longest(cells), longest(head_words)))
        floors.append(longest(head_words + [word for cell in cells for word in cell.split(" ")]))
    while sum(widths) + 2 * (len(widths) - 1) > width:
        loose = [i for i in wrappable if widths[i] > floors[i]]
        if not loose:
            break
        widths[max(loose, key=lambda i: widths[i])] -= 1
    header = [line for head in heads for line in _lines(head, widths, right)]
    rule = "  ".join("-" * w for w in widths)
    return [*header, rule], [line for row in body for line in _lines(row, widths, right)]


def _lines(row: list[str], widths: list[int], right: list[bool]) -> list[str]:
    """One row as one or more lines, each cell wrapped to its column's width."""
    wrapped = [_wrap(cell, w) for cell, w in zip(row, widths, strict=True)]
    height = max(len(cell) for cell in wrapped)
    lines = []
    for k in range(height):
        parts = [
            (cell[k] if k < len(cell) else "").rjust(w)
            if is_right
            else (cell[k] if k < len(cell) else "").ljust(w)
            for cell, w, is_right in zip(wrapped, widths, right, strict=True)
        ]
        lines.append("  ".join(parts).rstrip().replace(_GLUE, " "))
    return lines


def _wrap(cell: str, width: int) -> list[str]:
    """The cell's lines; all of them keep the indent of its first."""
    indent = " " * (len(cell) - len(cell.lstrip(" ")))
    lines = textwrap.wrap(
        cell,
        max(width, 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]


def _width(block: tuple[list[str], list[str]]) -> int:
    return max(len(line) for part in block for line in part)


def dumps(tables: Sequence[Table]) -> str:
    """Tables as one JSON document."""
    return json.dumps([table.json() for table in tables], indent=2, ensure_ascii=False)

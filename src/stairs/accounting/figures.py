"""Figures as SVG text, pure functions of numbers: the staircase, the memory bar, the roofline.

Each returns a ``Figure`` (its size and its marks); ``document`` stacks figures into one file.
Colours are CSS variables with a light and a dark value, told apart by hatching and labels too, so
that a page may override them and a black and white print still reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from stairs.accounting.costs import causal_pairs
from stairs.accounting.table import show

__all__ = ["Dot", "Figure", "Stair", "document", "memory_bar", "roofline", "staircase"]

WIDTH = 720
_STYLE = """
svg { --ink: #1b1f24; --paper: #ffffff; --faint: #c9cfd6; --hit: #9aa5b1;
      --c0: #0072b2; --c1: #e69f00; --c2: #009e73; --c3: #cc79a7; --c4: #56b4e9; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e9ec; --paper: #14171a; --faint: #3d444d; --hit: #6b7682; } }
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.title { font-weight: 600; }
.line { stroke: var(--ink); fill: none; } .grid { stroke: var(--faint); fill: none; }
"""
_HATCH = (
    '<pattern id="masked" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" class="grid"/></pattern>'
)


@dataclass(frozen=True, slots=True)
class Figure:
    height: float
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stair:
    """``new`` queries that end at ``context`` keys; ``kind``: hit (reused, not computed), chunk
    or decode."""

    new: int
    context: int
    kind: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A group of kernels on a roofline: FLOP a byte, and its name."""

    name: str
    intensity: float


def document(figures: Sequence[Figure]) -> str:
    """One SVG that holds the figures one below the other."""
    height = sum(figure.height for figure in figures)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img">',
        f"<style>{_STYLE}</style><defs>{_HATCH}</defs>",
        f'<rect width="{WIDTH}" height="{height:g}" fill="var(--paper)"/>',
    ]
    top = 0.0
    for figure in figures:
        parts += [f'<g transform="translate(0 {top:g})">', *figure.marks, "</g>"]
        top += figure.height
    return "\n".join([*parts, "</svg>"]) + "\n"


def staircase(stairs: Sequence[Stair], *, title: str) -> Figure:
    """Query position down, key position right, to scale: area is pairs.

    A step's rectangle runs to its last key; what the mask hides in it is hatched.
    """
    total = max((stair.context for stair in stairs), default=1)
    side, left, top = 360.0, 60.0, 40.0
    scale = side / total
    marks = [_text(20, 22, title, "title"), _rect(left, top, side, side, "none", "grid")]
    pairs, hue = 0, 0
    for stair in stairs:
        start = stair.context - stair.new
        y, height = top + start * scale, stair.new * scale
        x, width = left, stair.context * scale
        if stair.kind == "hit":
            colour, label = "var(--hit)", f"cached {stair.context}: not computed"
        else:
            colour, label = f"var(--c{hue % 5})", f"{stair.kind} {stair.new} x {stair.context}"
            hue += 1
            pairs += causal_pairs(stair.new, stair.context)
        corner, end = f"{x + start * scale:.2f},{y:.2f}", f"{x + width:.2f}"
        shape = f"{x:.2f},{y:.2f} {corner} {end},{y + height:.2f} {x:.2f},{y + height:.2f}"
        marks.append(
            f'<polygon points="{shape}" fill="{colour}"><title>{escape(label)}</title></polygon>'
        )
        if stair.kind != "hit":
            marks.append(
                f'<polygon points="{corner} {end},{y:.2f} {end},{y + height:.2f}" '
                'fill="url(#masked)"/>'
            )
    marks += [
        _text(left, top + side + 16, f"keys 0 to {total}"),
        f'<text transform="translate({left - 8:g} {top + side:g}) rotate(-90)">queries</text>',
        *_stair_legend(stairs, pairs, left + side + 20, top + 12),
    ]
    return Figure(top + side + 32, tuple(marks))


def _stair_legend(stairs: Sequence[Stair], pairs: int, x: float, y: float) -> list[str]:
    computed = [stair for stair in stairs if stair.kind != "hit"]
    rows = sum(stair.new for stair in computed)
    largest = max((stair.new * stair.context for stair in computed), default=0)
    hits = sum(stair.new for stair in stairs if stair.kind == "hit")
    lines = [
        f"{rows:,} queries in {len(computed)} steps",
        f"{pairs:,} pairs (a head, a layer)",
        f"{largest:,} in the largest step",
        f"{hits:,} tokens reused (grey)",
        "hatched: hidden by the mask",
    ]
    return [_text(x, y + 18 * i, line) for i, line in enumerate(lines)]


def memory_bar(parts: Sequence[tuple[str, int]], total: int, *, title: str) -> Figure:
    """Who holds a device's memory, to scale; what exceeds it is said, not drawn."""
    left, width, top, height = 20.0, WIDTH - 40.0, 40.0, 28.0
    marks = [_text(20, 22, title, "title"), _rect(left, top, width, height, "none", "grid")]
    x, room = left, width
    for i, (name, size) in enumerate(parts):
        drawn = min(room, width * max(size, 0) / total)
        colour = f"var(--c{i % 5})"
        label = f"{name} {show(size, 'B', 'both')}"
        if drawn > 0:
            marks.append(_rect(x, top, drawn, height, colour, "", label))
        column, row = i % 2, i // 2
        lx, ly = left + column * width / 2, top + height + 20 + 18 * row
        marks += [_rect(lx, ly - 10, 10, 10, colour, ""), _text(lx + 16, ly, label)]
        x, room = x + drawn, room - drawn
    rows = math.ceil(len(parts) / 2)
    used = sum(size for _, size in parts)
    if used > total:
        line = f"exceeds the device by {show(used - total, 'B', 'both')}"
        marks.append(_text(left, top + height + 20 + 18 * rows, line))
    return Figure(top + height + 24 + 18 * (rows + 1), tuple(marks))


def roofline(dots: Sequence[Dot], *, flop_rate: float, byte_rate: float, title: str) -> Figure:
    """Reachable FLOP/s over FLOP a byte, both logarithmic; each dot on its roof, so what is left
    of the ridge waits for memory."""
    left, top, width, height = 40.0, 40.0, WIDTH - 80.0, 220.0
    ridge = flop_rate / byte_rate
    low = min([0.25, *(dot.intensity for dot in dots if dot.intensity > 0)])
    high = max([4 * ridge, *(dot.intensity for dot in dots)])
    floor = byte_rate * low

    def x(intensity: float) -> float:
        return left + width * math.log(intensity / low) / math.log(high / low)

    def y(rate: float) -> float:
        return top + height * (1 - math.log(rate / floor) / math.log(1.3 * flop_rate / floor))

    marks = [
        _text(20, 22, title, "title"),
        _rect(left, top, width, height, "none", "grid"),
        f'<polyline class="line" points="{x(low):.2f},{y(floor):.2f} '
        f'{x(ridge):.2f},{y(flop_rate):.2f} {x(high):.2f},{y(flop_rate):.2f}"/>',
        _text(x(ridge) - 40, top + height + 16, f"ridge {show(ridge, 'FLOP/B')}"),
        _text(
            left,
            top + height + 32,
            f"{show(low, '')} to {show(float(round(high)), '')} FLOP a byte",
        ),
        _text(left + 6, y(flop_rate) + 14, show(flop_rate, "FLOP/s")),
    ]
    for i, dot in enumerate(dots):
        if dot.intensity <= 0:
            continue
        roof = min(flop_rate, dot.intensity * byte_rate)
        colour = f"var(--c{i % 5})"
        label = f"{i + 1} {dot.name}: {show(dot.intensity, '')}"
        cx, cy = x(dot.intensity), y(roof)
        marks += [
            f'<circle cx="{cx:.2f}" cy="{cy:.2f}" r="5" fill="{colour}">'
            f"<title>{escape(label)}</title></circle>",
            _text(cx - 3, cy + 18 + 14 * (i % 4), str(i + 1)),
            _text(20 + i % 2 * WIDTH / 2, top + height + 58 + 18 * (i // 2), label),
        ]
    return Figure(top + height + 70 + 18 * math.ceil(len(dots) / 2), tuple(marks))


def _text(x: float, y: float, content: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.6g}" y="{y:.6g}"{kind}>{escape(content)}</text>'


def _rect(
    x: float, y: float, width: float, height: float, fill: str, style: str, label: str = ""
) -> str:
    kind = f' class="{style}"' if style else ""
    tip = f"<title>{escape(label)}</title>" if label else ""
    return (
        f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}" '
        f'fill="{fill}"{kind}>{tip}</rect>'
    )

"""Figures are numbers drawn to scale: what is measured in them is what was asked for."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from stairs.accounting import figures
from stairs.accounting.costs import causal_pairs, prefill_steps

SVG = "{http://www.w3.org/2000/svg}"


def parse(*parts: figures.Figure) -> ET.Element:
    return ET.fromstring(figures.document(parts))


def area(points: str) -> float:
    corners = [tuple(map(float, point.split(","))) for point in points.split()]
    pairs = zip(corners, corners[1:] + corners[:1], strict=True)
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in pairs)) / 2


def labelled(root: ET.Element, tag: str) -> dict[str, ET.Element]:
    found = {}
    for element in root.iter(SVG + tag):
        title = element.find(SVG + "title")
        if title is not None:
            found[title.text or ""] = element
    return found


def test_area_in_a_staircase_is_pairs() -> None:
    cached, prompt, chunk = 48, 200, 64
    stairs = [figures.Stair(cached, cached, "hit")]
    stairs += [
        figures.Stair(*step, "chunk") for step in prefill_steps(prompt, chunk=chunk, cached=cached)
    ]
    stairs.append(figures.Stair(1, prompt + 1, "decode"))
    shapes = labelled(parse(figures.staircase(stairs, title="t")), "polygon")
    cell = (360 / (prompt + 1)) ** 2
    for stair in stairs:
        label = (
            f"cached {cached}: not computed"
            if stair.kind == "hit"
            else f"{stair.kind} {stair.new} x {stair.context}"
        )
        # A triangle's area is n·n/2 where pairs are n(n+1)/2: the diagonal's other halves.
        pairs = causal_pairs(stair.new, stair.context) - stair.new / 2
        assert abs(area(shapes[label].get("points", "")) / cell - pairs) < 0.5 + 0.002 * pairs
    text = figures.document([figures.staircase(stairs, title="t")])
    computed = sum(causal_pairs(s.new, s.context) for s in stairs if s.kind != "hit")
    assert f"{computed:,} pairs" in text
    assert "48 tokens reused" in text


def test_a_memory_bar_is_to_scale_and_says_what_does_not_fit() -> None:
    root = parse(figures.memory_bar([("weights", 25), ("K/V", 50)], 100, title="m"))
    bars = labelled(root, "rect")
    widths = [float(bar.get("width", "0")) for bar in bars.values()]
    assert [round(w / 680, 3) for w in widths] == [0.25, 0.5]
    over = figures.document([figures.memory_bar([("weights", 150)], 100, title="m")])
    assert "exceeds the device by 50 B" in over
    only = labelled(ET.fromstring(over), "rect")
    assert [float(bar.get("width", "0")) for bar in only.values()] == [680]


def test_dots_lie_on_the_roof_left_and_right_of_the_ridge() -> None:
    dots = [
        figures.Dot("decode", 1),
        figures.Dot("ridge", 100),
        figures.Dot("prefill", 1000),
        figures.Dot("nothing", 0),
    ]
    plot = figures.roofline(dots, flop_rate=1e14, byte_rate=1e12, title="r")
    circles = [
        (float(c.get("cx", "0")), float(c.get("cy", "0"))) for c in parse(plot).iter(SVG + "circle")
    ]
    decode, at_ridge, prefill = circles
    assert decode[0] < at_ridge[0] < prefill[0]
    assert decode[1] > at_ridge[1] == prefill[1]  # y grows downwards
    # Log axes: two decades of intensity below the ridge are two decades of FLOP/s below the roof.
    line = next(parse(plot).iter(SVG + "polyline")).get("points", "").split()
    floor_y, roof_y = (float(line[i].split(",")[1]) for i in (0, 1))
    import math

    decades = math.log10(100 / 0.25)
    assert abs((decode[1] - roof_y) / (floor_y - roof_y) - 2 / decades) < 1e-3


def test_names_are_escaped_and_both_themes_are_there() -> None:
    text = figures.document([figures.memory_bar([("<&>", 1)], 2, title="a < b")])
    root = ET.fromstring(text)
    assert "a < b" in [element.text for element in root.iter(SVG + "text")]
    assert "prefers-color-scheme: dark" in text
    assert text.count("--ink:") == 2


def test_figures_stack_without_overlap() -> None:
    bar = figures.memory_bar([("weights", 1)], 2, title="m")
    root = parse(bar, bar)
    assert float(root.get("height", "0")) == 2 * bar.height
    tops = [g.get("transform") for g in root.iter(SVG + "g")]
    assert tops == ["translate(0 0)", f"translate(0 {bar.height:g})"]

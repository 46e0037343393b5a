"""Which tile came out best? `python bench/attention_gpu.py --decode --sweep | python
bench/sweep_best.py`: for each head shape every side's speed over the best peer's (fa3 or cudnn;
without them our plain kernel's, else the first side's): geometric mean, worst cell, and the cells
it is the first in.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any


def speeds(line: dict[str, Any]) -> dict[str, float]:
    """Of each side, larger is quicker."""
    if "us" in line:
        return {side: 1 / us for side, us in line["us"].items()}
    return dict(line["tflops"])


def shape_of(line: dict[str, Any]) -> str:
    if "block_size" in line:
        return f"{line['heads']} page {line['block_size']}"
    return f"D {line['head_dim']} causal={line['causal']}"


def cell_of(line: dict[str, Any]) -> str:
    return f"{line['batch']} x {line['context']}" if "batch" in line else str(line["length"])


def compared(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """shape -> side -> cell -> speed over the reference's."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        speed = speeds(line)
        peers = [speed[name] for name in ("fa3", "cudnn") if name in speed]
        reference = max(peers) if peers else speed.get("stairs") or next(iter(speed.values()))
        for side, value in speed.items():
            found[shape_of(line)][side][cell_of(line)] = value / reference
    return found


def main() -> None:
    lines = [json.loads(text) for text in sys.stdin if text.startswith("{")]
    swept = [line for line in lines if line["what"].endswith("_sweep")]
    for shape, sides in compared(swept).items():
        print(shape)
        cells = next(iter(sides.values()))
        first = {
            cell: max(sides, key=lambda side, cell=cell: sides[side].get(cell, 0.0))  # type: ignore[misc]
            for cell in cells
        }
        means = {
            side: math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            for side, ratios in sides.items()
        }
        for side in sorted(means, key=means.__getitem__, reverse=True):
            worst = min(sides[side], key=sides[side].__getitem__)
            ahead = [cell for cell, name in first.items() if name == side]
            print(
                f"  {means[side]:.3f}  worst {sides[side][worst]:.2f} at {worst}"
                f"  first in {len(ahead)}  {side}{': ' if ahead else ''}{', '.join(ahead)}"
            )


if __name__ == "__main__":
    main()

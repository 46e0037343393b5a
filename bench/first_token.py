"""How long from `stairs generate` to its first token? One JSON line: the median of each part.

`python bench/first_token.py [MODEL]`; a first run warms the caches and is not counted.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path

from quoted import commit, machine

RUNS = 5


def parts(model: str) -> dict[str, float]:
    """Seconds of each part, as `stairs generate -v` prints them."""
    stairs = Path(sys.executable).parent / "stairs"
    command = [stairs, "generate", "The library opens at", "--model", model, "--max-tokens", "8"]
    done = subprocess.run([*command, "-v"], capture_output=True, text=True, check=True)
    return {
        name: float(seconds)
        for name, seconds in re.findall(r"^(\S+(?: \S+)?) +([\d.]+) s\b", done.stderr, re.M)
    }


def main(model: str) -> None:
    parts(model)
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(RUNS):
        for name, value in parts(model).items():
            seconds[name].append(value)
    record = {
        "bench": "first_token",
        "model": model,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "runs": RUNS,
        "commit": commit(),
        "machine": machine(),
        "date": date.today().isoformat(),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "smollm2")

"""Run the tests that need a GPU; append what came of it to records/gpu_tests.jsonl."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import torch

from quoted import ROOT, commit, machine

RECORDS = ROOT / "bench" / "records" / "gpu_tests.jsonl"


# The kernels' tests share a card; the engine's measure its memory and run alone.
SHARES = [["-n", "8", "tests/attention", "tests/models"], ["tests/engine/test_on_gpu.py"]]


def run(arguments: list[str]) -> Counter[str]:
    """Counts of one pytest run, and its seconds, rounded up."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        command += ["-p", "no:benchmark"]  # it warns beside xdist, and a warning is an error here
        subprocess.run([*command, *arguments, *sys.argv[1:]], cwd=ROOT)
        suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return Counter(counts) + Counter(seconds=math.ceil(float(suite.get("time", 0))))


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_tests: no NVIDIA GPU here", file=sys.stderr)
        return 1
    counts = sum((run(share) for share in SHARES), Counter())
    record = {
        "bench": "gpu_tests",
        **{name: counts[name] for name in ("tests", "failures", "errors", "skipped", "seconds")},
        "commit": os.environ.get("STAIRS_COMMIT") or commit(),
        "machine": f"{torch.cuda.get_device_name()}, {machine()}",
        "date": date.today().isoformat(),
    }
    with RECORDS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))
    return int(counts["failures"] + counts["errors"] > 0 or not counts["tests"])


if __name__ == "__main__":
    sys.exit(main())

"""Run the commands that the documents quote, record what they print, and quote that.

A quotation is a `console` block: `$ command`, then its output. Each run adds one line a command to
records/quoted.jsonl; a test compares the documents with the newest ones.
`python bench/quoted.py [TEXT]` runs the commands that contain TEXT, or all of them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "bench" / "records" / "quoted.jsonl"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n\$ (?P<command>.*)\n(?P<output>(?:.*\n)*?)```$", re.M)


def machine() -> str:
    """Processor, cores and software, in words."""
    import torch

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text())
        model = names[0] if names else model
    python = platform.python_version()
    return f"{model}, {os.cpu_count()} cores, Python {python}, torch {torch.__version__}"


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def run(command: str) -> str:
    """What it writes to stdout; ends this program where it fails."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }
    print(f"$ {command}", file=sys.stderr, flush=True)
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}")
    return done.stdout


def main(chosen: str) -> None:
    commands = sorted({m["command"] for d in DOCUMENTS for m in BLOCK.finditer(d.read_text())})
    where = {"commit": commit(), "machine": machine(), "date": date.today().isoformat()}
    outputs = {}
    for command in commands:
        if chosen in command:
            outputs[command] = run(command)
    with RECORDS.open("a") as file:
        for command, output in outputs.items():
            record = {"bench": "quoted", "command": command, "output": output} | where
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def quote(match: re.Match[str]) -> str:
        output = outputs.get(match["command"], match["output"])
        return f"```console\n$ {match['command']}\n{output}```"

    for document in DOCUMENTS:
        text = document.read_text()
        quoted = BLOCK.sub(quote, text)
        if quoted != text:
            document.write_text(quoted)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "")

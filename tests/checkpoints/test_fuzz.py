"""Five seconds of the fuzzer, and that it would see what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).with_name("fuzz.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=FUZZ.parent
    )


def test_damaged_files_are_refused_by_name():
    done = run(str(FUZZ), "5", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tried") == 5


def test_the_fuzzer_sees_a_large_allocation_and_a_strange_error():
    code = (
        "import fuzz; fuzz.cap_memory(); print(fuzz.with_errors(lambda: bytearray(110 << 20)));"
        "print(fuzz.with_errors(lambda: {}['x']));"
        "print(fuzz.with_errors(lambda: bytearray(1 << 20)))"
    )
    done = run("-c", code)
    assert "MemoryError" in done.stdout and "KeyError: 'x'" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("None")

"""``stairs serve`` as a user starts it: its own processes, a free port, nothing of the user's."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai

ROOT = Path(__file__).parents[1]


def wait_until(holds: Callable[[], bool], *, seconds: float = 120) -> None:
    """Far longer than it should take: what runs this may be busy with other things."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {seconds:g} s"
        time.sleep(0.005)


class Server:
    """``url``, ``http`` and ``openai`` are there once it is ready."""

    def __init__(self, model: Path, *arguments: str, python_path: Path = ROOT / "src") -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("STAIRS_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join((str(python_path), str(ROOT / "src"))),
            "STAIRS_PREFIX_FOLDER": str(model.parent / "prefixes"),
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", "from stairs.cli import main; main()", "serve"]
        self.process = subprocess.Popen(
            [*command, str(model), "--port", "0", "--served-model-name", "tiny", *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.url = ""
        # Read to the end whatever the test does: a full pipe would stop the server.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            self._lines.put(line)
        self.process.stderr.close()
        self._lines.put(None)

    def wait_ready(self) -> Server:
        line = self.wait_line(r"Ready: chat at (\S+),")
        self.url = line[1]
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self

    def wait_line(self, pattern: str) -> re.Match[str]:
        """The next line that matches."""
        while (line := self._lines.get()) is not None:
            if match := re.search(pattern, line):
                return match
        self.stop_when_done()
        raise AssertionError("the server ended:\n" + "".join(self.log))

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics."""
        for line in self.http.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(
                f'{key}="{label}"' in sample for key, label in labels.items()
            ):
                return float(value)
        raise AssertionError(f"no sample {name} {labels}")

    def engine_pid(self) -> int:
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "engine_process"],
            capture_output=True,
            text=True,
        )
        return int(found.stdout)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.stop_when_done()

    def stop_when_done(self) -> int:
        """Its exit code, once it ends by itself; ``log`` then holds all it said."""
        code = self.process.wait(120)
        self._reader.join()
        if self.url:
            self.http.close()
            self.openai.close()
        return code

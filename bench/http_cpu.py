"""CPU time of the HTTP process: a streamed token at many streams, and a second without requests.

    python bench/http_cpu.py [--model smollm2] [--streams 32] [--tokens 64]

Starts `stairs serve`, keeps all streams open at once, and reads the process's own clock from the
system before and after, so that what else the machine does hardly counts. One JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from urllib.parse import urlsplit

from quoted import commit, machine

ROOT = Path(__file__).resolve().parent.parent
IDLE_SECONDS = 10


def cpu_seconds(pid: int) -> float:
    """User and system time of one process, all its threads."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def start(model: str, streams: int) -> tuple[subprocess.Popen[str], str]:
    code = "from stairs.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", model, "--port", "0"]
    server = subprocess.Popen(
        [*command, "--max-num-seqs", str(streams), "--log-level", "warning"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"Ready: chat at (\S+),", line):
            return server, found[1]
    sys.exit("the server did not start")


async def stream(url: str, index: int, tokens: int) -> int:
    """One streamed answer; how many chunks had text."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"Count from {index}."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    data = await reader.read()
    writer.close()
    assert b"[DONE]" in data, data[-300:]
    return data.count(b'"delta":{"content":')


async def run(url: str, streams: int, tokens: int) -> int:
    return sum(await asyncio.gather(*(stream(url, i, tokens) for i in range(streams))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    server, url = start(options.model, options.streams)
    try:
        asyncio.run(run(url, options.streams, 4))
        before, began = cpu_seconds(server.pid), time.monotonic()
        chunks = asyncio.run(run(url, options.streams, options.tokens))
        busy, wall = cpu_seconds(server.pid) - before, time.monotonic() - began
        before = cpu_seconds(server.pid)
        time.sleep(IDLE_SECONDS)
        idle = cpu_seconds(server.pid) - before
    finally:
        server.terminate()
        server.communicate()
    print(
        json.dumps(
            {
                "bench": "http_cpu",
                "model": options.model,
                "streams": options.streams,
                "tokens": options.streams * options.tokens,
                "chunks": chunks,
                "wall_seconds": round(wall, 2),
                "http_cpu_us_per_token": round(busy / (options.streams * options.tokens) * 1e6, 1),
                "idle_cpu_share": round(idle / IDLE_SECONDS, 4),
                "commit": commit(),
                "machine": machine(),
                "date": date.today().isoformat(),
            }
        )
    )


if __name__ == "__main__":
    main()

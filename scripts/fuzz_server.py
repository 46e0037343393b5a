"""Throw generated requests at a running server, after its own /openapi.json, and look at it then.

    stairs serve MODEL --max-model-len 512 --port 8000
    python scripts/fuzz_server.py http://127.0.0.1:8000 [SECONDS]

Fails on any 5xx, a reply that is not what is described, a block that is still held when nothing
runs, or an engine that died. Needs schemathesis (the dev extra).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

CHECKS = ",".join(
    (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    )
)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return reply.read().decode()


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}\{{.*\}} (\S+)$", get(f"{url}/metrics"), re.M)
    assert found, name
    return float(found[1])


def pinned_share(url: str) -> float:
    """Share of the pool that prefixes hold: what remains when nothing runs."""
    size = re.search(r'num_gpu_blocks="(\d+)"', get(f"{url}/metrics"))
    block = re.search(r'block_size="(\d+)"', get(f"{url}/metrics"))
    assert size and block
    pinned = json.loads(get(f"{url}/v1/prefixes"))["data"]
    return sum(one["num_pinned_tokens"] for one in pinned) / int(block[1]) / int(size[1])


def wait_idle(url: str) -> None:
    for _ in range(600):
        if (
            metric(url, "vllm:num_requests_running")
            == 0
            == metric(url, "vllm:num_requests_waiting")
        ):
            return
        time.sleep(0.1)
    sys.exit("something still runs a minute after the last request")


def main(url: str, seconds: int) -> None:
    command = Path(sys.executable).parent / "schemathesis"
    done = subprocess.run(
        [
            *(command, "run", f"{url}/openapi.json", "--checks", CHECKS, "--workers", "4"),
            *(
                "--max-time",
                str(seconds),
                "--max-examples",
                "100000",
                "--phases",
                "fuzzing",
            ),
            *("--continue-on-failure", "--request-timeout", "60", "--warnings", "off"),
            *("--suppress-health-check", "all", "--no-color"),
        ]
    )
    wait_idle(url)
    health = json.loads(get(f"{url}/health"))
    restarts = metric(url, "stairs:engine_restarts_total")
    held, pinned = metric(url, "vllm:kv_cache_usage_perc"), pinned_share(url)
    print(json.dumps({"exit": done.returncode, "health": health, "restarts": restarts,
                      "blocks_held": held, "blocks_pinned": pinned}))  # fmt: skip
    well = health["status"] == "ready" and restarts == 0 and held <= pinned + 1e-9
    sys.exit(done.returncode if well else 1)


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), int(sys.argv[2]) if len(sys.argv) > 2 else 300)

"""What the GPU benches share: sides timed in turn, one JSON line a cell, FlashAttention-3."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from torch import Tensor

from quoted import commit, machine

Side = Callable[[], object]


def captured(calls: list[Side]) -> Side:
    """All calls in one graph, which keeps what they use alive."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    return lambda: (graph.replay(), kept, calls)


def host_microseconds(side: Side, *, repeats: int = 9) -> float:
    """Median time until a call returns to an idle GPU's caller: what a launch costs the CPU."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        side()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e6, 1)


def milliseconds(sides: dict[str, Side], *, repeats: int) -> dict[str, float]:
    """Median time of each, one run of every side after the other."""
    for side in sides.values():
        side()
        side()
    torch.cuda.synchronize()
    events = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            side()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        for name, pairs in events.items()
    }


def report(**figures: object) -> None:
    where = {
        "commit": os.environ.get("STAIRS_COMMIT") or commit(),
        "machine": f"{torch.cuda.get_device_name()}, {machine()}",
        "date": date.today().isoformat(),
    }
    print(json.dumps({"bench": "attention_gpu", **figures, **where}), flush=True)


def fa3_side(
    forward: Any, qkv: list[Tensor], ends_q: Tensor, ends_kv: Tensor | None,
    kv_len: Tensor | None, max_q: int, max_kv: int, table: Tensor | None, *, causal: bool,
) -> Side:  # fmt: skip
    """Arguments in the order of the extension's own signature."""
    q, k, v = qkv
    out = torch.empty_like(q)
    arguments = (
        q, k, v, None, None, None, out, ends_q, ends_kv, None, None, kv_len, max_q, max_kv, table,
        None, None, None, None, None, None, None, None, q.shape[-1] ** -0.5, causal, -1, -1, 0.0,
        True, None, 0, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return lambda: forward(*arguments)


def load_fa3(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("_vllm_fa3_C", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return torch.ops._vllm_fa3_C.fwd

"""How fast is attention alone? One JSON line a figure. `python bench/attention.py --cpu`

Decode: GB/s of K and V read from scattered pages, beside the read bandwidth of the same moment.
Chunk: 512 new rows over a context in pages, their K/V write included, beside torch's SDPA on
contiguous K and V with a bool mask. The sides run in turn; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.nn.functional as F

from quoted import commit, machine
from stairs.attention.attend import attend
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.cache.paged_kv import PagedKV

BLOCK = 16
# heads, kv heads, head_dim: SmolLM2-135M, GPT-2, Llama-3-8B
SHAPES = {"9/3x64": (9, 3, 64), "12/12x64": (12, 12, 64), "32/8x128": (32, 8, 128)}


def pages_of(
    num_sequences: int, num_q: int, context: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], LayerKV, AttnMeta]:
    """Queries, this step's K and V, and a pool whose pages lie in random order."""
    num_heads, kv_heads, head_dim = shape
    pages = -(-context // BLOCK)
    table = torch.randperm(num_sequences * pages).view(num_sequences, pages).to(torch.int32)
    pool = PagedKV(
        num_sequences * pages,
        BLOCK,
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    ).layers[0]
    pool.k.normal_()
    pool.v.normal_()
    position = torch.arange(context - num_q, context)
    page = table[:, position // BLOCK].long()
    num_rows = num_sequences * num_q
    meta = AttnMeta(
        cu_q=torch.arange(0, num_rows + 1, num_q, dtype=torch.int32),
        kv_len=torch.full((num_sequences,), context, dtype=torch.int32),
        block_table=table,
        slots=(page * BLOCK + position % BLOCK).flatten(),
        counts=torch.zeros((num_sequences, 3), dtype=torch.int64),
    )
    rows = tuple(torch.randn(num_rows, n, head_dim) for n in (num_heads, kv_heads, kv_heads))
    return rows, pool, meta


def in_turn(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each side, one run of each after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(**figures: object) -> None:
    where = {"commit": commit(), "machine": machine(), "date": date.today().isoformat()}
    threads = torch.get_num_threads()
    print(json.dumps({"bench": "attention", **figures, "threads": threads, **where}), flush=True)


def decode(heads: str, dtype: torch.dtype, *, repeats: int) -> None:
    """Eight sequences of 4096 keys: the pool is far larger than any cache."""
    (q, k, v), layer_kv, meta = pages_of(8, 1, 4096, SHAPES[heads], dtype)
    stream = torch.randn(64 * 2**20)
    sides = {"decode": lambda: attend(q, k, v, layer_kv, meta), "read": stream.sum}
    took = in_turn(sides, repeats)
    speed = 2 * layer_kv.k.nbytes / took["decode"] / 1e9
    bandwidth = stream.nbytes / took["read"] / 1e9
    report(
        what="decode",
        heads=heads,
        kv_dtype=str(dtype).removeprefix("torch."),
        gb_per_s=round(speed, 2),
        read_gb_per_s=round(bandwidth, 2),
        share=round(speed / bandwidth, 3),
    )


def chunk(heads: str, context: int, *, repeats: int) -> None:
    (q, k, v), layer_kv, meta = pages_of(1, 512, context, SHAPES[heads], torch.float32)
    num_heads, kv_heads, head_dim = SHAPES[heads]
    keys, values = (torch.randn(1, kv_heads, context, head_dim) for _ in range(2))
    rows = q.view(1, 512, num_heads, head_dim).transpose(1, 2)
    mask = torch.ones(512, context, dtype=torch.bool).tril(context - 512)
    sides = {
        "ours": lambda: attend(q, k, v, layer_kv, meta),
        "torch": lambda: F.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, enable_gqa=True
        ),
    }
    took = in_turn(sides, repeats)
    report(
        what="chunk of 512",
        heads=heads,
        context=context,
        ours_ms=round(1e3 * took["ours"], 2),
        torch_ms=round(1e3 * took["torch"], 2),
        speed=round(took["torch"] / took["ours"], 3),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", required=True)
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    for heads in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            decode(heads, dtype, repeats=asked.repeats)
    for heads in ("9/3x64", "12/12x64"):
        for context in (512, 1024, 2048, 4096, 8192):
            chunk(heads, context, repeats=asked.repeats)

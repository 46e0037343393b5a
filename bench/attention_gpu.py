"""How fast is attention on a GPU, beside what else runs there? One JSON line a cell.

`python bench/attention_gpu.py [--prefill] [--decode] [--sweep] [--fa3 FILE]`: contiguous prefill
beside PyTorch's FlashAttention-2 and cuDNN, FlexAttention and materialised attention, and prompt
chunks over pages; paged decode in a CUDA graph. Ours by plain Triton and (`ours_hopper`) Gluon;
--sweep: every tile of the latter. FILE is vLLM's build of FlashAttention-3 (_vllm_fa3_C.abi3.so).
bfloat16, fresh random inputs, sides in turn, medians; a causal cell counts half the FLOPs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpu_prefill import HEAD_DIMS, chunks, prefill
from gpu_sides import Side, captured, fa3_side, load_fa3, milliseconds, report
from stairs.attention.attend import attend_written, cut
from stairs.attention.devices import cutter_for, hopper_decode_lacks
from stairs.attention.hopper import padded
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.tiles import HopperTile, hopper_tiles

HEADS = [(32, 8, 128), (32, 32, 128), (64, 8, 128), (9, 3, 64), (12, 12, 64), (32, 1, 128)]
BATCHES = [(1, 1024), (1, 8192), (1, 32768), (8, 8192), (32, 2048), (32, 8192), (128, 1024),
           (128, 4096), (256, 1024)]  # fmt: skip
MIXED = [round(17 * (16384 / 17) ** (i / 63)) for i in range(64)]
FIXED_KEYS = 1024  # of a split that depends on its own sequence alone
COLD_BYTES = 300e6  # K/V read between two looks at the same page: several times the L2 cache

# -- decode ---------------------------------------------------------------------------------------


def decode(
    fa3: Any, *, repeats: int, block_sizes: Sequence[int], heads: Sequence[str], num_new: int,
    sweep: bool,
) -> None:  # fmt: skip
    """``num_new`` queries a sequence over shuffled pages, in a CUDA graph: microseconds, TB/s of
    K/V, and TB/s that a copy of 1 GiB reads and writes in the same run."""
    copied = copy_speed(repeats=repeats)
    for shape in [tuple(map(int, each.split("/"))) for each in heads] or HEADS:
        for lengths in [*([context] * batch for batch, context in BATCHES), MIXED]:
            for block_size in block_sizes:
                read = 4 * sum(lengths) * shape[1] * shape[2]
                copies = max(1, min(6, int(COLD_BYTES // read) + 1))
                sides = decode_sides(
                    shape, lengths, block_size, copies=copies, fa3=fa3, num_new=num_new,
                    sweep=sweep,
                )  # fmt: skip
                times = milliseconds(sides, repeats=repeats)
                us = {name: round(ms * 1e3 / copies, 2) for name, ms in times.items()}
                best = min(time for name, time in us.items() if name not in ("fa3", "hopper_fixed"))
                context = lengths[0] if min(lengths) == max(lengths) else "17 to 16384"
                report(
                    what="decode_sweep" if sweep else "decode", heads="/".join(map(str, shape)),
                    batch=len(lengths), context=context, new=num_new, block_size=block_size, us=us,
                    tb_per_s=round(read / best / 1e6, 2), copy_tb_per_s=copied,
                )  # fmt: skip
                del sides
                torch.cuda.empty_cache()


def copy_speed(*, repeats: int) -> float:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = milliseconds({"copy": lambda: target.copy_(source)}, repeats=repeats)
    return round(2 * source.nbytes / times["copy"] / 1e9, 2)


def decode_sides(
    heads: tuple[int, int, int], lengths: list[int], block_size: int,
    *, copies: int, fa3: Any, num_new: int, sweep: bool,
) -> dict[str, Side]:  # fmt: skip
    """Each side reads ``copies`` pools in turn, so that none stays in the cache."""
    q, pools, plain = paged(*heads, lengths, block_size, copies=copies, num_new=num_new)
    metas = {"stairs": cut(q, pools[0], plain)}
    lacks = hopper_decode_lacks(
        pools[0], dtype=q.dtype, num_heads=heads[0], capability=torch.cuda.get_device_capability()
    )
    if lacks is None:
        own = hopper_tiles(heads[2], heads[0] // heads[1])
        ways = {"ours_hopper": own}
        if sweep:
            ways = {f"hopper {told(tile)}": (tile,) for tile in swept_tiles(heads, num_new)}
        metas |= {name: with_tiles(q, pools[0], plain, tiles) for name, tiles in ways.items()}
        metas["hopper_fixed"] = with_tiles(q, pools[0], plain, own, fixed_keys=FIXED_KEYS)
    sides = {
        name: captured([lambda p=pool, m=meta: attend_written(q, p, m) for pool in pools])
        for name, meta in metas.items()
    }
    right = attend_written(q, pools[0], metas["stairs"])
    for name, meta in metas.items():
        ours = attend_written(q, pools[0], meta)
        torch.testing.assert_close(
            ours, right, rtol=2e-2, atol=2e-3, msg=lambda found, name=name: f"{name}: {found}"
        )
    if fa3 is not None:
        calls = [
            fa3_side(
                fa3, [q, *rows_first(pool)], plain.cu_q, None, plain.kv_len, num_new, max(lengths),
                plain.block_table, causal=True,
            )
            for pool in pools
        ]  # fmt: skip
        sides["fa3"] = captured(calls)
    return sides


# (rows, keys, stages, programs an SM), by padded head_dim: what fits an SM
SHAPES = {
    64: [(16, 64, 3, 3), (16, 64, 2, 4), (16, 64, 4, 2), (16, 128, 3, 2), (64, 64, 3, 3),
         (64, 64, 4, 2), (64, 128, 3, 2)],
    128: [(16, 64, 3, 2), (16, 64, 2, 2), (16, 64, 6, 1), (16, 128, 3, 1), (64, 64, 3, 2),
          (64, 64, 2, 2), (64, 64, 6, 1), (64, 128, 3, 1)],
    256: [(16, 64, 3, 1), (16, 64, 2, 1), (64, 32, 6, 1), (64, 32, 4, 1), (64, 32, 3, 1)],
}  # fmt: skip


def swept_tiles(heads: tuple[int, int, int], num_new: int) -> list[HopperTile]:
    """Every shape that holds the rows, and ours launched late and with other splits."""
    rows = heads[0] // heads[1] * num_new
    tiles = [HopperTile(*shape) for shape in SHAPES[padded(heads[2])] if rows <= shape[0]]
    ours = replace(hopper_tiles(heads[2], rows)[0], most_keys=math.inf)
    others = [replace(ours, min_keys=keys) for keys in (64, 256, 512)]
    return [*tiles, replace(ours, is_chained=False), *others]


def told(tile: HopperTile) -> str:
    chained = " chained" if tile.is_chained else ""
    shape = f"{tile.rows}x{tile.keys} stages {tile.num_stages} per_sm {tile.per_sm}"
    return f"{shape} min_keys {tile.min_keys}{chained}"


def with_tiles(
    q: Tensor, pool: LayerKV, meta: AttnMeta, tiles: tuple[HopperTile, ...],
    *, fixed_keys: int | None = None,
) -> AttnMeta:  # fmt: skip
    """``meta`` cut for ``tiles``, and for the tall one of the plain kernel."""
    kv_heads, head_dim = pool.k.shape[1], pool.k.shape[3]
    cutter = cutter_for(q.shape[1], kv_heads, head_dim, dtype=q.dtype, device=q.device)
    cutter = replace(cutter, tiles=(*tiles, cutter.tiles[-1]), fixed_keys=fixed_keys)
    num_q = meta.cu_q.diff().cpu().numpy().astype("int64")
    work = cutter(num_q, meta.kv_len.cpu().numpy().astype("int64"))
    return replace(meta, work=work, batch_invariant=fixed_keys is not None)


def paged(
    heads: int, kv_heads: int, head_dim: int, lengths: list[int], block_size: int,
    *, copies: int, num_new: int,
) -> tuple[Tensor, list[LayerKV], AttnMeta]:  # fmt: skip
    used = [-(-length // block_size) for length in lengths]
    shape = (sum(used), kv_heads, block_size, head_dim)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    ids = torch.randperm(sum(used)).to(torch.int32)
    table = torch.zeros((len(lengths), max(used)), dtype=torch.int32)
    for row, pages in zip(table, ids.split(used), strict=True):
        row[: len(pages)] = pages
    meta = AttnMeta(
        cu_q=torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32) * num_new,
        kv_len=torch.tensor(lengths, device="cuda", dtype=torch.int32),
        block_table=table.cuda(),
        slots=torch.empty(0, device="cuda", dtype=torch.int64),
        counts=torch.zeros((len(lengths), 3), device="cuda", dtype=torch.int64),
        counting=False,
    )
    pools = [LayerKV(random(*shape), random(*shape)) for _ in range(copies)]
    return random(num_new * len(lengths), heads, head_dim), pools, meta


def rows_first(pool: LayerKV) -> Iterator[Tensor]:
    """(pages, block, heads, D), as FlashAttention-3 wants pages."""
    return (x.transpose(1, 2).contiguous() for x in (pool.k, pool.v))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--fa3", metavar="FILE")
    parser.add_argument("--head-dim", type=int, action="append", help="of prefill; repeatable")
    parser.add_argument("--heads", action="append", help="of decode, as 32/8/128; repeatable")
    parser.add_argument("--new", type=int, default=1, help="tokens of each sequence, of decode")
    parser.add_argument("--block-size", type=int, action="append", help="of decode; repeatable")
    parser.add_argument("--sweep", action="store_true", help="every tile of our Hopper kernels")
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention_gpu: no NVIDIA GPU here, nothing to measure", file=sys.stderr)
        return
    fa3 = load_fa3(asked.fa3) if asked.fa3 else None
    both = not (asked.prefill or asked.decode)
    with torch.inference_mode():
        if asked.prefill or both:
            prefill(
                fa3, repeats=asked.repeats, head_dims=asked.head_dim or HEAD_DIMS,
                sweep=asked.sweep,
            )  # fmt: skip
            if not asked.sweep:
                chunks(fa3, repeats=asked.repeats, head_dims=asked.head_dim or HEAD_DIMS)
        if asked.decode or both:
            decode(
                fa3, repeats=asked.repeats, block_sizes=asked.block_size or [16, 32, 64],
                heads=asked.heads or (), num_new=asked.new, sweep=asked.sweep,
            )  # fmt: skip


if __name__ == "__main__":
    main()

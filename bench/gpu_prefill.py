"""The prefill half of attention_gpu: contiguous attention beside its peers, or all our tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from gpu_sides import Side, captured, fa3_side, host_microseconds, milliseconds, report
from stairs.attention.attend import attend_written, cut
from stairs.attention.devices import card_of
from stairs.attention.flash import flash_attention, flash_attention_varlen
from stairs.attention.hopper import ForwardTile, forward_tiles
from stairs.attention.hopper_forward import hopper_forward
from stairs.attention.meta import AttnMeta, LayerKV

HEAD_DIMS = (64, 128, 256)
TOKENS = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
FEW_LENGTHS = (512, 2048, 8192)
FLEX_LENGTH = 8192
IN_GRAPH = 4  # calls a graph: what begins and ends it weighs less
RAGGED = (1, 8192, 3, 17, 1500, 64, 128, 2500, 300, 700, 33, 1024, 900, 511, 511)  # 16384 in all
CHUNK = 512  # prompt tokens of a step
CHUNK_HEADS = [(32, 8, 128), (32, 1, 128), (9, 3, 64)]
CONTEXTS = (512, 2048, 8192, 32768)


@dataclass(frozen=True)
class Prefill:
    """``lengths``: of its sequences, one after the other without gaps."""

    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    causal: bool

    @property
    def is_ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def flops(self) -> float:
        pairs = sum(length**2 for length in self.lengths) * (0.5 if self.causal else 1)
        return 4.0 * pairs * self.heads * self.head_dim


def prefill_cells(head_dims: Sequence[int], *, sweep: bool) -> Iterator[Prefill]:
    """16384 tokens (32768 in one sequence) with heads x D = 2048; then shared heads and ragged."""
    for head_dim in head_dims:
        for causal in (False, True):
            heads = 2048 // head_dim
            for length in LENGTHS[:-1] if sweep else LENGTHS:
                lengths = (length,) * max(1, TOKENS // length)
                yield Prefill(heads, heads, head_dim, lengths, causal)
            yield Prefill(heads, heads, head_dim, RAGGED, causal)
    for kv_heads in () if sweep or 128 not in head_dims else (8, 1):
        for causal in (False, True):
            for length in FEW_LENGTHS:
                yield Prefill(32, kv_heads, 128, (length,) * (TOKENS // length), causal)
            yield Prefill(32, kv_heads, 128, RAGGED, causal)


def prefill(fa3: Any, *, repeats: int, head_dims: Sequence[int], sweep: bool) -> None:
    """TFLOP/s of each side in a CUDA graph, and what a call costs the host; of a side that cannot
    run, why."""
    last = None
    for cell in prefill_cells(head_dims, sweep=sweep):
        if last != (cell.head_dim, cell.causal):
            torch.compiler.reset()  # else it gives up after some shapes, and runs eager
            last = (cell.head_dim, cell.causal)
        rows = sum(cell.lengths)
        batch = 1 if cell.is_ragged else len(cell.lengths)
        q, k, v = (
            torch.randn(batch, rows // batch, heads, cell.head_dim, device="cuda",
                        dtype=torch.bfloat16)
            for heads in (cell.heads, cell.kv_heads, cell.kv_heads)
        )  # fmt: skip
        make = swept_sides if sweep else peers
        graphs, host_us, problems = {}, {}, {}
        for name, side in make(cell, q, k, v, fa3=fa3).items():
            try:
                graphs[name] = captured([side] * IN_GRAPH)
            except Exception as problem:  # a peer's limits, or a tile that a driver refuses
                problems[name] = repr(problem)[:200]
                continue
            host_us[name] = host_microseconds(side)
        times = milliseconds(graphs, repeats=repeats)
        report(
            what="prefill_sweep" if sweep else "prefill", head_dim=cell.head_dim,
            heads=f"{cell.heads}/{cell.kv_heads}", causal=cell.causal,
            length="ragged" if cell.is_ragged else cell.lengths[0], tokens=rows,
            tflops=tflops(cell.flops, times),
            host_us=host_us, **({"problems": problems} if problems else {}),
        )  # fmt: skip
        del graphs
        torch.cuda.empty_cache()


def tflops(flops: float, times: dict[str, float]) -> dict[str, int]:
    """Of calls of ``flops``, from the milliseconds of each side's graph."""
    return {name: round(flops * IN_GRAPH / ms / 1e9) for name, ms in times.items()}


def ends_of(cell: Prefill) -> Tensor:
    ends = list(itertools.accumulate(cell.lengths, initial=0))
    return torch.tensor(ends, device="cuda", dtype=torch.int32)


def ours(cell: Prefill, q: Tensor, k: Tensor, v: Tensor, *, backend: str) -> Side:
    if not cell.is_ragged:
        return lambda: flash_attention(q, k, v, causal=cell.causal, backend=backend)
    ends, longest = ends_of(cell), max(cell.lengths)
    return lambda: flash_attention_varlen(
        q[0], k[0], v[0], ends, ends, max_q=longest, causal=cell.causal, backend=backend
    )


def peers(cell: Prefill, q: Tensor, k: Tensor, v: Tensor, *, fa3: Any) -> dict[str, Side]:
    """Our calls and the others', each on inputs in the layout it likes best."""
    sides: dict[str, Side] = {
        "stairs": ours(cell, q, k, v, backend="triton"),
        "ours_hopper": ours(cell, q, k, v, backend="hopper"),
    }
    if fa3 is not None:
        sides["fa3"] = fa3_ragged(fa3, cell, q, k, v)
    if cell.is_ragged:
        return sides
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    for name, backend in (
        ("fa2", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)
    ):  # fmt: skip
        sides[name] = in_backend(backend, rows, causal=cell.causal)
    length = q.shape[1]
    if length == FLEX_LENGTH and cell.heads == cell.kv_heads:  # it compiles for seconds
        make, mask = flex_attention.create_block_mask, None
        if cell.causal:
            mask = make(lambda b, h, i, j: j <= i, None, None, length, length)
        flex = torch.compile(flex_attention.flex_attention, dynamic=False)
        sides["flex"] = lambda: flex(*rows, block_mask=mask)
    if length <= 8192 and cell.heads == cell.kv_heads:
        sides["materialised"] = lambda: materialised(*rows, causal=cell.causal)
    return sides


def fa3_ragged(fa3: Any, cell: Prefill, q: Tensor, k: Tensor, v: Tensor) -> Side:
    """The only call that this build of it has."""
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    ends, longest = ends_of(cell), max(cell.lengths)
    return fa3_side(fa3, flat, ends, ends, None, longest, longest, None, causal=cell.causal)


def swept_sides(
    cell: Prefill, q: Tensor, k: Tensor, v: Tensor, *, fa3: Any
) -> dict[str, Side]:  # fmt: skip
    """Our tiles, each with one thing changed, in both orders; and the peers that come near."""
    ends = ends_of(cell) if cell.is_ragged else None

    def with_tile(tile: ForwardTile, *, in_rounds: bool) -> Side:
        return lambda: hopper_forward(
            q, k, v, cu_q=ends, cu_kv=ends, max_q=max(cell.lengths),
            scale=cell.head_dim**-0.5, causal=cell.causal, window=(-1, -1), softcap=0.0,
            return_lse=False, tile=tile, num_sms=card_of(q.device).num_sms, in_rounds=in_rounds,
        )  # fmt: skip

    ours = forward_tiles(cell.head_dim, has_right_edge=cell.causal)
    tiles = dict.fromkeys(replace(each, dense_from=0) for tile in ours for each in varied(tile))
    sides = {}
    for tile in tiles:
        for in_rounds in (False, True) if cell.causal and ends is None else (False,):
            name = told_forward(tile) + (" in rounds" if in_rounds else "")
            sides[name] = with_tile(tile, in_rounds=in_rounds)
    if fa3 is not None:
        sides["fa3"] = fa3_ragged(fa3, cell, q, k, v)
    if ends is None:
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        sides["cudnn"] = in_backend(SDPBackend.CUDNN_ATTENTION, rows, causal=cell.causal)
    return sides


def varied(tile: ForwardTile) -> Iterator[ForwardTile]:
    yield tile
    yield replace(tile, turns=not tile.turns)
    yield replace(tile, lazy=not tile.lazy)
    yield replace(tile, spare=not tile.spare)
    yield replace(tile, releases="mbarrier" if tile.releases == "hardware" else "hardware")


def told_forward(tile: ForwardTile) -> str:
    extras = [name for name in ("turns", "spare", "lazy") if getattr(tile, name)]
    return " ".join([f"{tile.rows}x{tile.keys} stages {tile.stages}", tile.releases, *extras])


def in_backend(backend: SDPBackend, rows: list[Tensor], *, causal: bool) -> Side:
    def side() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                *rows, is_causal=causal, enable_gqa=rows[0].shape[1] != rows[1].shape[1]
            )

    return side


def materialised(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


# -- chunks over pages ----------------------------------------------------------------------------


def chunks(fa3: Any, *, repeats: int, head_dims: Sequence[int]) -> None:
    """512 new tokens of one sequence over shuffled pages: TFLOP/s over the keys they see."""
    for heads, kv_heads, head_dim in CHUNK_HEADS:
        for page in (16, 64) if head_dim in head_dims else ():
            for context in CONTEXTS:
                sides = chunk_sides(heads, kv_heads, head_dim, page, context, fa3=fa3)
                graphs = {name: captured([side] * IN_GRAPH) for name, side in sides.items()}
                times = milliseconds(graphs, repeats=repeats)
                seen = CHUNK * context - CHUNK * (CHUNK - 1) / 2
                flops = 4.0 * seen * heads * head_dim
                report(
                    what="chunk", head_dim=head_dim, heads=f"{heads}/{kv_heads}", page=page,
                    context=context,
                    tflops=tflops(flops, times),
                )  # fmt: skip


def chunk_sides(
    heads: int, kv_heads: int, head_dim: int, page: int, context: int, *, fa3: Any
) -> dict[str, Side]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, pages = random(CHUNK, heads, head_dim), context // page
    pool = LayerKV(*(random(pages, kv_heads, page, head_dim) for _ in range(2)))
    ends = torch.tensor([0, CHUNK], device="cuda", dtype=torch.int32)
    meta = AttnMeta(
        cu_q=ends,
        kv_len=torch.tensor([context], device="cuda", dtype=torch.int32),
        block_table=torch.randperm(pages, device="cuda").to(torch.int32)[None],
        slots=torch.empty(0, device="cuda", dtype=torch.int64),
        counts=torch.zeros((1, 3), device="cuda", dtype=torch.int64),
        counting=False,
    )
    plain = cut(q, pool, meta)
    hopper = cut(q, pool, meta, implementation="hopper")
    sides: dict[str, Side] = {
        "stairs": lambda: attend_written(q, pool, plain),
        "ours_hopper": lambda: attend_written(q, pool, hopper),
    }  # fmt: skip
    if fa3 is not None:
        rows = [x.transpose(1, 2).contiguous() for x in (pool.k, pool.v)]
        sides["fa3"] = fa3_side(
            fa3, [q, *rows], ends, None, meta.kv_len, CHUNK, context, meta.block_table, causal=True
        )
    return sides

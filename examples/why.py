"""Eight questions about serving attention, each answered by running it: `why.py 1` to `why.py 8`.

docs/why.md explains what is printed. Nothing here needs a model file.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from stairs.accounting import costs, traffic
from stairs.accounting.table import Column, Table, show
from stairs.accounting.weights import dense_weights
from stairs.attention.attend import attend
from stairs.attention.choose import choose, score_bytes_held
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.online import empty, finish, merge, update
from stairs.attention.reference import reference_attention, visible_keys
from stairs.config import ModelConfig

# 32 layers of 32 heads: K/V heads 32 (MHA), 8 (GQA) or 1 (MQA).
DECODER = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "head_dim": 128,
    "intermediate_size": 14_336,
    "max_position_embeddings": 32_768,
    "norm_eps": 1e-5,
    "activation": "silu",
    "rope_theta": 500_000.0,
}
BFLOAT16, FLOAT32 = 2, 4


def decoder(num_kv_heads: int) -> ModelConfig:
    return ModelConfig(num_kv_heads=num_kv_heads, **DECODER)  # type: ignore[arg-type]


def paged(tokens: int, heads: int, dim: int, new: int) -> tuple[torch.Tensor, LayerKV, AttnMeta]:
    """Random q, k, v of the ``new`` last of ``tokens``, and a pool that holds the earlier ones."""
    size = 16
    blocks = costs.blocks_for(tokens, size)
    layer_kv = LayerKV(*torch.randn(2, blocks, heads, size, dim).unbind())
    meta = AttnMeta(
        cu_q=torch.tensor([0, new], dtype=torch.int32),
        kv_len=torch.tensor([tokens], dtype=torch.int32),
        block_table=torch.arange(blocks, dtype=torch.int32).unsqueeze(0),
        slots=torch.arange(tokens - new, tokens),
        counts=torch.zeros(1, 3, dtype=torch.int64),
    )
    return torch.randn(3, new, heads, dim), layer_kv, meta


def median_seconds(run: Callable[[], object], *, repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def faster() -> None:
    """1. Why is FlashAttention faster? FLOPs and bytes apart."""
    tokens, heads, dim = 2048, 9, 64
    rows = []
    for name, backend in (("materialised", "reference"), ("tiled", "auto")):
        qkv, layer_kv, meta = paged(tokens, heads, dim, tokens)
        seconds = median_seconds(lambda: attend(*qkv, layer_kv, meta, backend=backend))  # noqa: B023
        meta.counts.zero_()
        attend(*qkv, layer_kv, meta, backend=backend)
        pairs = int(meta.counts[0, AttnMeta.PAIRS])
        moved = traffic.compulsory_bytes(tokens, tokens, dim, FLOAT32) * heads
        if backend == "reference":
            moved = traffic.materialised_bytes(tokens, tokens, dim, FLOAT32) * heads
        choice = choose(backend=backend, num_threads=torch.get_num_threads())
        held = score_bytes_held(choice, rows=tokens, keys=tokens, heads=heads, itemsize=FLOAT32)
        rows.append((name, pairs, 4 * dim * pairs, held, moved, seconds))
    columns = (
        Column("attention"),
        Column("pairs", axis="count", kind="counted"),
        Column("FLOPs", "FLOP", "FLOPs", "counted"),
        Column("scores held", "B", "stored bytes"),
        Column("moved", "B", "moved bytes", "predicted"),
        Column("time", "s", "time", "measured"),
    )
    print(Table(f"{tokens} tokens, {heads} heads of {dim}, fp32", columns, rows).text(), end="")
    print(f"materialised / tiled: FLOPs 1 x, moved bytes {rows[0][4] / rows[1][4]:.1f} x, ", end="")
    print(f"time {rows[0][5] / rows[1][5]:.1f} x")


def exact() -> None:
    """2. Is it a sparse approximation, or a way to shrink the KV cache?"""
    qkv, layer_kv, meta = paged(2048, 9, 64, 2048)
    tiled = attend(*qkv, layer_kv, meta)
    visited = int(meta.counts[0, AttnMeta.PAIRS])
    right, _ = reference_attention(*qkv.double())
    plain, _ = reference_attention(*qkv)
    print(f"pairs visited   {visited:,} of {9 * costs.causal_pairs(2048, 2048):,}")
    print(f"against float64 tiled {(tiled - right).abs().max():.0e}, ", end="")
    print(f"materialised {(plain - right).abs().max():.0e}")
    kv_bytes = layer_kv.k.nbytes + layer_kv.v.nbytes
    print(f"K/V stored      {show(kv_bytes, 'B')} with either")


def online() -> None:
    """3. What keeps the n x n matrix out of slow memory and stays exact? Online softmax."""
    one = torch.ones(2, 1, dtype=torch.float64)

    def tile(*scores: float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([scores], dtype=torch.float64), one[: len(scores)]

    nothing = empty((1,), 1, like=one)
    first, second = update(nothing, *tile(2, 4)), update(nothing, *tile(7, 3))
    both = merge(first, second)
    for name, state in (("[2, 4]", first), ("[7, 3]", second), ("merged", both)):
        print(f"{name}        m {state.m.item():g}   l {state.l.item():.4f}")
    print(f"rescaled by   e^(4 - 7) = {torch.exp(first.m - both.m).item():.4f}")
    whole = torch.logsumexp(torch.tensor([2.0, 4, 7, 3], dtype=torch.float64), 0).item()
    print(f"log-sum-exp   {finish(both)[1].item():.12f} in two tiles, {whole:.12f} at once")
    print(f"no rescaling  l {(first.l + second.l).item():.4f}, which is wrong")


def axes() -> None:
    """4. FlashAttention, KV cache, GQA and MQA: which axis does each move?"""
    length = 8192
    config = decoder(32)
    prompt, step = [(length, length)], [(1, length)]

    def macs(config: ModelConfig, work: costs.Work) -> int:
        return costs.flops(costs.step_macs(config, work, logits_rows=1))

    def stored(config: ModelConfig) -> int:
        return costs.kv_sequence_bytes(config, length, BFLOAT16)

    def moved(config: ModelConfig, work: costs.Work, *, materialised: bool = False) -> int:
        kernels = traffic.STANDARD_KERNELS if materialised else ()
        parts = traffic.step_moved_bytes(
            config,
            work,
            logits_rows=1,
            weights=dense_weights(config, BFLOAT16),
            itemsize=BFLOAT16,
            kv_itemsize=BFLOAT16,
            score_kernels=kernels,
        )
        return sum(parts.values())

    rows = [
        ("nothing", macs(config, prompt), 0, moved(config, prompt, materialised=True)),
        ("FlashAttention", macs(config, prompt), 0, moved(config, prompt)),
        ("KV cache", macs(config, step), stored(config), moved(config, step)),
    ]
    for name, heads in (("KV cache, GQA 8", 8), ("KV cache, MQA", 1)):
        shared = decoder(heads)
        rows.append((name, macs(shared, step), stored(shared), moved(shared, step)))
    columns = (
        Column("next token"),
        Column("FLOPs", "FLOP", "FLOPs"),
        Column("K/V stored", "B", "stored bytes"),
        Column("moved", "B", "moved bytes", "predicted"),
    )
    title = f"One token after {length - 1}: 32 layers, 32 heads of 128, bf16, one sequence"
    print(Table(title, columns, rows).text(), end="")


def not_q() -> None:
    """5. Why are K and V kept, but not Q?"""
    tokens, heads, dim = 128, 9, 64
    qkv = torch.randn(3, tokens, heads, dim, dtype=torch.float64)
    before, _ = reference_attention(*qkv)
    for index, name in enumerate("QKV"):
        other = qkv.clone()
        other[index, 0] = torch.randn(heads, dim, dtype=torch.float64)
        after, _ = reference_attention(*other)
        change = (after[-1] - before[-1]).abs().max()
        print(f"another {name} for the first token changes the newest row by {change:.1e}")


def earlier_rows() -> None:
    """6. One token goes in. What happens to the rows before it?"""
    q, k, v = torch.randn(3, 129, 9, 64)
    for causal in (True, False):
        before, _ = reference_attention(q[:-1], k[:-1], v[:-1], causal=causal)
        after, _ = reference_attention(q, k, v, causal=causal)
        same = (before == after[:-1]).flatten(1).all(1).sum()
        mask = "with the causal mask" if causal else "without it"
        print(f"{mask:21} {same} of 128 earlier rows are equal to the bit")
    print(visible_keys(range(4), range(4), past=0).int())


def chunks() -> None:
    """7. Do chunks reduce the work?"""
    rows = []
    for prompt, chunk in ((12, 12), (12, 4), (8192, 8192), (8192, 512)):
        steps = costs.prefill_steps(prompt, chunk=chunk)
        pairs = sum(costs.causal_pairs(*step) for step in steps)
        rows.append((f"{prompt} in {chunk}s", len(steps), pairs, costs.largest_step(steps)))
    names = ("prompt", "steps", "pairs", "largest step")
    columns = (Column("prompt"), *(Column(name, axis="count") for name in names[1:]))
    print(Table("Tokens in chunks", columns, rows).text(), end="")
    print("cached after each chunk of 4:", *(end for _, end in costs.prefill_steps(12, chunk=4)))


def operations() -> None:
    """8. Does FlashAttention reduce the number of operations?"""
    tokens, tile = 8192, 128
    causal = costs.causal_pairs(tokens, tokens)
    tiled = traffic.tile_pairs(tokens, tokens, q_tile=tile, k_tile=tile)
    print(f"pairs under the mask         {causal:>12,}")
    print(f"multiplied in {tile} x {tile} tiles  {tiled:>12,}   {tiled / causal - 1:+.1%}")
    print(f"rescales, one a row and tile {tokens * (tokens // tile + 1) // 2:>11,}")


QUESTIONS = (faster, exact, online, axes, not_q, earlier_rows, chunks, operations)


def main(argument: str) -> None:
    torch.manual_seed(0)
    QUESTIONS[int(argument) - 1]()


if __name__ == "__main__":
    if sys.argv[1:] not in [[str(i + 1)] for i in range(len(QUESTIONS))]:
        print(*(question.__doc__ for question in QUESTIONS), sep="\n")
        sys.exit(2)
    main(sys.argv[1])

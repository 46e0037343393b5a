"""Whether the Hopper kernels over pages compute what torch does, on this card, under this Triton.

Asked once a process, before auto takes them on a release that they never ran on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from stairs.attention.hopper import ForwardTile, chunk_tile
from stairs.attention.hopper_check import triton_release
from stairs.attention.meta import AttnMeta, LayerKV, WorkList
from stairs.attention.reference import paged_reference
from stairs.attention.tiles import hopper_tiles
from stairs.attention.work import Tiles, cut_step, upload

__all__ = ["RAN_ON", "decode_self_test", "what_is_wrong"]

# Triton releases under which these kernels' tests passed on an H200.
RAN_ON = frozenset({"3.6.0"})

# (query heads a kv head, head_dim) and (queries, keys) of each sequence: both kinds of tile, whole
# and split rows, the end of a page and of a tile.
SHAPES = ((4, 128), (3, 64), (32, 128), (2, 256))
LENGTHS = ((1, 700), (1, 64), (2, 77), (1, 1))
CHUNK = (130, 700)  # beside them, where heads are few
BLOCK, KV_HEADS = 16, 2

Attend = Callable[[Tensor, LayerKV, AttnMeta, WorkList, Tensor], None]


@functools.cache
def decode_self_test(device: torch.device) -> str | None:
    """None where the kernels may be used, else what is wrong with one of them here."""
    if triton_release() in RAN_ON:
        return None
    from stairs.attention.hopper_chunks import attend_chunks  # Triton, only where it is used
    from stairs.attention.hopper_decode import attend_short

    def attend(q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, out: Tensor) -> None:
        kernel = attend_chunks if isinstance(work.tile, ForwardTile) else attend_short
        kernel(q, layer_kv, meta, work, scale=q.shape[2] ** -0.5, out=out)

    with torch.no_grad():
        return what_is_wrong(attend, device)


def what_is_wrong(attend: Attend, device: torch.device) -> str | None:
    """One small step of each shape, over pages whose unused places hold NaN."""
    for group, head_dim in SHAPES:
        told = f"{group} heads a group, D {head_dim}, Triton {triton_release()}"
        try:
            error = _error(attend, group, head_dim, device)
        except Exception as problem:  # whatever a compiler or a driver of another day raises
            return f"the self-test failed ({told}): {problem}"
        if not error < 0.02:
            return f"the self-test is {error:.2g} off ({told})"
    return None


def _error(attend: Attend, group: int, head_dim: int, device: torch.device) -> float:
    """The largest difference to the specification in float32; NaN if there is one."""
    generator = torch.Generator(device).manual_seed(head_dim)
    lengths = (*LENGTHS, CHUNK) if group <= 4 else LENGTHS
    num_q, num_kv = (np.array(each, dtype=np.int64) for each in zip(*lengths, strict=True))
    used = -(-num_kv // BLOCK)
    table = torch.full((len(lengths), int(used.max())), -1, dtype=torch.int32)
    ids = np.split(np.arange(used.sum(), dtype=np.int32)[::-1].copy(), used.cumsum()[:-1])
    pool = torch.randn(
        (2, int(used.sum()), KV_HEADS, BLOCK, head_dim), generator=generator, device=device
    ).to(torch.bfloat16)
    for row, pages, length in zip(table, ids, num_kv.tolist(), strict=True):
        row[: len(pages)] = torch.from_numpy(pages)
        pool[:, int(pages[-1]), :, (length - 1) % BLOCK + 1 :] = torch.nan
    layer_kv = LayerKV(pool[0], pool[1])
    meta = AttnMeta(
        cu_q=torch.tensor([0, *num_q.cumsum().tolist()], dtype=torch.int32, device=device),
        kv_len=torch.tensor(num_kv, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slots=torch.empty(0, dtype=torch.int64, device=device),
        counts=torch.zeros((len(lengths), 3), dtype=torch.int64, device=device),
        counting=False,
    )
    q = torch.randn(
        (int(num_q.sum()), KV_HEADS * group, head_dim), generator=generator, device=device
    ).to(torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    tiles: Tiles = (*hopper_tiles(head_dim, group), chunk_tile(head_dim))
    cuts = cut_step(
        num_q, num_kv, group=group, kv_heads=KV_HEADS, tiles=tiles, num_sms=16
    )  # fmt: skip
    for work in upload(cuts, device):
        attend(q, layer_kv, meta, work, out)
    exact = torch.empty(q.shape, dtype=torch.float32, device=device)
    in_float = LayerKV(layer_kv.k.float(), layer_kv.v.float())
    paged_reference(q.float(), in_float, meta, scale=head_dim**-0.5, out=exact)
    return float((out.float() - exact).abs().max())

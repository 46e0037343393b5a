"""Prompt chunks over pages on Hopper: the forward, where K and V are boxes of pages.

A step's list says what each program takes: tiles of a sequence's queries, and of which keys.
"""

from __future__ import annotations

from torch import Tensor

from stairs.attention.hopper import ForwardTile
from stairs.attention.hopper_boxes import box_keys, boxes, page_boxes
from stairs.attention.hopper_forward import FAR, constants
from stairs.attention.hopper_kernel import forward_kernel
from stairs.attention.meta import AttnMeta, LayerKV, WorkList
from stairs.attention.triton_paged import merge_partials, partials
from stairs.attention.triton_softmax import LOG2_E

__all__ = ["attend_chunks", "attend_tiles"]


def attend_chunks(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, *, scale: float, out: Tensor
) -> None:
    """What ``work`` holds of q (T, H, D), D side by side, into ``out`` (T, H, D) contiguous.

    hopper_decode_lacks() has said that nothing is against it; q whose steps the copy engine cannot
    take is copied.
    """
    partial = attend_tiles(q, layer_kv, meta, work, scale=scale, out=out)
    merge_partials(work, *partial, out, batch_invariant=meta.batch_invariant)


def attend_tiles(
    q: Tensor, layer_kv: LayerKV, meta: AttnMeta, work: WorkList, *, scale: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """The entries of ``work``: whole rows into ``out``, parts of others into what is returned,
    O (P, H, rows, D) and LSE (P, H, rows). As many programs as SMs, or as entries and heads."""
    tile = work.tile
    assert isinstance(tile, ForwardTile)
    total_q, heads, head_dim = q.shape
    num_blocks, kv_heads, page = layer_kv.k.shape[:3]
    partial_out, partial_lse = partials(q, work, heads)
    programs = min(work.num_programs, len(work.entries) * heads)
    if not programs or not total_q:
        return partial_out, partial_lse
    steps = [stride * q.element_size() for stride in q.stride()[:2]]
    if q.data_ptr() % 16 or any(step % 16 or not step for step in steps):
        q = q.contiguous()
    fixed = constants(
        tile, head_dim=head_dim, dtype=q.dtype, is_ragged=True, has_right=True, has_left=False,
        is_cut=True, is_capped=False, returns_lse=False, page=page, counting=meta.counting,
    )  # fmt: skip
    k_boxes, v_boxes = page_boxes(layer_kv, box_keys(page, tile.keys))
    forward_kernel[(programs,)](
        boxes(q[None], 64), k_boxes, v_boxes, boxes(out[None], 64), out, partial_lse,
        partial_out, work.numbers, work.entries, meta.block_table, meta.counts, scale * LOG2_E,
        0.0, total_q, 0, FAR, 0, heads, heads // kv_heads, 0, 0, programs, head_dim, total_q,
        meta.block_table.stride(0), num_blocks, **fixed, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return partial_out, partial_lse

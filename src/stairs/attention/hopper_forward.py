"""Exact attention over contiguous K and V on Hopper, dense batches and ragged ones.

The kernel: ``hopper_kernel``. Which tile sizes: ``hopper``; in which order ragged rows:
``hopper_order``. Over pages: ``hopper_chunks``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stairs.attention.hopper import ForwardTile, is_in_rounds, padded
from stairs.attention.hopper_boxes import boxes
from stairs.attention.hopper_kernel import forward_kernel
from stairs.attention.hopper_order import order_tiles
from stairs.attention.triton_softmax import LOG2_E

__all__ = ["FAR", "constants", "hopper_forward"]

FAR = 2**30  # a window's side that is open


def constants(
    tile: ForwardTile, *, head_dim: int, dtype: torch.dtype, is_ragged: bool, has_right: bool,
    has_left: bool, is_cut: bool, is_capped: bool, returns_lse: bool, in_rounds: bool = False,
    page: int = 0, counting: bool = False,
) -> dict[str, int | str]:  # fmt: skip
    """What a launch of the kernel compiles in. ``is_cut``: the last tile may hold hidden keys;
    ``counting``: of causal rows over pages."""
    k_free, v_free = tile.free_barriers
    order = "pairs" if has_right else "alike"
    if is_ragged or (has_right and in_rounds):
        order = "rounds"
    return {
        "BN": tile.keys,
        "BD": padded(head_dim),
        "PAGE": page,
        "STAGES": tile.stages,
        "CONSUMERS": tile.consumers,
        "REGISTERS": tile.registers,
        "TURNS": tile.turns,
        "K_FREE": k_free,
        "V_FREE": v_free,
        "SPARE": tile.spare,
        "LAZY": tile.lazy,
        "RAGGED": is_ragged,
        "ORDER": order,
        "RIGHT": has_right,
        "LEFT": has_left,
        "CUT": is_cut or is_ragged or has_right or has_left,
        "CAPPED": is_capped,
        "LSE": returns_lse,
        "BFLOAT": dtype == torch.bfloat16,
        "COUNTING": counting,
    }


def hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, *, cu_q: Tensor | None, cu_kv: Tensor | None, max_q: int,
    scale: float, causal: bool, window: tuple[int, int], softcap: float, return_lse: bool,
    tile: ForwardTile, num_sms: int = 132, in_rounds: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, Sq, H, D), k and v (B, Sk, G, D) dense; or ragged with B = 1 and the sequences' ends
    in cu_q and cu_kv, none longer than ``max_q``. LSE (B, H, Sq), or (1, H, Sq) ragged; empty
    unless asked for. ``window``: keys to the left and right, -1 for no bound.

    Only what ``hopper.hopper_lacks`` finds nothing against. Programs: one an SM at most.
    ``in_rounds``: the order of a dense batch's tiles, ``is_in_rounds`` of its shape by default.
    """
    batch, num_q, heads, head_dim = q.shape
    num_kv, kv_heads = k.shape[1:3]
    out = torch.empty((batch, num_q, heads, head_dim), dtype=q.dtype, device=q.device)
    lse_shape = (batch, heads, num_q) if return_lse else (0,)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    row_tiles = -(-max_q // tile.rows)
    left, right = (side if side >= 0 else FAR for side in window)
    if causal:
        right = 0 if right == FAR else min(right, 0)
    has_right, has_left = right < FAR, left < FAR
    if cu_q is None or cu_kv is None:
        tiles, num_tiles = lse, batch * heads * row_tiles
    else:
        tiles = order_tiles(
            cu_q, cu_kv, total_q=num_q, rows=tile.rows, keys=tile.keys, left=left, right=right,
            has_right=has_right, has_left=has_left,
        )  # fmt: skip
        num_tiles = (num_q // tile.rows + len(cu_q) - 1) * heads
    if not num_tiles:
        return out, lse
    programs = min(num_sms, num_tiles)
    if in_rounds is None:
        in_rounds = is_in_rounds(num_heads=batch * heads, num_q=num_q, num_programs=programs)
    fixed = constants(
        tile, head_dim=head_dim, dtype=q.dtype, is_ragged=cu_q is not None, has_right=has_right,
        has_left=has_left, is_cut=num_kv % tile.keys > 0, is_capped=softcap > 0,
        returns_lse=return_lse, in_rounds=in_rounds,
    )  # fmt: skip
    forward_kernel[(programs,)](
        boxes(q, 64), boxes(k, tile.keys), boxes(v, tile.keys), boxes(out, 64), out, lse,
        lse, tiles, tiles, tiles, tiles, (softcap or scale) * LOG2_E,
        scale / softcap if softcap else 0.0, num_q, num_kv, left, right, heads, heads // kv_heads,
        row_tiles, num_tiles, programs, head_dim, num_q, 0, 0, **fixed, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse

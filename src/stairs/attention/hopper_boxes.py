"""Boxes: what Hopper's copy engine knows tensors by, and how they lie in shared memory.

Outside of a tensor it reads zeros and writes nothing.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from stairs.attention.gluon_api import TensorDescriptor, gl, gluon
from stairs.attention.hopper import padded
from stairs.attention.meta import LayerKV

__all__ = ["BOXES", "PAGES", "TILE", "box_keys", "boxes", "page_boxes"]

BOXES = gl.NVMMASharedLayout(128, 16, 4)  # (1, 1, rows, D)
PAGES = gl.NVMMASharedLayout(128, 16, 2)  # (keys, D), D from 64 on
TILE = gl.constexpr(PAGES)  # of whatever boxes it is made


@gluon.constexpr_function
def box_keys(page, keys):
    """Of a box that lies in one page and in one tile of keys."""
    return math.gcd(page, keys)


def boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """x (B, S, G, D) as (B, G, S, D), in boxes of (1, 1, rows, padded D). What lies outside a
    sequence or a head is 0 on the way in and dropped on the way out."""
    batch, length, heads, head_dim = x.shape
    # The stride of a single batch or head may be anything; the copy engine wants 16-byte steps.
    batch_step = x.stride(0) if batch > 1 else length * x.stride(1)
    head_step = x.stride(2) if heads > 1 else x.stride(1)
    shape = [batch, heads, length, head_dim]
    strides = [batch_step, head_step, x.stride(1), 1]
    return TensorDescriptor(x, shape, strides, [1, 1, rows, padded(head_dim)], BOXES)


def page_boxes(layer_kv: LayerKV, keys: int) -> tuple[Any, Any]:
    """K and V seen as (N * G * B, D), in boxes of ``keys`` rows; outside is 0. Made once a layer,
    for whichever kernel asks first: pools never move."""
    rows, head_dim = layer_kv.k.numel() // layer_kv.k.shape[3], layer_kv.k.shape[3]
    box = keys, padded(head_dim)
    if box not in layer_kv.boxes:
        k_boxes, v_boxes = (
            TensorDescriptor(pool, [rows, head_dim], [head_dim, 1], list(box), PAGES)
            for pool in (layer_kv.k, layer_kv.v)
        )
        layer_kv.boxes[box] = k_boxes, v_boxes
    return layer_kv.boxes[box]

"""The Hopper decode kernel in every configuration that is served, built without a card."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from attention.gluon_builds import PAGE_SIZES
from stairs.attention.devices import hopper_decode_lacks
from stairs.attention.hopper_boxes import PAGES
from stairs.attention.hopper_decode import constants, decode_kernel
from stairs.attention.meta import LayerKV
from stairs.attention.tiles import HopperTile, hopper_tiles

POINTERS = {"table": "i32", "entries": "i32", "starts": "i32", "partial_out": "fp32",
            "partial_lse": "fp32", "counts": "i64"}  # fmt: skip
ALIGNED = ("q_token", "q_head")


@dataclass(frozen=True)
class DecodeBuild:
    tile: HopperTile
    group: int
    head_dim: int
    block_size: int
    dtype: str = "bf16"
    counting: bool = False

    @property
    def name(self) -> str:
        t = self.tile
        chained = " chained" if t.is_chained else ""
        counting = " counting" if self.counting else ""
        return (
            f"decode rows{t.rows} keys{t.keys} stages{t.num_stages} per_sm{t.per_sm} "
            f"G{self.group} D{self.head_dim} page{self.block_size} {self.dtype}{chained}{counting}"
        )

    def compile(self) -> Any:
        fixed = constants(
            self.tile, group=self.group, kv_heads=8, block_size=self.block_size,
            head_dim=self.head_dim, counting=self.counting,
        )  # fmt: skip
        box = f"tensordesc<{self.dtype}[{fixed['BOX']}, {fixed['BD']}],{PAGES!r}>"
        signature, attributes = {}, {}
        for position, name in enumerate(decode_kernel.arg_names):
            if name in fixed:
                signature[name] = "constexpr"
            elif name in ("k_boxes", "v_boxes"):
                signature[name] = box
            elif name in ("q", "out") or name in POINTERS:
                signature[name] = "*" + POINTERS.get(name, self.dtype)
                attributes[position,] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if name == "scale" else "i32"
                if name in ALIGNED and self.head_dim % 16 == 0:
                    attributes[position,] = [["tt.divisibility", 16]]
        source = GluonASTSource(decode_kernel, signature, fixed, attributes)
        options = {"num_warps": 4, "maxnreg": self.tile.max_registers, "enable_fp_fusion": True}
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def served() -> Iterator[DecodeBuild]:
    """Each tile over pages of every size that makes other boxes (of 128, as of 64 and 256, only if
    all kernels are asked for), then with what else is compiled in:
    groups, head dimensions that are padded, float16, and counting."""
    for head_dim, padded in ((64, ()), (128, (80, 96)), (256, (192,))):
        for tile in hopper_tiles(head_dim, 1):
            group = 4 if tile.rows == 16 else 32
            for block_size in PAGE_SIZES:
                is_more = block_size == 128 and not os.environ.get("STAIRS_ALL_KERNELS")
                if _takes(head_dim, block_size) and not is_more:
                    yield DecodeBuild(tile, group, head_dim, block_size)
            yield DecodeBuild(tile, 1, head_dim, 16, "fp16")
            yield DecodeBuild(tile, group, head_dim, 16, counting=True)
            for odd in padded:
                yield DecodeBuild(tile, group, odd, 16)


def _takes(head_dim: int, block_size: int) -> bool:
    page = torch.empty((1, 1, block_size, head_dim), dtype=torch.bfloat16, device="meta")
    lacks = hopper_decode_lacks(
        LayerKV(page, page), dtype=torch.bfloat16, num_heads=1, capability=(9, 0)
    )
    return lacks is None

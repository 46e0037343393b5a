"""The Hopper decode kernel in every configuration that is chosen or swept, built without a card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from stairs.attention.hopper_decode import constants, decode_kernel
from stairs.attention.tiles import HopperTile, hopper_tiles

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
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
            head_dim=self.head_dim, dtype=DTYPES[self.dtype], counting=self.counting,
        )  # fmt: skip
        box = f"tensordesc<{self.dtype}[{fixed['BOX']}, {fixed['BD']}],{fixed['BOXES']!r}>"
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


def chosen() -> Iterator[DecodeBuild]:
    """What hopper_tiles gives: each tile once, with the pages that are served and the odd ones."""
    for head_dim in (64, 80, 128, 192, 256):
        for group in (4, 32):
            for tile in hopper_tiles(head_dim, group):
                yield DecodeBuild(tile, group, head_dim, 16)
    for tile in hopper_tiles(128, 4):
        for block_size in (8, 32, 64, 256):
            yield DecodeBuild(tile, 1, 128, block_size)
        yield DecodeBuild(replace(tile, is_chained=True), 8, 128, 16, "fp16", counting=True)

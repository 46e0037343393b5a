"""Every Triton kernel in every configuration that a supported card runs, built without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stairs.attention import triton_flash, triton_paged
from stairs.attention.tiles import CARDS, TritonTile, flash_tile, paged_tiles
from stairs.models import triton_glue

TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
HEAD_DIMS = (64, 80, 96, 100, 128, 256)
POINTERS = {
    "int32": {"table", "entries", "numbers", "merges", "cu_q", "cu_kv"},
    "int64": {"slots", "counts"},
    "fp32": {"partial_out", "partial_lse", "lse", "cos_sin"},
}
FLOATS = {"scale", "cap", "eps"}
ALIGNED = {"q_token", "q_head", "page_stride", "q_row", "k_row", "v_row", "k_token", "v_token",
           "k_head", "v_head", "q_batch", "k_batch", "v_batch", "x_row", "row_stride"}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """One kernel with one set of constants, as a launch on ``capability`` would specialise it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    dtype: str
    capability: int
    num_warps: int
    num_stages: int

    def compile(self) -> Any:
        names = self.kernel.arg_names
        pointers = {name for name in names if self._pointer(name)}
        signature, attributes = {}, {}
        for position, name in enumerate(names):
            if name in self.constants:
                signature[name] = "constexpr"
            elif self.constants.get("BOXES") and name in ("k", "v"):
                box = [1, self.constants["BN"], self.constants["D"]]
                signature[name] = f"tensordesc<{self.dtype}{box}>"
            elif name in pointers:
                signature[name] = "*" + self._pointer(name)
                attributes[position,] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if name in FLOATS else "i32"
                if name in ALIGNED and self.constants.get("D", 16) % 16 == 0:
                    attributes[position,] = [["tt.divisibility", 16]]
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return triton.compile(
            source, target=GPUTarget("cuda", self.capability, 32), options=options
        )

    def _pointer(self, name: str) -> str:
        for kind, named in POINTERS.items():
            if name in named:
                return {"int32": "i32", "int64": "i64"}.get(kind, kind)
        data = {"q", "k", "v", "out", "k_pool", "v_pool", "x", "residual", "weight", "bias",
                "normed", "total", "branch", "heads", "q_weight", "k_weight", "cos", "sin",
                "gate_up"}  # fmt: skip
        return self.dtype if name in data else ""


def _tile(tile: TritonTile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _attention(head_dim: int, dtype: str, capability: int) -> Iterator[Build]:
    card, itemsize = CARDS[capability], TYPES[dtype]
    precision = "ieee" if dtype == "fp32" else "tf32"
    padded = triton.next_power_of_2(head_dim)
    label = f"{dtype} D{head_dim} sm_{capability}"
    for group in (1, 4, 32):
        for kind, tile in zip(
            ("short", "tall"),
            paged_tiles(head_dim, group, itemsize=itemsize, card=card),
            strict=True,
        ):
            if kind == "tall" and group != 4:
                continue
            shape = {"GROUP": group, "KV_HEADS": 8, "D": head_dim, "BD": padded, "BM": tile.rows}
            yield Build(
                f"paged {kind} G{group} {label}", triton_paged.paged_kernel,
                {**shape, "BLOCK": 16, "BN": tile.keys, "TALL": tile.tall, "COUNTING": False,
                 "PRECISION": precision},
                dtype, capability, **_tile(tile),
            )  # fmt: skip
    yield Build(
        f"merge {label}", triton_paged.merge_kernel,
        {"GROUP": 4, "KV_HEADS": 8, "D": head_dim, "BD": padded, "BM": 16, "PARTS": 64,
         "COLUMNS": min(padded, 32), "CHAINED": capability >= 90},
        dtype, capability, num_warps=2, num_stages=3,
    )  # fmt: skip
    yield Build(
        f"write {label}", triton_paged.write_kernel,
        {"KV_HEADS": 8, "BLOCK": 16, "D": head_dim, "BD": padded, "BH": 8},
        dtype, capability, num_warps=4, num_stages=3,
    )  # fmt: skip
    for causal, num_q in ((False, 512), (False, 8192), (True, 512), (True, 8192)):
        for extras in (False, True):
            tile = flash_tile(head_dim, causal=causal, num_q=num_q, itemsize=itemsize, card=card)
            yield Build(
                f"flash Q{num_q} causal={causal} extras={extras} {label}",
                triton_flash.flash_kernel,
                {"HEADS": 16, "GROUP": 4, "D": head_dim, "BD": padded, "BM": tile.rows,
                 "BN": tile.keys, "BOXES": capability >= 90 and head_dim == padded,
                 "RAGGED": extras, "RIGHT": causal, "LEFT": extras,
                 "CAPPED": extras, "LSE": extras, "PRECISION": precision},
                dtype, capability, **_tile(tile),
            )  # fmt: skip


def _glue(dtype: str, capability: int) -> Iterator[Build]:
    label, common = f"{dtype} sm_{capability}", {"dtype": dtype, "capability": capability}
    for width in (576, 4096):
        for centred in (False, True):
            yield Build(
                f"add_norm C{width} centred={centred} {label}", triton_glue.add_norm_kernel,
                {"C": width, "BC": triton.next_power_of_2(width), "CENTRED": centred},
                **common, num_warps=4, num_stages=3,
            )  # fmt: skip
    yield Build(
        f"silu_mul {label}", triton_glue.silu_mul_kernel, {"F": 1536, "BF": 1024},
        **common, num_warps=4, num_stages=3,
    )  # fmt: skip
    for head_dim, normed in ((64, False), (80, True), (128, True)):
        yield Build(
            f"rotate D{head_dim} normed={normed} {label}", triton_glue.rotate_kernel,
            {"H": 9, "G": 3, "BLOCK": 16, "D": head_dim,
             "BHALF": triton.next_power_of_2(head_dim // 2), "BH": 4, "NORMED": normed,
             "ROTATED": True},
            **common, num_warps=2, num_stages=3,
        )  # fmt: skip


def builds() -> Iterator[Build]:
    for capability in CARDS:
        for dtype in TYPES:
            yield from _glue(dtype, capability)
            for head_dim in HEAD_DIMS:
                yield from _attention(head_dim, dtype, capability)

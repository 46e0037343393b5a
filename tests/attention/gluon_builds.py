"""Every Gluon kernel in every configuration that is launched or swept, built without a card."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from stairs.attention.hopper import TILES, ForwardTile
from stairs.attention.hopper_forward import BOXES, constants, forward_kernel
from stairs.attention.hopper_order import order_kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOX_ROWS = {"q": 64, "o": 64}  # of the others: the tile's keys
POINTERS = {"lse": "fp32", "tiles": "i32", "cu_q": "i32", "cu_kv": "i32"}
SHARED_LIMIT = 227 * 1024


class Build(Protocol):
    @property
    def name(self) -> str: ...
    def compile(self) -> Any: ...


def compiled(kernel: Any, fixed: dict[str, Any], types: dict[str, str]) -> Any:
    """``kernel`` for sm_90; arguments are constants, of ``types``, or int32."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = GluonASTSource(kernel, signature, fixed, attributes)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@dataclass(frozen=True)
class ForwardBuild:
    tile: ForwardTile
    head_dim: int
    right: bool
    left: bool = False
    ragged: bool = False
    cut: bool = True
    capped: bool = False
    lse: bool = True
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        t = self.tile
        told = [
            f"forward D{self.head_dim} {self.dtype} keys{t.keys} x{t.stages}",
            f"consumers{t.consumers} {t.releases}",
        ]
        told += [name for name in ("turns", "spare") if getattr(t, name)]
        told += [
            name for name in ("right", "left", "ragged", "cut", "capped", "lse")
            if getattr(self, name)
        ]  # fmt: skip
        return " ".join(told)

    def compile(self) -> Any:
        fixed = constants(
            self.tile, head_dim=self.head_dim, dtype=DTYPES[self.dtype], is_ragged=self.ragged,
            has_right=self.right, has_left=self.left, is_cut=self.cut, is_capped=self.capped,
            returns_lse=self.lse,
        )  # fmt: skip
        types = {"out": "*" + self.dtype, "scale": "fp32", "inner": "fp32"}
        types |= {name: "*" + kind for name, kind in POINTERS.items()}
        for name in ("q", "k", "v", "o"):
            box = [1, 1, BOX_ROWS.get(name, self.tile.keys), fixed["BD"]]
            types[name] = f"tensordesc<{self.dtype}{box},{BOXES!r}>"
        return compiled(forward_kernel, fixed, types)


@dataclass(frozen=True)
class OrderBuild:
    tile: ForwardTile
    right: bool
    left: bool

    @property
    def name(self) -> str:
        edges = f"right={self.right} left={self.left}"
        return f"order rows{self.tile.rows} keys{self.tile.keys} {edges}"

    def compile(self) -> Any:
        fixed = {"BM": self.tile.rows, "BN": self.tile.keys, "RIGHT": self.right,
                 "LEFT": self.left}  # fmt: skip
        return compiled(order_kernel, fixed, {name: "*" + POINTERS[name] for name in
                                              ("cu_q", "cu_kv", "tiles")})  # fmt: skip


def chosen() -> Iterator[Build]:
    """What a call runs that names no tile."""
    for (head_dim, right), tiles in TILES.items():
        tile = tiles[0]
        if not right:
            yield ForwardBuild(tile, head_dim, right, cut=False)
        for left in (False, True):
            yield OrderBuild(tile, right, left)
            for ragged in (False, True):
                for capped in (False, True):
                    yield ForwardBuild(tile, head_dim, right, left, ragged, capped=capped)
        yield ForwardBuild(tile, head_dim, right, ragged=True, dtype="fp16")
        yield ForwardBuild(tile, head_dim, right, lse=False, dtype="fp16")


def swept() -> Iterator[Build]:
    """What `bench/attention_gpu.py --sweep` times beside it."""
    for (head_dim, right), tiles in TILES.items():
        for tile in tiles[1:]:
            yield ForwardBuild(tile, head_dim, right, cut=right, lse=False)
            yield ForwardBuild(tile, head_dim, right, ragged=True, lse=False)


@dataclass(frozen=True)
class Assembled:
    spilled: int  # bytes, stored
    is_serial: bool  # ptxas put the products of one warpgroup one after the other
    register_splits: frozenset[int]  # what setmaxnreg asks for

    @classmethod
    def of(cls, kernel: Any) -> Assembled:
        """What Triton's ptxas says of ``kernel``'s PTX."""
        ptx = kernel.asm["ptx"]
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.ptx"
            path.write_text(ptx)
            log = subprocess.run(
                [ptxas, "-arch=sm_90a", "-v", path, "-o", f"{folder}/kernel.cubin"],
                capture_output=True, text=True, check=True,
            ).stderr  # fmt: skip
        return cls(
            sum(int(found) for found in re.findall(r"(\d+) bytes spill stores", log)),
            any(code in log for code in ("C7508", "C7510", "C7512")) or "serialized" in log,
            frozenset(int(found) for found in re.findall(r"setmaxnreg\S*\s+(\d+)", ptx)),
        )

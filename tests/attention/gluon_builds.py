"""Every Gluon kernel in every configuration that is launched or swept, built without a card."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from stairs.attention.hopper import TILES, ForwardTile
from stairs.attention.hopper_forward import (
    BOXES,
    PAGES,
    box_keys,
    constants,
    forward_kernel,
)
from stairs.attention.hopper_order import order_kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOX_ROWS = {"q": 64, "o": 64}  # of the others: the tile's keys
POINTERS = {"lse": "fp32", "partial_out": "fp32", "number": "i32", "tiles": "i32", "table": "i32",
            "counts": "i64", "cu_q": "i32", "cu_kv": "i32"}  # fmt: skip
SHARED_LIMIT = 227 * 1024
IS_36 = triton.__version__.startswith("3.6.")


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
    page: int = 0
    counting: bool = False

    @property
    def name(self) -> str:
        t = self.tile
        told = [
            f"forward D{self.head_dim} {self.dtype} keys{t.keys} x{t.stages}",
            f"consumers{t.consumers} {t.releases}",
        ]
        told += [name for name in ("turns", "spare", "lazy") if getattr(t, name)]
        told += [
            name for name in ("right", "left", "ragged", "cut", "capped", "lse")
            if getattr(self, name)
        ]  # fmt: skip
        if self.page:
            told.append(f"page{self.page}" + (" counting" if self.counting else ""))
        return " ".join(told)

    def compile(self) -> Any:
        fixed = constants(
            self.tile, head_dim=self.head_dim, dtype=DTYPES[self.dtype], is_ragged=self.ragged,
            has_right=self.right, has_left=self.left, is_cut=self.cut, is_capped=self.capped,
            returns_lse=self.lse, page=self.page, counting=self.counting,
        )  # fmt: skip
        types = {"out": "*" + self.dtype, "scale": "fp32", "inner": "fp32"}
        types |= {name: "*" + kind for name, kind in POINTERS.items()}
        for name in ("q", "k", "v", "o"):
            box = [1, 1, BOX_ROWS.get(name, self.tile.keys), fixed["BD"]]
            layout = BOXES
            if self.page and name in ("k", "v"):
                box, layout = [box_keys(self.page, self.tile.keys), fixed["BD"]], PAGES
            types[name] = f"tensordesc<{self.dtype}{box},{layout!r}>"
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
        for page in (16, 64, 48, 256) if right else ():
            for counting in (False, True):
                yield ForwardBuild(
                    tile, head_dim, right, ragged=True, lse=False, page=page, counting=counting
                )


def swept() -> Iterator[Build]:
    """What `bench/attention_gpu.py --sweep` times beside it."""
    for (head_dim, right), tiles in TILES.items():
        for tile in tiles[1:]:
            yield ForwardBuild(tile, head_dim, right, cut=right, lse=False)
            yield ForwardBuild(tile, head_dim, right, ragged=True, lse=False)


@dataclass
class Compiled:
    """A kernel that is compiled for the arguments of each launch, and not launched."""

    kernel: Any
    calls: list[Any] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append(
            self.kernel.run(*args, grid=grid, warmup=True, **kwargs)
        )


# What Triton asks of a driver before a launch, answered as on a Hopper.
HOPPER_DRIVER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)


@dataclass(frozen=True)
class Assembled:
    """What Triton's ptxas makes of a kernel's PTX."""

    spilled: int  # bytes, stored
    spilled_in_loops: int  # instructions that store or load them in a loop of products
    is_serial: bool  # the products of one warpgroup wait for each other
    register_splits: frozenset[int]  # what setmaxnreg asks for
    loops: tuple[int, ...]  # instructions of each innermost loop of products

    @classmethod
    def of(cls, kernel: Any) -> Assembled:
        tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = (Path(folder) / name for name in ("kernel.ptx", "kernel.cubin"))
            ptx.write_text(kernel.asm["ptx"])
            ptxas = tools / ("ptxas" if IS_36 else "ptxas-blackwell")  # whichever Triton takes
            log = _run(ptxas, "-arch=sm_90a", "-v", ptx, "-o", cubin)
            code = _run(tools / "nvdisasm", "-c", cubin)
        loops = list(_loops(code))
        return cls(
            sum(int(found) for found in re.findall(r"(\d+) bytes spill stores", log)),
            sum(line.startswith(("STL", "LDL")) for loop in loops for line in loop),
            any(code in log for code in ("C7508", "C7510", "C7512")) or "serialized" in log,
            frozenset(int(n) for n in re.findall(r"setmaxnreg\S*\s+(\d+)", kernel.asm["ptx"])),
            tuple(len(loop) for loop in loops),
        )


def _run(*command: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _loops(code: str) -> Iterator[list[str]]:
    """Instructions of the innermost loops that hold products, from a listing by nvdisasm."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    found: list[range] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@\S+\s+)?(.*?);", line):
            lines.append(instruction[2])
            target = re.search(r"^BRA\b.*\((\.L_\w+)\)", lines[-1])
            # Without a condition it is the way back from a wait, which lies behind the program.
            if instruction[1] and target and target[1] in labels:
                loop = range(labels[target[1]], len(lines))
                if any(lines[i].startswith("HGMMA") for i in loop) and not any(
                    loop[0] <= other[0] and other[-1] <= loop[-1] for other in found
                ):
                    found.append(loop)
    for loop in found:
        yield [lines[i] for i in loop]

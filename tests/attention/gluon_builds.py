"""Every Gluon kernel in every configuration that a call can ask for, built without a card."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from stairs.attention.hopper import TILES, ForwardTile, forward_tile, is_in_rounds
from stairs.attention.hopper_boxes import BOXES, PAGES, box_keys
from stairs.attention.hopper_forward import constants
from stairs.attention.hopper_kernel import forward_kernel
from stairs.attention.hopper_order import order_kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOX_ROWS = {"q": 64, "o": 64}  # of the others: the tile's keys
POINTERS = {"lse": "fp32", "partial_out": "fp32", "number": "i32", "tiles": "i32", "table": "i32",
            "counts": "i64", "cu_q": "i32", "cu_kv": "i32"}  # fmt: skip
PAGE_SIZES = (8, 16, 32, 64, 128, 192, 256)
SHARED_LIMIT = 227 * 1024
IS_36 = triton.__version__.startswith("3.6.")
# Bytes that a forward kernel spills, by padded head_dim, consumers, and whether rows are ragged.
# Ragged sizes, once a tile of rows, do not all fit beside O's 128 registers of a thread (D 256),
# nor beside 64 of scores where three consumers have 160; nor a softcap beside a window (D 256);
# nor beside 232 registers and counts (D 128, small pages).
SPILLS: dict[tuple[int, int, bool], int] = {
    (64, 3, True): 16, (128, 2, True): 20, (256, 2, True): 20, (256, 2, False): 44,
}  # fmt: skip
# Triton 3.9 asks its ptxas for --regAllocOptLevel=2; at D 256 two instructions are in a loop.
if not IS_36:
    SPILLS = {
        (64, 3, True): 324, (64, 3, False): 8, (128, 2, True): 220, (256, 2, True): 672,
        (256, 2, False): 72,
    }  # fmt: skip
SPILLED_IN_LOOPS = 0 if IS_36 else 2


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
    rounds: bool = False
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
            name for name in ("right", "left", "ragged", "rounds", "cut", "capped", "lse")
            if getattr(self, name)
        ]  # fmt: skip
        if self.page:
            told.append(f"page{self.page}" + (" counting" if self.counting else ""))
        return " ".join(told)

    def compile(self) -> Any:
        fixed = constants(
            self.tile, head_dim=self.head_dim, dtype=DTYPES[self.dtype], is_ragged=self.ragged,
            has_right=self.right, has_left=self.left, is_cut=self.cut, is_capped=self.capped,
            returns_lse=self.lse, in_rounds=self.rounds, page=self.page, counting=self.counting,
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
    rows: int
    keys: int
    right: bool
    left: bool

    @property
    def name(self) -> str:
        return f"order rows{self.rows} keys{self.keys} right={self.right} left={self.left}"

    def compile(self) -> Any:
        fixed = {"BM": self.rows, "BN": self.keys, "RIGHT": self.right, "LEFT": self.left}
        types = {name: "*" + POINTERS[name] for name in ("cu_q", "cu_kv", "tiles")}
        return compiled(order_kernel, fixed, types)


def served() -> Iterator[Build]:
    """Everything that a call runs which names no tile, in bfloat16. In float16, whose code differs
    in the names of types alone, a causal row; kernels over pages have no other options. LSE is one
    store more: with a window or a softcap the kernel that has it stands for both, unless all are
    asked for (`make test-kernels`)."""
    for (head_dim, right), (tile, *_) in TILES.items():
        for left, capped, lse in itertools.product((False, True), repeat=3):
            if not lse and (left or capped) and not os.environ.get("STAIRS_ALL_KERNELS"):
                continue
            options = {"left": left, "capped": capped, "lse": lse}
            yield ForwardBuild(tile, head_dim, right, ragged=True, **options)
            for dense, in_rounds in _dense(head_dim, right):
                yield ForwardBuild(dense, head_dim, right, rounds=in_rounds, **options)
                if not right and not left:
                    yield ForwardBuild(dense, head_dim, right, cut=False, **options)
        for left in (False, True):
            yield OrderBuild(tile.rows, tile.keys, right, left)
        for ragged in (False, True) if (head_dim, right) == (128, True) else ():
            yield ForwardBuild(tile, head_dim, right, ragged=ragged, dtype="fp16")
        for page in PAGE_SIZES if right else ():
            for counting in (False, True) if page == 16 else (False,):
                yield ForwardBuild(
                    tile, head_dim, right, ragged=True, lse=False, page=page, counting=counting
                )


def _dense(head_dim: int, right: bool) -> Iterable[tuple[ForwardTile, bool]]:
    """The tiles and orders that dense batches of some shape take."""
    found = {}
    for num_q, num_heads in itertools.product((1, 512, 2048, 4096, 65536), (1, 66, 4096)):
        tile = forward_tile(head_dim, causal=right, window=(-1, -1), dense_q=num_q)
        in_rounds = is_in_rounds(num_heads=num_heads, num_q=num_q, num_programs=132)
        found[tile, right and in_rounds] = None
    return found


def in_brief(build: Build) -> bool:
    """Each kernel of ``served`` with none of its options and with all, and over pages of two sizes:
    what there is time for under a second Triton."""
    if not isinstance(build, ForwardBuild):
        return True
    return build.page in (16, 256) if build.page else build.left == build.capped == build.lse


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
    """What Triton's ptxas made of a kernel."""

    spilled: int  # bytes, stored
    spilled_in_loops: int  # instructions that store or load them in a loop of products
    is_serial: bool  # the products of one warpgroup wait for each other
    register_splits: frozenset[int]  # what setmaxnreg asks for

    @classmethod
    def of(cls, kernel: Any, log: str) -> Assembled:
        spilled = sum(int(found) for found in re.findall(r"(\d+) bytes spill stores", log))
        in_loops = [line for loop in _loops(_listing(kernel)) for line in loop] if spilled else []
        return cls(
            spilled,
            sum(line.startswith(("STL", "LDL")) for line in in_loops),
            any(code in log for code in ("C7508", "C7510", "C7512")) or "serialized" in log,
            frozenset(int(n) for n in re.findall(r"setmaxnreg\S*\s+(\d+)", kernel.asm["ptx"])),
        )


def assembled(build: Build) -> tuple[Any, Assembled]:
    """The kernel, built anew, as Triton's cache has no log; and what the log says."""
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        kernel = build.compile()
    assert "Compiling entry function" in log.getvalue()
    return kernel, Assembled.of(kernel, log.getvalue())


def _listing(kernel: Any) -> str:
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listed = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, check=True)
    return listed.stdout.decode()


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

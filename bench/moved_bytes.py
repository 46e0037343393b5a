"""How many bytes does attention move, by the card's own counters? One JSON line a cell.

`python bench/moved_bytes.py [--sides SIDE ...]` runs each side once a cell under Nsight Compute
(`ncu`), and puts what dram and L2 counted beside the predicted interval. SIDE is hopper (ours in
Gluon), triton (ours) or materialised (torch, summed over its kernels). bfloat16, one sequence.
`--table` prints the newest records as markdown. Caches are flushed before every pass of every
kernel, so all inputs come from dram; what is still in L2 when a kernel ends counts as not written.
Where counters cannot be read, the line says "not measured here" and why, in ncu's words.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from gpu_sides import Side, report
from quoted import ROOT, machine
from stairs import flash_attention
from stairs.accounting import costs, traffic

RECORDS = ROOT / "bench" / "records" / "moved_bytes.jsonl"
SIDES = ("hopper", "triton", "materialised")
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
LONGEST_MATRIX = 16384  # 8 GiB; at 32k it is 32 GiB, and ncu keeps a copy of what a kernel writes
HEADS, HEAD_DIM, ITEMSIZE = 16, 128, 2
CACHES = "all"  # ncu's --cache-control
NCU = "/usr/local/cuda/bin/ncu"  # where it lies if not in PATH
NOT_MEASURED = "not measured here"

# What the SMs ask L2 for, twice: where L2 looks tags up (sectors of requests from the L1s, through
# which the copy engine goes too), and where the L1s meet the crossbar. l2_all_units has the same
# reads again where one half of L2 asks the other: it is no measure of what a kernel asks for.
COUNTERS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "l2_read": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_written": "lts__t_sectors_srcunit_tex_op_write.sum",
    "sm_read": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "sm_written": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "sm_read_by_copy_engine": "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
    "l2_all_units": "lts__t_bytes.sum",
}
BYTES = {"byte": 1, "sector": 32}


@dataclass(frozen=True)
class Cell:
    side: str
    length: int
    causal: bool

    @property
    def flops(self) -> int:
        """Of the visible pairs, and so equal for all sides: QK^T and PV."""
        pairs = costs.causal_pairs if self.causal else costs.square_pairs
        product = pairs(self.length, self.length) * HEADS * HEAD_DIM
        return costs.flops({"QK^T": product, "PV": product})

    def predicted(self, rows: int | None) -> dict[str, int]:
        """Bytes of all heads: [compulsory, tile form] of a tile of ``rows``, or materialised."""
        head = self.length, self.length, HEAD_DIM, ITEMSIZE
        bounds = {"compulsory": traffic.compulsory_bytes(*head)}
        if rows is not None:
            bounds["tile_form"] = traffic.tile_bytes(*head, q_tile=rows, causal=self.causal)
        else:  # QK^T, scale, and a mask where there is one; softmax and PV in the model's dtype
            kernels = (
                traffic.EAGER_KERNELS[: 3 if self.causal else 2] + traffic.STANDARD_KERNELS[1:]
            )
            bounds["materialised"] = traffic.materialised_bytes(*head, kernels=kernels)
        return {name: HEADS * moved for name, moved in bounds.items()}


def cells(side: str) -> Iterator[Cell]:
    longest = LONGEST_MATRIX if side == "materialised" else max(LENGTHS)
    for causal in (False, True):
        for length in LENGTHS:
            if length <= longest:
                yield Cell(side, length, causal)


# -- the inner process: what ncu looks at ---------------------------------------------------------


def run_cell(cell: Cell) -> dict[str, object]:
    """Call it where ncu does not look, then once where it does. The rows of its tile, or what kept
    it from running."""
    try:
        call, rows = call_of(cell)
        call()
        torch.cuda.synchronize()
    except Exception as problem:  # a kernel's limits, or memory
        return {"problem": repr(problem)[:200]}
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)  # a kernel of its own, that shows where a cell begins
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return {"rows": rows}


def call_of(cell: Cell) -> tuple[Side, int | None]:
    """The call on fresh inputs, and the rows of its tile if it has tiles."""
    q, k, v = (
        torch.randn(1, cell.length, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    if cell.side == "materialised":
        from gpu_prefill import materialised  # which loads every peer's library

        by_head = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        return lambda: materialised(*by_head, causal=cell.causal), None
    options = {"causal": cell.causal, "backend": cell.side}
    chosen = flash_attention(q, k, v, explain=True, **options)
    return lambda: flash_attention(q, k, v, **options), chosen.tile.queries


# -- the outer process ----------------------------------------------------------------------------


def measure(side: str, ncu: str, *, metrics: Sequence[str]) -> None:
    """Report a side's cells, and what kept ncu from the others."""
    told, log = under_ncu(side, ncu, metrics=metrics)
    all_cells, groups = list(cells(side)), iter(kernels_by_cell(log))
    reported = 0
    for cell, facts in zip(all_cells, told, strict=False):
        what = {"side": side, "length": cell.length, "causal": cell.causal}
        if "problem" in facts:
            report(bench="moved_bytes", **what, problem=facts["problem"])
            reported += 1
        elif kernels := next(groups, None):
            report(
                bench="moved_bytes", **what, heads=HEADS, head_dim=HEAD_DIM,
                tile_rows=facts["rows"], flops=cell.flops, predicted=cell.predicted(facts["rows"]),
                counted=total(kernels), kernels=dict(Counter(name for name, _ in kernels)),
                caches=CACHES,
            )  # fmt: skip
            reported += 1
    if reported == len(all_cells):
        return
    words = words_of(log, finished=len(told) == len(all_cells))
    if not words:  # then its own traceback stands above
        sys.exit(f"moved_bytes: {side} ended after {len(told)} of {len(all_cells)} cells")
    not_measured(words, side=side, reported=f"{reported} of {len(all_cells)} cells")


def under_ncu(
    side: str, ncu: str, *, metrics: Sequence[str]
) -> tuple[list[dict[str, Any]], str]:  # fmt: skip
    """What the inner process told of each cell, and all that ncu wrote."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = [
            "--log-file", str(log), "--csv", "--page", "raw", "--print-units", "base",
            "--print-kernel-base", "function", "--target-processes", "all",
            "--profile-from-start", "off", "--clock-control", "none", "--cache-control", CACHES,
            "--metrics", ",".join(metrics),
        ]  # fmt: skip
        command = [ncu, *options, sys.executable, __file__, "--inside", side]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines], log.read_text() if log.exists() else ""


def known_metrics(ncu: str) -> list[str]:
    """The counters that ncu lists for this card: one unknown name would end the run. All of them
    where it lists none, so that it says itself why."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True)
    listed = set(re.findall(r"\w+__\w+", done.stdout))
    known = [metric for metric in COUNTERS.values() if metric.removesuffix(".sum") in listed]
    return known or list(COUNTERS.values())


Kernel = tuple[str, dict[str, int | None]]  # its name, and bytes by counter; None: not counted


def kernels_of(log: str) -> list[Kernel]:
    """From ncu's raw page: a line of names, one of units, one a kernel; other lines are messages.

    Raises ValueError for a unit that is not one of BYTES.
    """
    table = csv.DictReader(line for line in log.splitlines() if line.startswith('"'))
    units = next(table, {})
    return [
        (
            row["Kernel Name"],
            {
                name: in_bytes(row[metric], units[metric]) if metric in row else None
                for name, metric in COUNTERS.items()
            },
        )
        for row in table
    ]


def in_bytes(figure: str, unit: str) -> int | None:
    try:
        count = float(figure.replace(",", ""))
    except ValueError:  # n/a, or nothing
        return None
    if math.isnan(count):
        return None
    if unit not in BYTES:
        raise ValueError(f"ncu counts in {unit!r}, not in {' or '.join(BYTES)}")
    return int(count * BYTES[unit])


def kernels_by_cell(log: str) -> list[list[Kernel]]:
    """A cell begins with the marking kernel, which is the first of all."""
    groups: list[list[Kernel]] = []
    kernels = kernels_of(log)
    for name, counters in kernels:
        if name == kernels[0][0]:
            groups.append([])
        else:
            groups[-1].append((name, counters))
    return groups


def total(kernels: Sequence[Kernel]) -> dict[str, int | None]:
    """None where a kernel's counter could not be read: a part is no sum."""
    sums: dict[str, int | None] = {}
    for name in COUNTERS:
        figures = [counters[name] for _, counters in kernels]
        sums[name] = None if None in figures else sum(figures)
    return sums


def words_of(log: str, *, finished: bool) -> str:
    """Why ncu did not count, in its words; nothing where the inner process ended by itself."""
    kinds = ("==ERROR==", "==WARNING==") if finished else ("==ERROR==",)
    lines = [line for line in log.splitlines() if line.startswith(kinds)]
    lines = [line for line in lines if "The application returned an error code" not in line]
    return " ".join(lines) or ("ncu counted too few kernels" if finished else "")


def not_measured(why: str, **figures: object) -> None:
    line = {"what": NOT_MEASURED, **figures, "why": why[:600]}
    if torch.cuda.is_available():
        report(bench="moved_bytes", **line)
    else:
        where = {"machine": machine(), "date": date.today().isoformat()}
        print(json.dumps({"bench": "moved_bytes", **line, **where}))


# -- the table ------------------------------------------------------------------------------------


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown of the newest record of each cell, in MiB."""
    newest = {(r["causal"], r["length"], r["side"]): r for r in records if "counted" in r}
    sides = [side for side in SIDES if any(key[2] == side for key in newest)]
    lines = [
        "| mask | S | GFLOP | compulsory | " + " | ".join(sides) + " |",
        "|---" * (4 + len(sides)) + "|",
    ]
    for causal, length in sorted({key[:2] for key in newest}):
        row = {side: newest.get((causal, length, side)) for side in sides}
        cell = Cell(SIDES[0], length, causal)
        lines.append(
            f"| {'causal' if causal else 'full'} | {length} | {cell.flops / 1e9:,.0f} "
            f"| {mib(cell.predicted(None)['compulsory'])} | "
            + " | ".join(shown(record) for record in row.values())
            + " |"
        )
    return "\n".join(lines)


def shown(record: dict[str, Any] | None) -> str:
    """predicted / L2 / dram read + written"""
    if record is None:
        return NOT_MEASURED
    counted, predicted = record["counted"], record["predicted"]
    l2 = [counted["l2_read"], counted["l2_written"]]
    asked = None if None in l2 else sum(l2)
    dram = f"{mib(counted['dram_read'])} + {mib(counted['dram_written'])}"
    most = predicted.get("tile_form", predicted.get("materialised"))
    return f"{mib(most)} / {mib(asked)} / {dram}"


def mib(moved: int | None) -> str:
    return NOT_MEASURED if moved is None else f"{moved / 2**20:,.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--table", action="store_true", help="markdown of the records")
    parser.add_argument("--inside", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    ncu = shutil.which("ncu") or shutil.which(NCU)
    if args.inside:
        for cell in cells(args.inside):
            print(json.dumps(run_cell(cell)), flush=True)
            torch.cuda.empty_cache()  # else ncu may copy what the last cell left there
    elif args.table and not RECORDS.exists():
        sys.exit(f"moved_bytes: there is no {RECORDS.relative_to(ROOT)} yet")
    elif args.table:
        print(table([json.loads(line) for line in RECORDS.read_text().splitlines()]))
    elif not torch.cuda.is_available():
        not_measured("no NVIDIA GPU")
    elif ncu is None:
        not_measured("Nsight Compute (ncu) is not installed")
    else:
        metrics = known_metrics(ncu)
        for side in args.sides:
            measure(side, ncu, metrics=metrics)


if __name__ == "__main__":
    main()

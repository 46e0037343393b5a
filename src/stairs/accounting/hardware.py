"""Devices as rows of figures, each with its kind and source; an unknown device is refused.

A data-sheet peak is a bound: nothing runs faster. ``reachable`` is what a plan may count on: the
measured figure, or the data sheet's times the share that the measured card reached. Peaks are
dense (without sparsity), GB and TB are powers of ten.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from stairs.accounting.table import Axis, Kind, Quantity, Unit
from stairs.errors import ConfigError

__all__ = [
    "DEVICES",
    "Device",
    "Figure",
    "find_device",
    "has_wide_vectors",
    "host_cpu",
    "installed_card",
    "ridge",
]

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Figure:
    value: float
    kind: Kind
    source: str

    def quantity(self, unit: Unit, axis: Axis) -> Quantity:
        return Quantity(self.value, unit, axis, self.kind, self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """``memory`` None: ask the machine. ``matmul``: FLOP/s by the dtype of the operands. Both it
    and ``bandwidth`` are the data sheet's where there is one, else measured.

    ``tile_memory``: bytes one unit (SM, core) may give to the tiles of one kernel; ``on_chip``:
    all units' together; ``on_chip_bandwidth``: between them and the arithmetic.
    ``capability``: 90 of an sm_90, None of a CPU.
    """

    name: str
    title: str
    memory: Figure | None
    bandwidth: Figure
    matmul: Mapping[str, Figure]
    units: int
    tile_memory: Figure
    on_chip: Figure
    on_chip_bandwidth: Figure
    cache: Figure  # the last level before memory
    capability: int | None = None
    measured_bandwidth: Figure | None = None
    measured_matmul: Mapping[str, Figure] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def reachable_bandwidth(self) -> Figure:
        """Bytes a second that a streaming kernel gets."""
        if self.bandwidth.kind == "measured":
            return self.bandwidth
        return self.measured_bandwidth or _share_of(self.bandwidth, _BANDWIDTH_SHARE)

    def reachable_matmul(self, dtype: str) -> Figure:
        """FLOP/s of a large matrix product; float16 runs as bfloat16, float64 as float32."""
        kind = "bfloat16" if dtype in ("float16", "bfloat16") else "float32"
        if kind not in self.matmul:  # a CPU's sgemm is what its 16-bit products fall back to
            kind = "float32"
        if self.matmul[kind].kind == "measured":
            return self.matmul[kind]
        return self.measured_matmul.get(kind) or _share_of(self.matmul[kind], _MATMUL_SHARE)


def ridge(device: Device, dtype: str) -> Quantity:
    """FLOP a byte at which arithmetic and memory take equally long."""
    matmul, bandwidth = device.reachable_matmul(dtype), device.reachable_bandwidth()
    kind: Kind = "measured" if matmul.kind == bandwidth.kind == "measured" else "estimate"
    source = "reachable FLOP/s over reachable bytes/s"
    return Quantity(matmul.value / bandwidth.value, "FLOP/B", "count", kind, source)


def find_device(name: str) -> Device:
    """A row by its name; ``auto`` is the card in this machine, or the one we measured."""
    if name == "auto":
        return DEVICES[installed_card() or "h200"]
    if name not in DEVICES:
        raise ConfigError(
            f"gpu {name!r} is not a device we have figures for; one of {', '.join(DEVICES)}",
            param="gpu",
        )
    return DEVICES[name]


def host_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """This machine's processor by its own name, and the cores that we may use."""
    found = platform.processor() or platform.machine()
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                found = value.strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{found}, {cores} cores"


def installed_card(root: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """The row of the first card that the driver lists; None without a card we have figures for."""
    for file in sorted(root.glob("*/information")):
        words = set(file.read_text().lower().replace("-", " ").split())
        for name in sorted(DEVICES, key=len, reverse=True):  # a100-40gb before a100
            if words.issuperset(name.split("-")):
                return name
    return None


@cache
def has_wide_vectors() -> bool:
    """Whether this CPU has vectors of 512 bits. Sums of eight rows of x then stay in registers,
    and products with packed weights are 1.7 times as quick as BLAS at any number of rows; else
    two and a half times slower from eight on."""
    import llvmlite.binding as llvm  # what compiles the kernel; on first use, it takes 0.1 s

    return bool(llvm.get_host_cpu_features().get("avx512f"))


def _share_of(figure: Figure, share: float) -> Figure:
    source = f"{figure.source}, times the {share:.2f} that the measured H200 reached of its own"
    return Figure(figure.value * share, "estimate", source)


_PEERS = "measured on one H200, 2026-11-29, torch 2.11"
_BANDWIDTH_SHARE = 4.28 / 4.8
_MATMUL_SHARE = 731 / 989.4


def _gpu(
    name: str,
    title: str,
    *,
    sheet: str,
    capability: int,
    memory_gb: float,
    bandwidth_tbs: float,
    bf16_tflops: float,
    fp32_tflops: float,
    sms: int,
    l1_kib: int,
    tile_kib: int,
    l2_mib: int,
    clock_ghz: float,
    memory: Figure | None = None,
    measured_bandwidth: Figure | None = None,
    measured_matmul: Mapping[str, Figure] | None = None,
) -> Device:
    """A card of SMs: shared memory and L1 are one array, read at 128 bytes a clock."""
    on_chip = f"{sheet}: {sms} SMs x {l1_kib} KiB of L1 and shared memory"
    return Device(
        name=name,
        title=title,
        memory=memory or Figure(memory_gb * 1e9, "bound", sheet),
        bandwidth=Figure(bandwidth_tbs * 1e12, "bound", sheet),
        matmul={
            "bfloat16": Figure(bf16_tflops * 1e12, "bound", f"{sheet}, dense"),
            "float32": Figure(fp32_tflops * 1e12, "bound", f"{sheet}, without tensor cores"),
        },
        units=sms,
        tile_memory=Figure(tile_kib * KIB, "exact", f"{sheet}: shared memory of one block"),
        on_chip=Figure(sms * l1_kib * KIB, "exact", on_chip),
        on_chip_bandwidth=Figure(
            sms * 128 * clock_ghz * 1e9, "bound", f"{sms} SMs x 128 B a clock x {clock_ghz} GHz"
        ),
        cache=Figure(l2_mib * MIB, "exact", f"{sheet}: L2"),
        capability=capability,
        measured_bandwidth=measured_bandwidth,
        measured_matmul=measured_matmul or {},
    )


_HOPPER = "NVIDIA H100 data sheet and Hopper white paper"
_AMPERE = "NVIDIA A100 data sheet and white paper"
_GA102 = "NVIDIA GA102 white paper"
_ADA = "NVIDIA Ada white paper"

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu(
            "h200", "NVIDIA H200 SXM", sheet="NVIDIA H200 data sheet and Hopper white paper",
            capability=90, memory_gb=141, bandwidth_tbs=4.8, bf16_tflops=989.4, fp32_tflops=66.9,
            sms=132, l1_kib=256, tile_kib=227, l2_mib=50, clock_ghz=1.98,
            memory=Figure(143771 * MIB, "measured", "what the driver of one H200 reports"),
            measured_bandwidth=Figure(4.28e12, "measured", f"copy, {_PEERS}"),
            measured_matmul={
                "bfloat16": Figure(731e12, "measured", f"4096^3 bf16 product, {_PEERS}")
            },
        ),
        _gpu(
            "h100", "NVIDIA H100 SXM", sheet=_HOPPER, capability=90, memory_gb=80,
            bandwidth_tbs=3.35, bf16_tflops=989.4, fp32_tflops=66.9, sms=132, l1_kib=256,
            tile_kib=227, l2_mib=50, clock_ghz=1.98,
        ),
        _gpu(
            "a100", "NVIDIA A100 SXM 80 GB", sheet=_AMPERE, capability=80, memory_gb=80,
            bandwidth_tbs=2.039, bf16_tflops=312, fp32_tflops=19.5, sms=108, l1_kib=192,
            tile_kib=163, l2_mib=40, clock_ghz=1.41,
        ),
        _gpu(
            "a100-40gb", "NVIDIA A100 SXM 40 GB", sheet=_AMPERE, capability=80, memory_gb=40,
            bandwidth_tbs=1.555, bf16_tflops=312, fp32_tflops=19.5, sms=108, l1_kib=192,
            tile_kib=163, l2_mib=40, clock_ghz=1.41,
        ),
        _gpu(
            "l40s", "NVIDIA L40S", sheet="NVIDIA L40S data sheet and Ada white paper",
            capability=89, memory_gb=48, bandwidth_tbs=0.864, bf16_tflops=362, fp32_tflops=91.6,
            sms=142, l1_kib=128, tile_kib=99, l2_mib=96, clock_ghz=2.52,
        ),
        _gpu(
            "l4", "NVIDIA L4", sheet="NVIDIA L4 data sheet and Ada white paper", capability=89,
            memory_gb=24, bandwidth_tbs=0.3, bf16_tflops=121, fp32_tflops=30.3, sms=58, l1_kib=128,
            tile_kib=99, l2_mib=48, clock_ghz=2.04,
        ),
        _gpu(
            "a10", "NVIDIA A10", sheet="NVIDIA A10 data sheet and GA102 white paper",
            capability=86, memory_gb=24, bandwidth_tbs=0.6, bf16_tflops=125, fp32_tflops=31.2,
            sms=72, l1_kib=128, tile_kib=99, l2_mib=6, clock_ghz=1.695,
        ),
        _gpu(
            "4090", "NVIDIA GeForce RTX 4090", sheet=_ADA, capability=89, memory_gb=24,
            bandwidth_tbs=1.008, bf16_tflops=165.2, fp32_tflops=82.6, sms=128, l1_kib=128,
            tile_kib=99, l2_mib=72, clock_ghz=2.52,
        ),
        _gpu(
            "3090", "NVIDIA GeForce RTX 3090", sheet=_GA102, capability=86, memory_gb=24,
            bandwidth_tbs=0.936, bf16_tflops=71, fp32_tflops=35.6, sms=82, l1_kib=128, tile_kib=99,
            l2_mib=6, clock_ghz=1.695,
        ),
        Device(
            name="cpu",
            title="2 cores of a server CPU (EPYC class)",
            memory=None,
            bandwidth=Figure(28.7e9, "measured", "read, 2 cores of an EPYC, 2026-11-29"),
            matmul={
                "float32": Figure(142e9, "measured", "sgemm, 2 cores of an EPYC, 2026-11-29")
            },
            units=2,
            tile_memory=Figure(MIB, "exact", "L2 of one core, as the system reports it"),
            on_chip=Figure(2 * MIB, "exact", "L2 of both cores"),
            on_chip_bandwidth=Figure(
                400e9, "estimate", "twice the 200 GB/s one core reads from its L2, 2026-11-29"
            ),
            cache=Figure(32 * MIB, "exact", "L3, as the system reports it"),
        ),
    )
}  # fmt: skip

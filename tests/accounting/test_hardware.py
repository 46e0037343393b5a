"""Devices: what is measured, what is a bound, and that GB, GiB and sparsity are kept apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stairs.accounting.hardware import DEVICES, find_device, host_cpu, installed_card, ridge
from stairs.errors import ConfigError


def test_a_plan_counts_on_measured_figures_and_on_their_share_elsewhere() -> None:
    h200, h100, cpu = DEVICES["h200"], DEVICES["h100"], DEVICES["cpu"]
    assert h200.reachable_bandwidth().kind == "measured"
    assert h200.reachable_bandwidth().value == 4.28e12 < h200.bandwidth.value
    assert h100.reachable_bandwidth().kind == "estimate"
    assert h100.reachable_bandwidth().value == pytest.approx(3.35e12 * 4.28 / 4.8)
    assert h100.reachable_matmul("float16").value == pytest.approx(731e12)
    assert cpu.reachable_bandwidth() == cpu.bandwidth
    assert cpu.reachable_matmul("bfloat16").value == 142e9


def test_the_ridge_of_the_data_sheet_and_the_measured_one() -> None:
    h200 = DEVICES["h200"]
    assert round(h200.matmul["bfloat16"].value / h200.bandwidth.value) == 206
    assert round(ridge(h200, "bfloat16").value or 0) == 171
    assert ridge(h200, "bfloat16").kind == "measured"
    assert ridge(DEVICES["4090"], "bfloat16").kind == "estimate"


def test_peaks_are_dense_and_memory_is_in_powers_of_ten() -> None:
    assert DEVICES["h100"].matmul["bfloat16"].value == 989.4e12  # 1,979 with sparsity
    assert DEVICES["l40s"].matmul["bfloat16"].value == 362e12  # 733 with sparsity
    memory = DEVICES["a100"].memory
    assert memory is not None
    assert memory.value == 80e9 < 80 * 2**30


def test_the_on_chip_memory_of_an_a100_is_20_mb_and_ten_times_as_fast() -> None:
    a100 = DEVICES["a100"]
    assert round(a100.on_chip.value / 2**20) == 20
    assert round(a100.on_chip_bandwidth.value / a100.bandwidth.value) == 10


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_says_its_source(name: str) -> None:
    device = DEVICES[name]
    figures = [
        device.bandwidth,
        device.tile_memory,
        device.on_chip,
        device.on_chip_bandwidth,
        device.cache,
        *device.matmul.values(),
        *device.measured_matmul.values(),
    ]
    assert all(figure.source and figure.value > 0 for figure in figures)
    assert device.tile_memory.value * device.units <= device.on_chip.value


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'b300'.*h200.*cpu") as refused:
        find_device("b300")
    assert refused.value.param == "gpu"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA Tesla K80", None),
    ],
)
def test_the_card_in_this_machine(tmp_path: Path, model: str, expected: str | None) -> None:
    folder = tmp_path / "0000:01:00.0"
    folder.mkdir()
    (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")
    assert installed_card(tmp_path) == expected


def test_no_card() -> None:
    assert installed_card(Path("/nowhere")) is None
    assert find_device("cpu").is_cpu


def test_this_machine_names_itself(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Abacus 1: wood\nflags\t: fpu\n")
    assert re.fullmatch(r"Abacus 1: wood, \d+ cores", host_cpu(cpuinfo))
    assert re.fullmatch(r".+, \d+ cores", host_cpu(tmp_path / "missing"))

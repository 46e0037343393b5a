"""The installer's choices: which torch is kept, which pins are used, what a bare Python is told."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "install.py"
TESTED = SCRIPT.parent.parent / "constraints.txt"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path)
    return module


def pins(path: Path) -> set[str]:
    return {line for line in path.read_text().splitlines() if "==" in line}


def test_constraints_are_the_tested_set_but_for_a_torch_that_is_kept(install: ModuleType) -> None:
    tested = pins(TESTED)
    torch = {pin for pin in tested if pin.startswith(("torch==", "triton=="))}
    assert len(torch) == 2
    assert pins(install.constraints(None, "cpu")) == tested
    assert pins(install.constraints(None, "gpu")) == tested - torch
    kept = {"version": "2.12.1+cu130", "folders": []}
    assert pins(install.constraints(kept, "kept")) == tested - torch | {"torch==2.12.1+cu130"}


def test_the_torch_of_this_python_is_found_with_its_folders(install: ModuleType) -> None:
    import torch

    found = install.importable_torch()
    assert found and found["version"] == torch.__version__
    assert str(Path(torch.__file__).parent.parent) in found["folders"]


def test_an_old_torch_is_not_kept(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "PROBE", 'print(\'{"version": "2.9.1", "folders": []}\')')
    assert install.importable_torch() is None
    assert "2.9.1 is older than 2.11" in capsys.readouterr().out
    monkeypatch.setattr(install, "PROBE", "raise ImportError")
    assert install.importable_torch() is None


@pytest.mark.parametrize(
    ("answer", "code", "found"),
    [("GPU 0: NVIDIA H200", 0, True), ("", 0, False), ("no driver", 9, False)],
)
def test_a_gpu_counts_when_its_driver_answers(
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    found: bool,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not install.nvidia_answers()
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint({answer!r})\nsys.exit({code})\n")
    program.chmod(0o755)
    assert install.nvidia_answers() is found


def test_it_takes_one_purpose() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "all"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "usage: install.py run|dev\n")

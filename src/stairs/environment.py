"""What a bug report needs: versions, machine, devices, and which of our variables are set.

Values of variables are told for ours alone, and never a key's.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import stairs

__all__ = ["describe"]

_PACKAGES = (
    "torch", "triton", "numba", "numpy", "tokenizers", "safetensors", "gguf", "huggingface_hub",
    "jinja2", "fastapi", "uvicorn", "pydantic", "pyzmq", "msgspec", "llguidance",
)  # fmt: skip
_VARIABLES = re.compile(r"STAIRS_|HF_HOME|HF_HUB_|CUDA_VISIBLE|OMP_|NUMBA_|TRITON_")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


def describe(environment: Mapping[str, str] = os.environ) -> str:
    """One ``name: value`` a line."""
    return "\n".join(f"{name}: {value}" for name, value in _lines(environment))


def _lines(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "stairs", stairs.__version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    yield "cpu", f"{_cpu()}, {len(_cores())} of {os.cpu_count()} cores"
    yield "memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    yield "gpu", _gpus() or "none answers"
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    for name in sorted(filter(_VARIABLES.match, environment)):
        yield name, "set" if _SECRET.search(name) else environment[name]


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(found.stdout.splitlines()) if found.returncode == 0 else ""

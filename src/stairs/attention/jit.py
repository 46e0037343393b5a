"""Numba as every CPU kernel of this package uses it: compiled code cached in the user's cache
folder, threads from OpenMP. Kernels take ``njit`` and ``prange`` from here and from nowhere else.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numba
import torch  # first: its OpenMP is then the one Numba binds to, and both share one pool of threads
from numba import njit, prange

__all__ = ["njit", "prange", "use_torch_threads"]


def _cache_folder() -> str:
    root = os.environ.get("STAIRS_CACHE")
    if root:
        return str(Path(root) / "numba")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(home).expanduser() / "stairs" / "numba")


# Read when a function is decorated, so before the first of them.
if "NUMBA_CACHE_DIR" not in os.environ:
    numba.config.CACHE_DIR = _cache_folder()
if "NUMBA_THREADING_LAYER" not in os.environ:
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


@cache
def _start_threads() -> None:
    """Numba's start sets the number of OpenMP threads of the process, torch's too: put it back."""
    num = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(num)


def use_torch_threads() -> int:
    """Let parallel loops run on as many threads as torch's, and return their number: waking more
    costs more than a small kernel, and on a busy machine each that is woken is waited for."""
    _start_threads()
    num = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if numba.get_num_threads() != num:
        numba.set_num_threads(num)
    return num

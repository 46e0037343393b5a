"""Numba as every CPU kernel of this package uses it: compiled code cached in the user's cache
folder, threads from OpenMP, and an exp that vectorises. Kernels take ``njit`` and ``prange`` from
here and from nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import threading
from functools import lru_cache
from pathlib import Path

import numba
import numpy as np
import torch  # first: its OpenMP is then the one Numba binds to, and both share one pool of threads
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

__all__ = ["as_float", "as_int", "exp_float32", "njit", "prange", "use_torch_threads"]


def _cache_folder() -> str:
    """One folder for each state of the kernels' sources: Numba itself looks only at the file that
    a kernel stands in, and would keep one that calls a function changed elsewhere."""
    package = Path(__file__).parent.parent
    sources = [*package.glob("attention/*.py"), *package.glob("models/*.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources)))
    root = os.environ.get("STAIRS_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = Path(root) if root else home / "stairs"
    return str(folder / "numba" / digest.hexdigest()[:16])


# Read when a function is decorated, so before the first of them.
if "NUMBA_CACHE_DIR" not in os.environ:
    numba.config.CACHE_DIR = _cache_folder()
if "NUMBA_THREADING_LAYER" not in os.environ:
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


@lru_cache(maxsize=1)
def _share_threads(num_threads: int, caller: int) -> int:
    num = min(num_threads, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num)
    if torch.get_num_threads() != num_threads:
        # Numba's first launch sets the process's OpenMP width, which is torch's too.
        torch.set_num_threads(num_threads)
    return num


def use_torch_threads() -> int:
    """Let parallel loops of this thread run on as many threads as torch's; their number. Waking
    more costs more than a small kernel, and each that is woken is waited for.

    Numba keeps a width for each calling thread. Asked at every call, so kept while it holds.
    """
    return _share_threads(torch.get_num_threads(), threading.get_ident())


@intrinsic
def as_int(typing_context, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def as_float(typing_context, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(fastmath={"contract"})
def exp_float32(x):
    """exp for x <= 0 within 1 ulp, in straight-line code that vectorises.

    x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by its series to r^7 / 7! (the next term is 5e-9).
    Adding 1.5 * 2^23 rounds to an integer and leaves n in the low bits; below exp(-87) it is 0.
    """
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    r = x - n * np.float32(0.693145751953125)  # ln 2 in two parts, the first exact in 16 bits
    r = r - n * np.float32(1.4286068203094172e-06)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    power = as_float(np.int32((as_int(shifted) + np.int32(127)) << 23))
    return np.float32(0) if x < np.float32(-87) else p * power

"""Every name of Triton's Gluon that our kernels use, under one spelling for all its releases.

Gluon is experimental and renames things: kernels import from here and from nowhere else. Checked
with Triton 3.6.0 and 3.9.0 (tests/attention/test_gluon_builds.py compiles on both). Because this
is the only door, a module with the same names can stand in for it: tests/attention/
gluon_simulator.py runs the kernels on a CPU that way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "TensorDescriptor",
    "async_copy",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "load_box",
    "mbarrier",
    "mma_v2",
    "named_arrive",
    "named_sync",
    "numbered_arrive",
    "numbered_sync",
    "pack_pairs",
    "partition_barrier",
    "scale_rows",
    "store_box",
    "store_wait",
    "unpack_pairs",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

IS_NEW = hasattr(tma, "async_load")  # 3.9; 3.6 has the longer names

# load_box(descriptor, coordinates, barrier, destination, pred=True): a box from global memory to
# shared memory by the copy engine; the barrier must expect its bytes.
load_box = tma.async_load if IS_NEW else tma.async_copy_global_to_shared
# store_box(descriptor, coordinates, source): the way back; waited for with store_wait(pending).
store_box = tma.async_store if IS_NEW else tma.async_copy_shared_to_global
store_wait = tma.store_wait
partition_barrier = gl.barrier if IS_NEW else gl.thread_barrier  # of the warps that run this code


@gluon.jit
def named_arrive(barrier: gl.constexpr, threads: gl.constexpr):
    """Arrive at hardware barrier ``barrier`` (a string, "8" to "15": Triton takes the low ones)
    without waiting; it opens when ``threads`` (a string too) have arrived or synced."""
    gl.inline_asm_elementwise(
        "bar.arrive " + barrier + ", " + threads + "; mov.u32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def named_sync(barrier: gl.constexpr, threads: gl.constexpr):
    """Arrive and wait until ``threads`` have."""
    gl.inline_asm_elementwise(
        "bar.sync " + barrier + ", " + threads + "; mov.u32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def numbered_arrive(barrier, threads: gl.constexpr):
    """named_arrive at a barrier whose number is known only at run time."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, " + threads + "; mov.u32 $0, $1;", "=r,r", [barrier], gl.int32, False, 1
    )


@gluon.jit
def numbered_sync(barrier, threads: gl.constexpr):
    gl.inline_asm_elementwise(
        "bar.sync $1, " + threads + "; mov.u32 $0, $1;", "=r,r", [barrier], gl.int32, False, 1
    )


@gluon.jit
def pack_pairs(x, rows: gl.constexpr, columns: gl.constexpr, dtype: gl.constexpr):
    """x (rows, columns) in float32 as int32 (rows, columns / 2): two neighbours rounded to
    ``dtype``, the first below. A loop carries halves in a register each, and pays for it."""
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    low, high = gl.split(x.reshape([rows, columns // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn." + kind + ".f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
    )


@gluon.jit
def unpack_pairs(words, rows: gl.constexpr, columns: gl.constexpr, dtype: gl.constexpr):
    """The way back, (rows, columns) in ``dtype``: no instruction where a product reads it."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], (gl.int16, gl.int16), True, 1
    )
    pairs = gl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    return pairs.reshape([rows, columns])


@gluon.constexpr_function
def scaling(n):
    """PTX for n accumulators of a thread, whose rows alternate by pairs: skipped where a warp's
    factors are all 1, with which it would change no bit."""
    first = f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000;"
    second = f" setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; or.pred p, p, q;"
    vote = " vote.sync.any.pred p, p, 0xffffffff; @!p bra SKIP;"
    products = "".join(f" mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return first + second + vote + products + " SKIP: }"


@gluon.constexpr_function
def scaled_in_place(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def scale_rows(acc, factors, columns: gl.constexpr):
    """acc (64, columns), a product's accumulators, times factors (64,) in their layout."""
    n: gl.constexpr = 64 if columns >= 128 else columns // 2
    return gl.inline_asm_elementwise(
        scaling(n), scaled_in_place(n), [acc, factors[:, None]], gl.float32, False, n
    )

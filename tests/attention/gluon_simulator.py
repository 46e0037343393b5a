"""Gluon kernels on a CPU: Triton's interpreter cannot run them, nor a compiler check a protocol.

``load("hopper_forward")`` is that module over kernels that have this file for their ``gluon_api``.
Partitions run as threads, one at a time, in an order drawn from a seed; copies by the copy engine
land, and products read their operands, as late as the protocol allows or as early. Found: wrong
values, deadlocks, memory read or written while a copy or product still uses it, ordinary stores
that no fence showed to the copy engine, accumulators used before their wait, boxes and pointers
outside. Not modelled: layouts (registers of a warp), banks, clusters, more than one program at a
time.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import stairs.attention
from attention import gluon_machine as machine
from attention.gluon_machine import Shared, me, memory, run_program
from attention.gluon_values import Pointer, Value, flat, raw


class Fault(AssertionError):
    """What would be undefined, wrong or stuck on the machine."""


class _Layout:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def get_default_for(cls, *args: Any, **kwargs: Any) -> _Layout:
        return cls()


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any, value: Any = None) -> Shared:
    sizes = [int(size) for size in shape]
    poison = torch.nan if dtype.is_floating_point else -1
    shared = Shared(
        torch.full(sizes, poison, dtype=dtype),
        torch.zeros(sizes, dtype=torch.int32),
        torch.zeros(sizes, dtype=torch.int32),
        torch.zeros(sizes, dtype=torch.bool),
    )
    memory.append(shared)
    if value is not None:
        shared.store(value)
    return shared


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **hints: Any) -> Value:
    shape = pointer.offset.shape
    if mask is not None:
        shape = torch.broadcast_shapes(shape, torch.as_tensor(raw(mask)).shape)
    offsets, allowed = pointer.at(mask, shape)
    found = pointer.flat[torch.where(allowed, offsets, 0)]
    if other is None:  # undefined where masked: poison
        poison = torch.nan if found.dtype.is_floating_point else 2**30 + 1
        return Value(torch.where(allowed, found, torch.full_like(found, poison)))
    return Value(torch.where(allowed, found, torch.as_tensor(raw(other)).to(found.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None, **hints: Any) -> None:
    data = torch.as_tensor(raw(value)).to(pointer.flat.dtype)
    shape = torch.broadcast_shapes(pointer.offset.shape, data.shape)
    offsets, allowed = pointer.at(mask, shape)
    pointer.flat[offsets[allowed]] = data.expand(shape)[allowed]


def _atomic_add(pointer: Pointer, value: Any, mask: Any = None, **hints: Any) -> Value:
    shape = torch.broadcast_shapes(pointer.offset.shape, torch.as_tensor(raw(value)).shape)
    offsets, allowed = pointer.at(mask, shape)
    old = pointer.flat[torch.where(allowed, offsets, 0)].clone()
    data = torch.as_tensor(raw(value)).to(pointer.flat.dtype).expand(shape)
    pointer.flat.index_add_(0, offsets[allowed], data[allowed])
    return Value(old)


def _warp_specialize(
    functions: Sequence[tuple[Callable[..., None], Sequence[Any]]],
    worker_num_warps: Sequence[int],
    worker_num_regs: Sequence[int] | None = None,
) -> None:
    assert len(functions) == len(worker_num_warps) + 1
    assert worker_num_regs is None or len(worker_num_regs) == len(worker_num_warps)
    workers = [
        me().program.start(lambda f=function, a=arguments: f(*a), int(num_warps))  # type: ignore[misc]
        for (function, arguments), num_warps in zip(functions[1:], worker_num_warps, strict=True)
    ]
    function, arguments = functions[0]
    function(*arguments)
    me().pause(lambda: all(worker.finished for worker in workers), "the other partitions")


def _of(operation: Callable[..., Tensor]) -> Callable[..., Value]:
    """``operation`` on registers; Python numbers take the tensors' dtype."""

    def apply(*args: Any) -> Value:
        given = [raw(arg) for arg in args]
        tensors = [x for x in given if isinstance(x, Tensor)]
        like = next((x for x in tensors if x.ndim or x.is_floating_point()), None)
        if not tensors:
            return Value(operation(*(torch.as_tensor(x) for x in given)))
        dtype = like.dtype if like is not None else tensors[0].dtype
        return Value(
            operation(
                *(x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=dtype) for x in given)
            )
        )

    return apply


def _reduced(operation: Callable[[Tensor, int], Tensor]) -> Callable[..., Value]:
    return lambda x, axis: Value(operation(raw(x), int(axis)))


def _sum(x: Tensor, axis: int) -> Tensor:
    return x.sum(axis, dtype=torch.int32 if x.dtype == torch.bool else x.dtype)


def _where(condition: Any, yes: Any, no: Any) -> Value:
    sides = [raw(x) for x in (yes, no)]
    kept = next((x for x in sides if isinstance(x, Tensor) and x.ndim), None)
    dtype = kept.dtype if kept is not None else None
    yes, no = (x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=dtype) for x in sides)
    return Value(torch.where(torch.as_tensor(raw(condition)), yes, no))


def _static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def _int(number: int) -> Value:
    return Value(torch.tensor(number, dtype=torch.int32))


def _language() -> Any:
    names: dict[str, Any] = {
        "constexpr": lambda x: x,
        "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
        "float64": torch.float64, "int1": torch.bool, "int32": torch.int32, "int64": torch.int64,
        "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16,
        "program_id": lambda axis: _int(me().program.place[axis]),
        "num_programs": lambda axis: _int(me().program.grid[axis]),
        "num_warps": lambda: me().num_threads // 32,
        "arange": lambda start, stop, layout=None: Value(
            torch.arange(int(start), int(stop), dtype=torch.int32)
        ),
        "full": lambda shape, value, dtype, layout=None: Value(
            torch.full([int(n) for n in shape], float(value) if dtype.is_floating_point
                       else int(value), dtype=dtype)
        ),
        "zeros": lambda shape, dtype, layout=None: Value(
            torch.zeros([int(n) for n in shape], dtype=dtype)
        ),
        "where": _where,
        "minimum": _of(torch.minimum), "maximum": _of(torch.maximum),
        "exp2": _of(torch.exp2), "exp": _of(torch.exp), "log2": _of(torch.log2),
        "log": _of(torch.log), "abs": _of(torch.abs), "sqrt": _of(torch.sqrt),
        "fma": _of(lambda a, b, c: (a.double() * b.double() + c.double()).to(a.dtype)),
        "div_rn": _of(torch.div), "fdiv": _of(torch.div),
        "cdiv": lambda a, b: (a + (b - 1)) // b,
        "max": _reduced(torch.amax), "min": _reduced(torch.amin), "sum": _reduced(_sum),
        "expand_dims": lambda x, axis: Value(raw(x).unsqueeze(int(axis))),
        "convert_layout": lambda x, layout, assert_trivial=False: Value(raw(x)),
        "set_auto_layout": lambda x, layout: Value(raw(x)),
        "reshape": lambda x, shape: x.reshape(shape),
        "permute": lambda x, order: x.permute(order),
        "cast": lambda x, dtype: Value(torch.as_tensor(raw(x)).to(dtype)),
        "to_tensor": lambda x: x if isinstance(x, Value) else Value(torch.as_tensor(x)),
        "assume": lambda x: None, "multiple_of": lambda x, n: x, "max_contiguous": lambda x, n: x,
        "load": _load, "store": _store, "atomic_add": _atomic_add,
        "allocate_shared_memory": _allocate, "warp_specialize": _warp_specialize,
        "static_range": range, "static_assert": _static_assert, "static_print": print,
        "thread_barrier": lambda: None, "barrier": lambda: None,
    }  # fmt: skip
    for layout in (
        "AutoLayout", "BlockedLayout", "SliceLayout", "DistributedLinearLayout",
        "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout",
        "PaddedSharedLayout", "SharedLinearLayout",
    ):  # fmt: skip
        names[layout] = _Layout
    return SimpleNamespace(**names)


def _range(*bounds: Any) -> Iterator[Value]:
    for place in range(*(int(bound) for bound in bounds)):
        yield _int(place)


class _Jit:
    """A kernel or a function of kernels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._simulated: Callable[..., Any] | None = None
        parameters = inspect.signature(function).parameters.values()
        self.constants = {p.name for p in parameters if "constexpr" in str(p.annotation)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._simulated is None:  # its module is whole by now
            names = {**self.function.__globals__, "range": _range}
            self._simulated = FunctionType(
                self.function.__code__, names, argdefs=self.function.__defaults__,
                closure=self.function.__closure__,
            )  # fmt: skip
            self._simulated.__kwdefaults__ = self.function.__kwdefaults__
        return self._simulated(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: _launch(self, tuple(int(n) for n in grid), args, kwargs)


_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")


def _launch(kernel: _Jit, grid: tuple[int, ...], args: Any, kwargs: dict[str, Any]) -> None:
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    bound = inspect.signature(kernel.function).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = {
        name: value if name in kernel.constants else _argument(value)
        for name, value in bound.arguments.items()
    }
    rng = random.Random(_seed[0])
    _seed[0] += 1
    places = list(itertools.product(*(range(size) for size in grid)))
    rng.shuffle(places)
    for place in places:
        run_program(
            (*place, 0, 0)[:3], (*grid, 1, 1)[:3], rng, lambda: kernel(**arguments),
            options.get("num_warps", 4),
        )  # fmt: skip


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Pointer(flat(value), torch.tensor(value.storage_offset()))
    if isinstance(value, bool):
        return Value(torch.tensor(value))
    if isinstance(value, int):
        wide = not -(2**31) <= value < 2**31
        return Value(torch.tensor(value, dtype=torch.int64 if wide else torch.int32))
    if isinstance(value, float):
        return Value(torch.tensor(value, dtype=torch.float32))
    return value


_seed = [0]


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _jit if function is None else _Jit(function)


def stand_in() -> Any:
    """What takes the place of ``stairs.attention.gluon_api``."""
    module = ModuleType("stairs.attention.gluon_api")
    module.__dict__.update(
        gl=_language(),
        gluon=SimpleNamespace(jit=_jit, constexpr_function=lambda function: function),
        mbarrier=SimpleNamespace(
            init=machine.init, expect=machine.expect, arrive=machine.arrive,
            wait=machine.wait, MBarrierLayout=_Layout, invalidate=lambda view: None,
        ),
        warpgroup_mma=machine.warpgroup_mma,
        warpgroup_mma_wait=machine.warpgroup_mma_wait,
        mma_v2=lambda a, b, acc, input_precision=None: Value(machine.multiplied(a, b, acc, True)),
        fence_async_shared=machine.fence,
        load_box=machine.load_box,
        store_box=machine.store_box,
        store_wait=machine.store_wait,
        partition_barrier=lambda: None,
        named_arrive=machine.named_arrive,
        named_sync=machine.named_sync,
        numbered_arrive=lambda n, threads: machine.named_arrive(str(int(n)), threads),
        numbered_sync=lambda n, threads: machine.named_sync(str(int(n)), threads),
        pack_pairs=lambda x, rows, columns, dtype: Value(raw(x).to(dtype).view(torch.int32)),
        scale_rows=lambda acc, factors, columns: acc * factors[:, None],
        unpack_pairs=lambda words, rows, columns, dtype: Value(raw(words).view(dtype)),
        gdc_wait=lambda: None,
        gdc_launch_dependents=lambda: None,
        TensorDescriptor=machine.TensorDescriptor,
    )  # fmt: skip
    return module


KERNELS = "stairs.attention.hopper_"  # modules whose kernels run here


@contextmanager
def _simulated() -> Iterator[None]:
    """Modules of kernels are imported anew, on top of the stand-in; the real ones come back."""
    door = "stairs.attention.gluon_api"
    package = vars(stairs.attention)

    def set_aside() -> dict[str, ModuleType]:
        found = {name: module for name, module in sys.modules.items() if name.startswith(KERNELS)}
        found |= {door: sys.modules[door]} if door in sys.modules else {}
        for name in found:
            del sys.modules[name]
            package.pop(name.rpartition(".")[2], None)
        return found

    real = set_aside()
    sys.modules[door] = stand_in()
    try:
        yield
    finally:
        set_aside()
        sys.modules.update(real)
        package.update({name.rpartition(".")[2]: module for name, module in real.items()})


def load(name: str, *, seed: int = 0) -> Any:
    """The module ``stairs.attention.<name>``, whose kernels and those that it takes from others run
    here; orders are drawn from ``seed`` on."""
    _seed[0] = seed
    with _simulated():
        return importlib.import_module(f"stairs.attention.{name}")

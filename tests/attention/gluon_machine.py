"""The machine that gluon_simulator.py runs kernels on: programs, partitions and what they share.

A partition is a thread that runs while the program lets it. Copies and products are under way
until they land or are waited for, and memory knows which of them still use it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attention.gluon_values import Fault, Value, flat, raw


class _Partition:
    """Warps that run one function: a thread that runs only while the program lets it."""

    def __init__(self, program: _Program, body: Callable[[], None], num_warps: int) -> None:
        self.program, self.body, self.num_threads = program, body, 32 * num_warps
        self.may_run = threading.Semaphore(0)
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.products: list[_Product] = []  # issued and not waited for
        self.stores: list[_Copy] = []
        self.unfenced: list[Shared] = []  # ordinary stores that the copy engine cannot see yet
        self.finished = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.may_run.acquire()
        try:
            if not self.program.aborted:
                self.body()
        except _Aborted:
            pass
        except BaseException as error:  # reported by the program, in the caller's thread
            self.error = error
        self.finished = True
        self.program.has_paused.release()

    def pause(self, condition: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let others run, until ``condition`` holds."""
        self.condition, self.waits_for = condition, waits_for
        self.program.has_paused.release()
        self.may_run.acquire()
        if self.program.aborted:
            raise _Aborted


class _Aborted(BaseException):
    pass


class _Program:
    """One program of the grid, to its end."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], rng: random.Random) -> None:
        self.place, self.grid, self.rng = place, grid, rng
        self.has_paused = threading.Semaphore(0)
        self.partitions: list[_Partition] = []
        self.copies: list[_Copy] = []  # under way
        self.named: dict[str, list[int]] = {}  # barrier: threads arrived, times opened
        self.running: _Partition
        self.aborted = False

    def start(self, body: Callable[[], None], num_warps: int) -> _Partition:
        partition = _Partition(self, body, num_warps)
        self.partitions.append(partition)
        return partition

    def run(self) -> None:
        try:
            while any(not partition.finished for partition in self.partitions):
                self._move()
        finally:
            self.aborted = True
            for partition in self.partitions:
                partition.may_run.release()
                partition.thread.join()
        if self.copies:
            raise Fault("the program ended before its copies had landed")

    def _move(self) -> None:
        ready = [
            partition
            for partition in self.partitions
            if not partition.finished and (partition.condition is None or partition.condition())
        ]
        if self.copies and (not ready or self.rng.random() < 0.3):
            self.rng.choice(self.copies).land()
            return
        if not ready:
            raise Fault("deadlock: " + "; ".join(p.waits_for for p in self.partitions))
        self.running = self.rng.choice(ready)
        self.running.may_run.release()
        self.has_paused.acquire()
        if self.running.error is not None:
            raise self.running.error


_now: list[_Program] = []


def me() -> _Partition:
    """The partition that runs."""
    return _now[0].running


def run_program(
    place: tuple[int, ...], grid: tuple[int, ...], rng: random.Random, body: Callable[[], None],
    num_warps: int,
) -> None:  # fmt: skip
    """One program of ``grid`` to its end, in an order drawn from ``rng``."""
    program = _Program(place, grid, rng)
    _now[:] = [program]
    program.start(body, num_warps)
    program.run()
    _barriers.clear()
    memory.clear()


class Shared:
    """A view of an allocation, and beside each element: copies under way to it, reads of it under
    way, and whether an ordinary store to it is not fenced yet."""

    def __init__(self, data: Tensor, landing: Tensor, reading: Tensor, dirty: Tensor) -> None:
        self.data, self.landing, self.reading, self.dirty = data, landing, reading, dirty
        self.dtype = data.dtype
        self.shape = list(data.shape)

    def _view(self, change: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(*(change(x) for x in (self.data, self.landing, self.reading, self.dirty)))

    def index(self, place: Any) -> Shared:
        if not 0 <= int(place) < self.shape[0]:
            raise Fault(f"index {int(place)} of {self.shape[0]}")
        return self._view(lambda x: x[int(place)])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        if int(start) + int(length) > self.shape[dim]:
            raise Fault(f"slice {int(start)} + {int(length)} of {self.shape[dim]}")
        return self._view(lambda x: x.narrow(dim, int(start), int(length)))

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(lambda x: x.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._view(lambda x: x.view(*[int(size) for size in shape]))

    def load(self, layout: Any = None) -> Value:
        me().pause()
        self.check_landed()
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        me().pause()
        self.check_free()
        if list(raw(value).shape) != self.shape or raw(value).dtype != self.dtype:
            raise Fault(f"{raw(value).shape} {raw(value).dtype} into {self.shape} {self.dtype}")
        self.data.copy_(raw(value))
        self.dirty.fill_(True)
        me().unfenced.append(self)

    def check_landed(self) -> None:
        if self.landing.any():
            raise Fault("shared memory is read while a copy to it is under way")

    def check_free(self) -> None:
        self.check_landed()
        if self.reading.any():
            raise Fault("shared memory is written while a product or copy may still read it")

    def check_visible(self) -> None:
        self.check_landed()
        if self.dirty.any():
            raise Fault("no fence_async_shared between a store and its use by the copy engine")


class _Product(Value):
    """An asynchronous product: its result is there after a wait, its operands are read until."""

    def __init__(self, data: Tensor, operands: list[Shared]) -> None:
        self.made, self.operands, self.is_done = data, operands, False
        for operand in operands:
            operand.reading += 1

    @property
    def data(self) -> Tensor:
        if not self.is_done:
            raise Fault("an accumulator is used before warpgroup_mma_wait")
        return self.made

    def finish(self) -> None:
        self.is_done = True
        for operand in self.operands:
            operand.reading -= 1


class _Copy:
    """A box on its way, in or out."""

    def __init__(self, program: _Program, act: Callable[[], None]) -> None:
        self.program, self.act, self.has_landed = program, act, False
        program.copies.append(self)

    def land(self) -> None:
        if not self.has_landed:
            self.has_landed = True
            self.program.copies.remove(self)
            self.act()


class TensorDescriptor:
    """A global tensor as the copy engine sees it; its rules are the host class's."""

    def __init__(
        self, base: Tensor, shape: Sequence[int], strides: Sequence[int],
        block_shape: Sequence[int], layout: Any, padding: str = "zero",
    ) -> None:  # fmt: skip
        self.base, self.shape, self.strides = base, list(shape), list(strides)
        self.block_shape, self.layout, self.dtype = list(block_shape), layout, base.dtype
        size = base.element_size()
        assert base.data_ptr() % 16 == 0, "base must be 16-byte aligned"
        assert all(stride * size % 16 == 0 for stride in strides[:-1]), "strides: 16 bytes"
        assert strides[-1] == 1 and all(dim > 0 for dim in shape) and len(shape) <= 5
        assert len(shape) == len(strides) == len(block_shape)
        assert all(size <= 256 for size in block_shape)

    @classmethod
    def from_tensor(cls, tensor: Tensor, block_shape: Sequence[int], layout: Any) -> Any:
        return cls(tensor, tensor.shape, tensor.stride(), block_shape, layout)

    def fills(self, shared: Shared) -> bool:
        """Leading dimensions of one need not be in shared memory."""
        lead = len(self.block_shape) - len(shared.shape)
        return (
            lead >= 0
            and self.block_shape == [1] * lead + list(shared.shape)
            and shared.dtype == self.dtype
        )

    def places(self, coord: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Storage, offsets of the box's elements in it, and which exist."""
        corner = [int(x) for x in coord]
        if len(corner) != len(self.shape):
            raise Fault(f"{len(corner)} coordinates for a descriptor of rank {len(self.shape)}")
        if any(not -(2**31) <= x < 2**31 for x in corner):
            raise Fault(f"coordinates {corner} leave 32 bits")
        if corner[-1] * self.base.element_size() % 16:
            raise Fault("the last coordinate must be a multiple of 16 bytes")
        offset = torch.zeros(1, dtype=torch.int64) + self.base.storage_offset()
        exists = torch.ones(1, dtype=torch.bool)
        sides = zip(corner, self.block_shape, self.shape, self.strides, strict=True)
        for start, size, limit, stride in sides:
            place = torch.arange(start, start + size)
            offset = offset[..., None] + place * stride
            exists = exists[..., None] & (place >= 0) & (place < limit)
        return flat(self.base), offset[0], exists[0]


def load_box(
    desc: TensorDescriptor, coord: Sequence[Any], barrier: Shared, dest: Shared, pred: Any = True
) -> None:
    partition = me()
    partition.pause()
    if not bool(raw(pred)):
        return
    if not desc.fills(dest):
        raise Fault(f"a box {desc.block_shape} of {desc.dtype} into {dest.shape} of {dest.dtype}")
    storage, offsets, exists = desc.places(coord)
    dest.check_free()
    dest.check_visible()
    dest.landing += 1

    def act() -> None:
        box = storage[torch.where(exists, offsets, 0)]
        dest.data.copy_(torch.where(exists, box, torch.zeros_like(box)).reshape(dest.shape))
        dest.landing -= 1
        _barrier(barrier).bytes_landed(dest.data.numel() * dest.data.element_size())

    _Copy(partition.program, act)


def store_box(desc: TensorDescriptor, coord: Sequence[Any], source: Shared) -> None:
    partition = me()
    partition.pause()
    if not desc.fills(source):
        raise Fault(f"{source.shape} of {source.dtype} into a box {desc.block_shape}")
    source.check_visible()
    storage, offsets, exists = desc.places(coord)
    source.reading += 1

    def act() -> None:
        storage[offsets[exists]] = source.data.reshape(exists.shape)[exists]
        source.reading -= 1

    partition.stores.append(_Copy(partition.program, act))


def store_wait(pending: int) -> None:
    stores = me().stores
    while len(stores) > pending:
        stores.pop(0).land()


class _Barrier:
    """mbarrier: a phase ends when its arrivals and its bytes are in."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.bytes, self.ended = count, count, 0, 0

    def arrive(self, count: int) -> None:
        if count > self.missing:
            raise Fault(f"{count} arrivals where {self.missing} of {self.count} are missing")
        self.missing -= count
        self._end_if_in()

    def bytes_landed(self, nbytes: int) -> None:
        self.bytes -= nbytes
        self._end_if_in()

    def _end_if_in(self) -> None:
        if not self.missing and not self.bytes:
            self.missing, self.ended = self.count, self.ended + 1


def _barrier(view: Shared) -> _Barrier:
    try:
        barrier: _Barrier = _barriers[view.data.data_ptr()]
    except KeyError:
        raise Fault("an mbarrier is used before mbarrier.init") from None
    return barrier


_barriers: dict[int, _Barrier] = {}
memory: list[Shared] = []  # of the running program: no barrier gets the address of another


def init(view: Shared, count: int) -> None:
    _barriers[view.data.data_ptr()] = _Barrier(int(count))


def expect(view: Shared, nbytes: Any, pred: Any = True) -> None:
    if bool(raw(pred)):
        _barrier(view).bytes += int(nbytes)
        _barrier(view).arrive(1)


def arrive(view: Shared, *, count: Any = 1, pred: Any = True) -> None:
    me().pause()
    if bool(raw(pred)):
        _barrier(view).arrive(int(count))


def wait(view: Shared, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    if bool(raw(pred)):
        barrier, parity = _barrier(view), int(phase)
        # Phases end in turn; the wait is over once the phase of that parity has.
        waits_for = f"phase {parity} of a barrier ({barrier.missing} arrivals, {barrier.bytes} B)"
        me().pause(lambda: barrier.ended % 2 != parity, waits_for)


def named_arrive(barrier: str, threads: str) -> None:
    partition = me()
    partition.pause()
    state = partition.program.named.setdefault(str(barrier), [0, 0])
    state[0] += partition.num_threads
    if state[0] > int(threads):
        raise Fault(f"{state[0]} threads at named barrier {barrier} of {threads}")
    if state[0] == int(threads):
        state[:] = [0, state[1] + 1]


def named_sync(barrier: str, threads: str) -> None:
    partition = me()
    state = partition.program.named.setdefault(str(barrier), [0, 0])
    opened = state[1]
    named_arrive(barrier, threads)
    partition.pause(lambda: state[1] > opened, f"named barrier {barrier}")


def fence(cluster: bool = False) -> None:
    for view in me().unfenced:
        view.dirty.fill_(False)
    me().unfenced.clear()


def multiplied(a: Any, b: Any, acc: Any, use_acc: Any) -> Tensor:
    left, right = (x.data if isinstance(x, Shared) else raw(x) for x in (a, b))
    if left.dtype != right.dtype or left.shape[-1] != right.shape[-2]:
        raise Fault(f"product of {left.shape} {left.dtype} and {right.shape} {right.dtype}")
    start = acc.made if isinstance(acc, _Product) else raw(acc)
    if list(start.shape) != [*left.shape[:-1], right.shape[-1]] or start.dtype != torch.float32:
        raise Fault(f"accumulator {start.shape} {start.dtype}")
    made = left.float() @ right.float()
    return made + start if bool(raw(use_acc)) else made


def warpgroup_mma(
    a: Any, b: Shared, acc: Any, *, use_acc: Any = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: bool = False,
) -> Any:  # fmt: skip
    partition = me()
    partition.pause()
    operands = [x for x in (a, b) if isinstance(x, Shared)]
    if not isinstance(b, Shared) or (a.shape[0] % 64):
        raise Fault("warpgroup_mma needs b in shared memory and rows in multiples of 64")
    for operand in operands:
        operand.check_visible()
    product = _Product(multiplied(a, b, acc, use_acc), operands)
    partition.products.append(product)
    if is_async:
        return product
    return warpgroup_mma_wait(0, deps=[product])


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    products = me().products
    me().pause()
    while len(products) > int(num_outstanding):
        products.pop(0).finish()
    return deps[0] if len(deps) == 1 else tuple(deps)

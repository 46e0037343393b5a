"""Registers and addresses of the simulated machine: torch tensors with its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Fault(AssertionError):
    """What would be undefined, wrong or stuck on the machine."""


def raw(x: Any) -> Any:
    """The torch tensor of a value, and anything else as it is."""
    return x.data if isinstance(x, Value) else x


def _truncated(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) and a.is_floating_point():
        raise TypeError("// of floats")
    return torch.div(torch.as_tensor(a), b, rounding_mode="trunc")


class Value:
    """A tensor or scalar in registers; integers wrap and divide as on the machine."""

    def __init__(self, data: Any) -> None:
        self.data: Tensor = torch.as_tensor(data)

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: list(self.data.shape))
    T = property(lambda self: Value(self.data.T))

    def to(self, dtype: torch.dtype) -> Value:
        return Value(self.data.to(dtype))

    cast = to

    def reshape(self, *shape: Any) -> Value:
        sizes = shape[0] if isinstance(shape[0], list | tuple) else shape
        return Value(self.data.reshape([int(size) for size in sizes]))

    def permute(self, *order: Any) -> Value:
        axes = order[0] if isinstance(order[0], list | tuple) else order
        return Value(self.data.permute([int(axis) for axis in axes]))

    def __getitem__(self, where: Any) -> Value:
        return Value(self.data[where])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


class Pointer:
    """Elements of one storage: an address for each element of ``offset``."""

    def __init__(self, flat: Tensor, offset: Tensor) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + torch.as_tensor(raw(more)))

    def __getitem__(self, where: Any) -> Pointer:
        return Pointer(self.flat, self.offset[where])

    def to(self, dtype: torch.dtype) -> Pointer:
        return Pointer(self.flat.view(dtype), self.offset)

    def at(self, mask: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Offsets and mask of ``shape``; an address outside the storage is a fault."""
        offsets = self.offset.expand(shape)
        allowed = torch.as_tensor(True if mask is None else raw(mask)).expand(shape)
        if (allowed & ((offsets < 0) | (offsets >= self.flat.numel()))).any():
            raise Fault(f"an address outside the tensor's storage of {self.flat.numel()} elements")
        return offsets, allowed


def _operator(name: str) -> Callable[..., Value]:
    operation = _truncated if name == "__floordiv__" else getattr(torch.Tensor, name)

    def apply(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return other + self
        return Value(operation(self.data, raw(other)))

    return apply


def _reflected(name: str) -> Callable[..., Value]:
    operation = _truncated if name == "__floordiv__" else getattr(torch.Tensor, name)

    def apply(self: Value, other: Any) -> Value:
        left = torch.as_tensor(raw(other))
        if (
            (self.data.is_floating_point() and not left.is_floating_point())
            or (left.ndim == 0 and left.dtype == torch.float32 and self.data.is_floating_point())
            or (left.ndim == 0 and left.dtype == torch.int64)
        ):
            left = left.to(self.data.dtype)
        return Value(operation(left, self.data))

    return apply


def _remainder(self: Value, other: Any) -> Value:
    return Value(torch.fmod(self.data, raw(other)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor", "lshift", "rshift"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Value, f"__r{_name}__", _reflected(f"__{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
Value.__mod__ = _remainder  # type: ignore[attr-defined]
Value.__rmod__ = lambda self, other: Value(other) % self  # type: ignore[attr-defined]
Value.__neg__ = lambda self: Value(-self.data)  # type: ignore[attr-defined]
Value.__invert__ = lambda self: Value(~self.data)  # type: ignore[attr-defined]
Value.__hash__ = None  # type: ignore[assignment]


def flat(tensor: Tensor) -> Tensor:
    """All of the storage that ``tensor`` is a view of, (N,)."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((numel,), (1,), 0)

"""From a checkpoint's tensors to a model's layers: dtype, device, rows put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stairs.accounting.hardware import has_wide_vectors
from stairs.checkpoints.residence import Form, Residence
from stairs.checkpoints.tensors import PackedRows, TensorSource
from stairs.errors import ConfigError
from stairs.models.layers import DenseLinear, Embedding, Linear
from stairs.models.packed import PackedEmbedding, PackedLinear

__all__ = ["Weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """``source`` has exactly the tensors that ``checkpoints.layout`` lists, in those shapes.

    ``checkpoints.residence`` decides which matrices stay in the file, mapped; the rest is loaded
    dense. ``packed``: all stay that the file has in fewer bits than float32.
    ``batch_invariant``: dense ones go through that kernel too, whose sums no other row changes.
    """

    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    packed: bool = False
    batch_invariant: bool = False

    def tensor(self, name: str) -> Tensor:
        return self.source.load(name, self.dtype).to(self.device)

    def linear(self, *names: str, bias: bool, transposed: bool = False) -> Linear:
        """The rows of several linear layers under each other: one product instead of several.
        ``transposed``: the checkpoint names them (in, out)."""
        biases = _stacked([self.tensor(f"{name}.bias") for name in names]) if bias else None
        rows = [self.source.packed(f"{name}.weight") for name in names]
        whole = tuple(part for part in rows if part is not None)
        form = self._form(whole, is_table=False) if len(whole) == len(names) else "dense"
        dense = None if form == "packed" else self._stacked_rows(names, transposed)
        if form != "dense":
            return self._in_place(whole, biases, dense)
        assert dense is not None
        return self._dense(dense, biases)

    def _stacked_rows(self, names: tuple[str, ...], transposed: bool) -> Tensor:
        parts = [self.tensor(f"{name}.weight") for name in names]
        return _stacked([part.t().contiguous() for part in parts] if transposed else parts)

    def embedding(self, name: str) -> Callable[[Tensor], Tensor]:
        """(T,) ids -> (T, C)."""
        rows = self.source.packed(f"{name}.weight")
        if rows is not None and self._form((rows,), is_table=True) == "packed":
            return PackedEmbedding(rows, self.dtype)
        return Embedding(self.tensor(f"{name}.weight"))

    def head(self, embedding: Callable[[Tensor], Tensor], *, tied: bool) -> Linear:
        """Logits: the head's own rows, or those of the embedding."""
        if not tied:
            return self.linear("lm_head", bias=False)
        if isinstance(embedding, PackedEmbedding):
            return self._in_place((embedding.rows,), None, None)
        assert isinstance(embedding, Embedding)
        return self._dense(embedding.weight, None)

    def _dense(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if not self.batch_invariant:
            return DenseLinear(weight, bias)
        rows = PackedRows(weight.view(torch.uint8), "F32", (weight.shape[0], weight.shape[1]))
        if not self._in_registers((rows,)):
            raise _not_invariant(f"F32 of shape {rows.shape}")
        return PackedLinear((rows,), bias, in_registers=True)

    def _form(self, parts: tuple[PackedRows, ...], *, is_table: bool) -> Form:
        on_cpu = self.device.type == "cpu"
        residence = Residence(
            device=self.device.type,
            dtype=str(self.dtype).removeprefix("torch."),
            packed=self.packed,
            batch_invariant=self.batch_invariant,
            wide_vectors=on_cpu and has_wide_vectors(),
        )
        return residence.form([(part.type, part.shape) for part in parts], is_table=is_table)

    def _in_place(
        self, parts: tuple[PackedRows, ...], bias: Tensor | None, dense: Tensor | None
    ) -> PackedLinear:
        """``dense``: a copy, where steps of many rows are quicker with one."""
        in_registers = self._in_registers(parts)
        if self.batch_invariant and not in_registers:
            raise _not_invariant(", ".join(part.type for part in parts))
        return PackedLinear(parts, bias, in_registers=in_registers, dense=dense)

    def _in_registers(self, parts: tuple[PackedRows, ...]) -> bool:
        if self.device.type != "cpu" or self.dtype != torch.float32:
            return False
        from stairs.models.quantised_cpu import supports  # Numba, only where it is used

        return all(supports(part) for part in parts)


def _not_invariant(what: str) -> ConfigError:
    return ConfigError(f"batch_invariant: no kernel for {what}", param="batch_invariant")


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)

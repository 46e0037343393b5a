"""Safetensors, one file or several with an index, under the names of ``layout``.

The package reads and validates the format. What it takes on trust is checked before: the size of
the header, which files an index may name, that each file holds what the index says. Tensors in
the dtype asked for are views of the mapped file, so a model in its own dtype costs no copy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stairs.checkpoints.layout import check_names, our_name, tensor_specs
from stairs.checkpoints.tensors import SAMPLE_BYTES, PackedRows
from stairs.config import ModelConfig
from stairs.errors import CheckpointError
from stairs.text.json_file import parse_object, read_object

__all__ = ["SafetensorsFolder"]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER_BYTES = 4 * 2**20  # the format allows 100 MB; 40,000 tensors need less than this
_MAX_HEADER_VALUES = 300_000
_MAX_INDEX_BYTES = 10 * 2**20
_MAX_INDEX_VALUES = 150_000
_DENSE = frozenset({"F64", "F32", "F16", "BF16"})
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


class SafetensorsFolder:
    """A ``TensorSource``. Names, shapes and types are checked when it is made."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._specs = tensor_specs(config)
        self._where: dict[str, tuple[Any, str]] = {}  # name -> open file, its name there
        for path in _files(folder):
            file = _open(path)
            for stored in file.keys():  # noqa: SIM118 - a handle, not a mapping
                name = our_name(stored, config)
                if name in self._where:
                    raise CheckpointError(f"{path.name}: tensor {stored!r} is there twice")
                if name is not None:
                    self._where[name] = file, stored
        _check_index(folder, self._where, config)
        check_names(self._where, self._specs, folder.name)
        for name, spec in self._specs.items():
            view = self._view(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if shape != spec.shape:
                raise CheckpointError(
                    f"{folder.name}: tensor {name!r} is {shape}, the config says {spec.shape}"
                )
            if dtype not in _DENSE:
                raise CheckpointError(
                    f"{folder.name}: tensor {name!r} has dtype {dtype}; "
                    "use a checkpoint in bfloat16, float16 or float32, or a GGUF"
                )

    def names(self) -> frozenset[str]:
        return frozenset(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].shape

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        file, stored = self._where[name]
        tensor: torch.Tensor = file.get_tensor(stored)
        loaded = tensor.to(dtype)
        # A header of odd length leaves its tensors between addresses that kernels may load from.
        return loaded.clone() if loaded.data_ptr() % loaded.element_size() else loaded

    def packed(self, name: str) -> PackedRows | None:
        kind, spec = self._view(name).get_dtype(), self._specs[name]
        if kind not in ("F16", "BF16") or len(spec.shape) != 2 or spec.transposed:
            return None
        file, stored = self._where[name]
        rows: torch.Tensor = file.get_tensor(stored).view(torch.uint8)
        return PackedRows(rows, kind, (spec.shape[0], spec.shape[1]))

    def sample(self, name: str) -> bytes:
        first: torch.Tensor = self._view(name)[:1]
        return bytes(first.contiguous().flatten().view(torch.uint8)[:SAMPLE_BYTES].numpy())

    def _view(self, name: str) -> Any:
        file, stored = self._where[name]
        return file.get_slice(stored)


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{_INDEX} names {missing[0]}, which is not in {folder.name}")
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickled = sorted(p.name for kind in ("bin", "pt", "pth") for p in folder.glob(f"*.{kind}"))
    if pickled:
        raise CheckpointError(
            f"{folder.name} holds its weights in {pickled[0]}, a pickle, which can run code when "
            "it is loaded; convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
        )
    raise CheckpointError(f"{folder.name} has neither {_SINGLE} nor {_INDEX}")


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_object(folder / _INDEX, max_bytes=_MAX_INDEX_BYTES, max_values=_MAX_INDEX_VALUES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{_INDEX} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CheckpointError(f"{_INDEX}: {file!r:.80} for {name!r:.80} is no file name")
    return weight_map


def _check_index(folder: Path, found: dict[str, tuple[Any, str]], config: ModelConfig) -> None:
    """Each tensor of the index must be in a file; that it is the named one changes nothing."""
    if (folder / _INDEX).is_file():
        for stored in _weight_map(folder):
            name = our_name(stored, config)
            if name is not None and name not in found:
                raise CheckpointError(f"{_INDEX} lists tensor {stored!r:.80}, which no file holds")


def _open(path: Path) -> Any:
    """A handle on a file whose header is of a sane size and names no tensor twice."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path.name} claims a header of {length} bytes; {_MAX_HEADER_BYTES} is the most"
            )
        parse_object(
            file.read(length), f"{path.name}'s header", max_bytes=_MAX_HEADER_BYTES,
            max_values=_MAX_HEADER_VALUES,
        )  # fmt: skip
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{path.name} cannot be read: {reason:.200}") from None

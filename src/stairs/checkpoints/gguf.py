"""The GGUF container: metadata and a tensor table, read once, every claim checked first.

A header is hostile until shown otherwise: counts and lengths are held against the bytes that are
there before anything is built from them, and a fault names the key or tensor. The data stays in
the mapped file. A walk takes 25-45 ms on the default model (49k tokens, 49k merges) where
``gguf.GGUFReader`` takes 2-4 s, so nothing is cached: there is no second copy to go stale. The
``gguf`` package is the source of type sizes, and of the dequantisation elsewhere. No torch.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from stairs.errors import CheckpointError, ModelNotFoundError

__all__ = ["GGUF", "GGUFTensor", "open_gguf"]

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, Any] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_NAME = 65_535  # the format's own limit on keys; tensor names are shorter
_MAX_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table. ``shape`` is (rows, ..., columns), the reverse of the file's."""

    name: str
    type: str  # the gguf package's name: F32, Q4_1, ...
    shape: tuple[int, ...]
    data: memoryview  # its bytes in the mapped file


@dataclass(frozen=True, slots=True)
class GGUF:
    """A model's file or files: the first one's metadata, the tensors of all.

    Arrays of numbers in ``metadata`` are memoryviews on the file, arrays of strings are lists.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def open_gguf(path: Path) -> GGUF:
    """Read and check the header of ``path`` and of the shards it belongs to."""
    first = _Header(path)
    metadata, tensors = first.read()
    count = _split_number(first, metadata, "split.count", default=1)
    if count > 1:
        shard = _SHARD.fullmatch(path.name)
        number = _split_number(first, metadata, "split.no", default=0)
        if shard is None or int(shard[3]) != count or int(shard[2]) != number + 1:
            raise first.fault(f"is part {number + 1} of {count}, which its name does not say")
        if number:
            return open_gguf(path.with_name(f"{shard[1]}-00001-of-{shard[3]}.gguf"))
        for part in range(2, count + 1):
            other = _Header(path.with_name(f"{shard[1]}-{part:05d}-of-{shard[3]}.gguf"))
            its_metadata, its_tensors = other.read()
            if _split_number(other, its_metadata, "split.no", default=-1) != part - 1:
                raise other.fault(f"split.no is not {part - 1}")
            if doubled := sorted(tensors.keys() & its_tensors.keys()):
                raise other.fault(f"tensor {doubled[0]!r} is also in another part")
            tensors |= its_tensors
    claimed = metadata.get("split.tensors.count", len(tensors))
    if claimed != len(tensors):
        raise first.fault(f"split.tensors.count is {claimed}, its parts hold {len(tensors)}")
    return GGUF(path, metadata, tensors)


def _split_number(header: _Header, metadata: Mapping[str, Any], key: str, *, default: int) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int) or not -1 <= value <= _MAX_SHARDS:
        raise header.fault(f"{key} is {value!r:.80}, which is no part number")
    return value


class _Header:
    """A cursor over one mapped file; every read is held against the file's end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:  # copy on write: a stray write can never reach the file
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (FileNotFoundError, IsADirectoryError):
            raise ModelNotFoundError(f"no file {path}") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
        self._end = len(self._map)
        self._at = 0

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path.name}: {what}")

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._map[:4] != b"GGUF":
            raise self.fault("is not a GGUF file")
        self._at = 4
        version = self._number("I", "the version")
        if version not in (2, 3):
            raise self.fault(
                f"GGUF version {version} is not 2 or 3 (perhaps big-endian); convert it again"
            )
        num_tensors = self._number("Q", "the tensor count")
        num_keys = self._number("Q", "the key count")
        # A key takes at least 13 bytes, a tensor's row at least 24.
        self._must_fit(num_keys * 13, f"{num_keys} metadata keys")
        self._must_fit(num_tensors * 24, f"{num_tensors} tensors")
        metadata = self._metadata(num_keys)
        return metadata, self._tensor_table(num_tensors, metadata.get("general.alignment", 32))

    def _metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self._name(f"metadata key {index}")
            if key in metadata:
                raise self.fault(f"metadata key {key!r} is there twice")
            metadata[key] = self._value(self._number("I", key), key)
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], key)
        if kind != _ARRAY:
            raise self.fault(f"{key}: value type {kind} is unknown")
        kind, count = self._number("I", key), self._number("Q", key)
        if kind == _STRING:
            return self._strings(count, key)
        if kind not in _SCALARS:
            raise self.fault(f"{key}: arrays of value type {kind} are not supported")
        size = count * struct.calcsize(_SCALARS[kind])
        self._must_fit(size, f"{key}: {count} values")
        start, self._at = self._at, self._at + size
        return memoryview(self._map)[start : self._at].cast(_SCALARS[kind])

    def _strings(self, count: int, key: str) -> list[str]:
        self._must_fit(count * 8, f"{key}: {count} strings")
        length_at, data, at, end = struct.Struct("<Q").unpack_from, self._map, self._at, self._end
        strings = []
        try:  # the loop over the vocabulary: kept bare, it is most of the reading time
            for _ in range(count):
                stop = at + 8 + length_at(data, at)[0]
                if stop > end:
                    raise self.fault(f"{key}: a string runs past the end of the file")
                strings.append(data[at + 8 : stop].decode())
                at = stop
        except struct.error:
            raise self.fault(f"{key}: the file ends inside it") from None
        except UnicodeDecodeError:
            raise self.fault(f"{key}: string {len(strings)} is not UTF-8") from None
        self._at = at
        return strings

    def _tensor_table(self, num_tensors: int, alignment: Any) -> dict[str, GGUFTensor]:
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= 2**20
            or alignment & (alignment - 1)
        ):
            raise self.fault(f"general.alignment is {alignment!r:.80}, not a power of two")
        rows = [self._tensor_row(f"tensor {index}", alignment) for index in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        view = memoryview(self._map)
        for name, kind, shape, offset, size in rows:
            if name in tensors:
                raise self.fault(f"tensor {name!r} is there twice")
            if start + offset + size > self._end:
                raise self.fault(
                    f"tensor {name!r} ends at byte {start + offset + size}, "
                    f"the file at {self._end}: it is truncated or damaged"
                )
            tensors[name] = GGUFTensor(
                name, kind.name, shape, view[start + offset : start + offset + size]
            )
        return tensors

    def _tensor_row(
        self, where: str, alignment: int
    ) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int, int]:
        name = self._name(where)
        num_dims = self._number("I", name)
        if num_dims > _MAX_DIMS:
            raise self.fault(f"tensor {name!r} has {num_dims} dimensions; {_MAX_DIMS} is the most")
        shape = tuple(self._number("Q", name) for _ in range(num_dims))[::-1]
        type_id, offset = self._number("I", name), self._number("Q", name)
        try:
            kind = GGMLQuantizationType(type_id)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.fault(f"tensor {name!r} has the unknown type {type_id}") from None
        if offset % alignment:
            raise self.fault(f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
        count = 1
        for size in shape:
            count *= size
        if not count or (shape and shape[-1] % block):
            raise self.fault(
                f"tensor {name!r} of shape {shape} is empty or no multiple of {kind.name}'s {block}"
            )
        return name, kind, shape, offset, count // block * block_bytes

    def _number(self, code: str, what: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self._map, self._at)
        except struct.error:
            raise self.fault(f"{what}: the file ends inside it") from None
        self._at += struct.calcsize(code)
        return value

    def _name(self, what: str) -> str:
        name = self._string(what, limit=_MAX_NAME)
        if not name.isprintable() or not name:
            raise self.fault(f"{what}: the name {name!r:.80} is not printable")
        return name

    def _string(self, what: str, *, limit: int | None = None) -> str:
        length = self._number("Q", what)
        if limit is not None and length > limit:
            raise self.fault(f"{what}: a name of {length} bytes; {limit} is the most")
        self._must_fit(length, f"{what}: a string of {length} bytes")
        start, self._at = self._at, self._at + length
        try:
            return self._map[start : self._at].decode()
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8") from None

    def _must_fit(self, size: int, what: str) -> None:
        if size > self._end - self._at:
            raise self.fault(f"{what}: the file has only {self._end - self._at} bytes left")

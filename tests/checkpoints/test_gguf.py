"""The GGUF header is read as the gguf package reads it, and nothing it claims is believed."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from checkpoints.model_files import (
    CONFIG,
    METADATA,
    as_llama_cpp,
    header,
    key_value,
    seeded_tensors,
    string,
    tensor_row,
    write_gguf,
    write_tiny_gguf,
)
from stairs.checkpoints.gguf import open_gguf
from stairs.errors import CheckpointError, ModelNotFoundError

U32, STRING, ARRAY = 4, 8, 9
F32, Q4_1 = 0, 3


def test_reads_what_the_gguf_package_reads(tmp_path: Path):
    metadata = METADATA | {
        "tokenizer.ggml.tokens": ["a", "é", "▁the", ""],
        "tokenizer.ggml.scores": [0.0, -1.5, 2.25, 3.0],
        "tokenizer.ggml.token_type": [1, 3, 6, 1],
        "tokenizer.ggml.add_bos_token": True,
        "general.alignment": 64,
    }
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", metadata=metadata, types={"blk.0.ffn_up.weight": "Q8_0"}
    )
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert fields.keys() == ours.metadata.keys()
    for key, value in fields.items():
        mine = ours.metadata[key]
        assert (mine.tolist() if isinstance(mine, memoryview) else mine) == value
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.type == tensor.tensor_type.name
        assert bytes(mine.data) == tensor.data.tobytes()


HOSTILE = {
    "no magic": (b"GGML" + bytes(60), "is not a GGUF"),
    "empty": (b"", "cannot be read"),
    "version": (header(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^40 tensors": (header(num_tensors=2**40), "1099511627776 tensors"),
    "2^63 keys": (header(num_keys=2**63), "9223372036854775808 metadata keys"),
    "ends in the counts": (b"GGUF" + struct.pack("<IQ", 3, 0), "the key count"),
    "ends in a value": (
        header(string("some.long.key"), struct.pack("<I", U32), num_keys=1)[: 24 + 8 + 13 + 4],
        "some.long.key: the file ends",
    ),
    "endless key": (header(struct.pack("<Q", 2**62), bytes(64), num_keys=1), "metadata key 0"),
    "endless string": (
        header(key_value("a.b", STRING, struct.pack("<Q", 2**50)), bytes(64), num_keys=1),
        "a.b: a string of 1125899906842624 bytes",
    ),
    "endless array": (
        header(key_value("a.b", ARRAY, struct.pack("<IQ", U32, 2**62)), num_keys=1),
        "a.b: 4611686018427387904 values",
    ),
    "endless strings": (
        header(key_value("a.b", ARRAY, struct.pack("<IQ", STRING, 2**40)), num_keys=1),
        "a.b: 1099511627776 strings",
    ),
    "endless string in an array": (
        header(key_value("a.b", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63)), num_keys=1),
        "a.b: a string runs past",
    ),
    "array of arrays": (
        header(key_value("a.b", ARRAY, struct.pack("<IQ", ARRAY, 1)), num_keys=1),
        "a.b: arrays of value type 9",
    ),
    "unknown value type": (
        header(key_value("a.b", 77, bytes(8)), num_keys=1),
        "a.b: value type 77",
    ),
    "key twice": (
        header(*[key_value("a.b", U32, bytes(4))] * 2, num_keys=2),
        "key 'a.b' is there twice",
    ),
    "key not UTF-8": (
        header(string(b"\xff\xfe"), struct.pack("<II", U32, 0), num_keys=1),
        "metadata key 0 is not UTF-8",
    ),
    "value not UTF-8": (header(key_value("a.b", STRING, string(b"\xff")), num_keys=1), "a.b"),
    "unprintable name": (
        header(tensor_row("\x1b[2J", (4,), F32, 0), num_tensors=1, data=32),
        "not printable",
    ),
    "alignment of zero": (
        header(
            key_value("general.alignment", U32, bytes(4)),
            tensor_row("w", (4,), F32, 0), num_keys=1, num_tensors=1, data=64,
        ),
        "general.alignment is 0",
    ),
    "alignment of 48": (
        header(key_value("general.alignment", U32, struct.pack("<I", 48)), num_keys=1),
        "general.alignment is 48",
    ),
    "too many dimensions": (
        header(tensor_row("w", (1,) * 5, F32, 0), num_tensors=1, data=64),
        "'w' has 5 dimensions",
    ),
    "2^32 - 1 dimensions": (
        header(tensor_row("w", (), F32, 0, num_dims=2**32 - 1), num_tensors=1),
        "'w' has 4294967295 dimensions",
    ),
    "no elements": (header(tensor_row("w", (0, 32), F32, 0), num_tensors=1), "'w' of shape"),
    "a product past 2^64": (
        header(tensor_row("w", (2**33, 2**33), F32, 0), num_tensors=1, data=64),
        "'w' ends at byte 29514790517935",
    ),
    "unknown type": (
        header(tensor_row("w", (32,), 99, 0), num_tensors=1),
        "'w' has the unknown type 99",
    ),
    "removed type": (
        header(tensor_row("w", (32,), 4, 0), num_tensors=1),
        "'w' has the unknown type 4",
    ),
    "part of a block": (
        header(tensor_row("w", (33,), Q4_1, 0), num_tensors=1, data=64),
        "'w' of shape .* Q4_1",
    ),
    "offset past the end": (
        header(tensor_row("w", (4,), F32, 2**40), num_tensors=1, data=64),
        "'w' ends at byte",
    ),
    "offset not aligned": (
        header(tensor_row("w", (4,), F32, 8), num_tensors=1, data=64),
        "'w' starts at 8",
    ),
    "tensor twice": (
        header(*[tensor_row("w", (4,), F32, 0)] * 2, num_tensors=2, data=64),
        "'w' is there twice",
    ),
    "one byte short": (
        header(tensor_row("w", (8,), F32, 0), num_tensors=1, data=32)[:-1],
        "'w' ends at byte .* truncated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused_before_anything_is_built(tmp_path: Path, kind: str):
    data, message = HOSTILE[kind]
    (tmp_path / "bad.gguf").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_gguf(tmp_path / "bad.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_every_truncation_is_refused(tmp_path: Path):
    whole = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    start = len(whole) - sum(t.numel() * 4 for t in seeded_tensors().values())
    for length in [*range(0, start, 7), *range(start, len(whole), 9973), len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_gguf(tmp_path / "cut.gguf")


def test_no_file_and_a_folder(tmp_path: Path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError):
            open_gguf(path)


def test_a_write_to_the_mapping_never_reaches_the_file(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    before = path.read_bytes()
    tensor = open_gguf(path).tensors["output_norm.weight"]
    torch.frombuffer(tensor.data, dtype=torch.float32).fill_(7)
    assert path.read_bytes() == before


def split_gguf(folder: Path, num_parts: int) -> list[Path]:
    arrays = list(as_llama_cpp(seeded_tensors(), CONFIG, gguf.MODEL_ARCH.LLAMA).items())
    paths = []
    for part in range(num_parts):
        split = {"split.no": part, "split.count": num_parts, "split.tensors.count": len(arrays)}
        path = folder / f"big-{part + 1:05d}-of-{num_parts:05d}.gguf"
        write_gguf(
            path, dict(arrays[part::num_parts]), metadata=split | (METADATA if not part else {})
        )
        paths.append(path)
    return paths


def test_a_split_file_opens_from_any_part(tmp_path: Path):
    whole = open_gguf(write_tiny_gguf(tmp_path / "whole.gguf"))
    for path in split_gguf(tmp_path, 3):
        found = open_gguf(path)
        assert found.metadata["llama.block_count"] == 2
        assert {n: bytes(t.data) for n, t in found.tensors.items()} == {
            n: bytes(t.data) for n, t in whole.tensors.items()
        }


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path):
    parts = split_gguf(tmp_path, 3)
    parts[1].rename(tmp_path / "lone.gguf")
    with pytest.raises(CheckpointError, match="part 2 of 3"):
        open_gguf(tmp_path / "lone.gguf")
    with pytest.raises(ModelNotFoundError, match="big-00002-of-00003"):
        open_gguf(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"split\.no is not 1"):
        open_gguf(parts[2])
    for claimed, message in ((3000, "split.count is 3000"), ("x", "split.count is 'x'")):
        path = write_gguf(
            tmp_path / "odd.gguf",
            {"w": np.zeros(32, np.float32)},
            metadata={"split.count": claimed},
        )
        with pytest.raises(CheckpointError, match=message):
            open_gguf(path)

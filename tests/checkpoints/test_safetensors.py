"""Safetensors folders: every tensor by its one name, every lie refused with the file's name."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints.model_files import CONFIG, CONFIG_JSON, seeded_tensors, write_folder, write_index
from stairs.checkpoints.configs import read_config
from stairs.checkpoints.safetensors import SafetensorsFolder
from stairs.errors import CheckpointError


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("num_files", [1, 3])
def test_reads_what_was_saved(tmp_path: Path, num_files: int):
    assert read_config(CONFIG_JSON) == CONFIG
    written = seeded_tensors()
    source = SafetensorsFolder(write_folder(tmp_path, written, num_files=num_files), CONFIG)
    assert source.names() == written.keys()
    for name, tensor in written.items():
        assert source.shape(name) == tuple(tensor.shape) and source.packed(name) is None
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            loaded = source.load(name, dtype)
            assert torch.equal(loaded, tensor.to(dtype)) and loaded.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_saved_dtypes(tmp_path: Path, dtype: torch.dtype):
    written = {name: tensor.to(dtype) for name, tensor in seeded_tensors().items()}
    source = SafetensorsFolder(write_folder(tmp_path, written), CONFIG)
    for name, tensor in written.items():
        assert torch.equal(source.load(name, torch.float32), tensor.float())


def test_a_write_to_a_loaded_tensor_never_reaches_the_file(tmp_path: Path):
    source = SafetensorsFolder(write_folder(tmp_path, seeded_tensors()), CONFIG)
    before = (tmp_path / "model.safetensors").read_bytes()
    source.load("model.norm.weight", torch.float32).fill_(7)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_names_of_other_programs(tmp_path: Path):
    written = seeded_tensors()
    bare = {name.removeprefix("model."): tensor for name, tensor in written.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    source = SafetensorsFolder(write_folder(tmp_path, bare), CONFIG)
    assert source.names() == written.keys()
    assert torch.equal(source.load("model.norm.weight", torch.float32), bare["norm.weight"])


def test_a_tied_head_that_was_saved_all_the_same(tmp_path: Path):
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    source = SafetensorsFolder(write_folder(tmp_path, seeded_tensors()), tied)
    assert "lm_head.weight" not in source.names()


def test_gpt2_with_and_without_its_prefix_and_with_its_masks(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        bos_token_id=0, eos_token_id=1,
    ))  # fmt: skip
    model.save_pretrained(tmp_path)
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    saved = SafetensorsFolder(tmp_path, config)
    state = {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}
    del state["lm_head.weight"]
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8) for i in range(2)}
    older = tmp_path / "older"
    older.mkdir()
    save_file(state | masks, older / "model.safetensors")
    for source in (saved, SafetensorsFolder(older, config)):
        assert source.names() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(source.load(name, torch.float32), tensor)


def test_a_header_of_odd_length(tmp_path: Path):
    write_folder(tmp_path, seeded_tensors())
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    for extra in (1, 2, 3):
        header = data[8 : 8 + length] + b" " * extra
        path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
        loaded = SafetensorsFolder(tmp_path, CONFIG).load("model.norm.weight", torch.float32)
        assert torch.equal(loaded, seeded_tensors()["model.norm.weight"])
        assert loaded.data_ptr() % 4 == 0


def with_header(header: bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


ONE = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
BOMB = b'{"a":[' + b"[]," * 400_000 + b"[]]}"
CUBE = ONE.replace(b"[1]", b"[4294967296,4294967296,4294967296]")
HOSTILE = {
    "empty": (b"", "model.safetensors"),
    "header of 2^62 bytes": (with_header(b"{}", length=2**62), "claims a header of 4611686018427"),
    "header past the end": (with_header(b"{}", length=4000), "model.safetensors"),
    "no JSON": (with_header(b"hello"), "header is not JSON"),
    "a list": (with_header(b"[]"), "header must hold an object"),
    "a bomb of lists": (with_header(BOMB), "more than 300000 values"),
    "nested": (with_header(b'{"a":' + b"[" * 50_000), "header is not JSON"),
    "unknown dtype": (with_header(ONE.replace(b"F32", b"Q9"), bytes(4)), "unknown variant `Q9`"),
    "shape times 2^96": (with_header(CUBE, bytes(4)), "cannot be read"),
    "negative shape": (with_header(ONE.replace(b"[1]", b"[-1]"), bytes(4)), "cannot be read"),
    "offsets past the end": (with_header(ONE, bytes(3)), "cannot be read"),
    "a hole": (with_header(ONE.replace(b"[0,4]", b"[4,8]"), bytes(8)), "offset for tensor `w`"),
    "trailing bytes": (with_header(ONE, bytes(5)), "cannot be read"),
    "an unknown tensor": (with_header(ONE, bytes(4)), "lacks tensor 'lm_head.weight'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, kind: str):
    data, message = HOSTILE[kind]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFolder(tmp_path, CONFIG)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(("weight_map", "message"), [
    (None, "has no weight_map"),
    ([], "has no weight_map"),
    ({"a": 7}, "7 for 'a' is no file name"),
    ({"a": "../secret.safetensors"}, "no file name"),
    ({"a": "/etc/passwd"}, "no file name"),
    ({"a": "model-00009-of-00009.safetensors"}, "00009.safetensors, which is not in"),
])  # fmt: skip
def test_a_bad_index(tmp_path: Path, weight_map: object, message: str):
    write_folder(tmp_path, seeded_tensors(), num_files=2)
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path, CONFIG)


def test_an_index_that_disagrees_with_its_files(tmp_path: Path):
    write_folder(tmp_path, seeded_tensors(), num_files=2)
    weight_map = read_index(tmp_path)
    write_index(tmp_path, weight_map | {"model.extra.weight": weight_map["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"lists tensor 'model.extra.weight', which no file"):
        SafetensorsFolder(tmp_path, CONFIG)
    one, two = sorted(set(weight_map.values()))
    (tmp_path / two).write_bytes((tmp_path / one).read_bytes())
    with pytest.raises(CheckpointError, match="is there twice"):
        SafetensorsFolder(tmp_path, CONFIG)


def test_missing_unknown_misshapen_and_wrong_dtype(tmp_path: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, message in (
        ({name: None}, f"lacks tensor '{name}'"),
        ({"model.layers.1.mlp.router.weight": torch.ones(3)}, "unknown tensor .*router"),
        ({name: torch.ones(95, 64)}, rf"'{name}' is \(95, 64\), the config says \(96, 64\)"),
        ({name: torch.ones(96, 64, dtype=torch.int8)}, "has dtype I8"),
    ):
        tensors = {k: v for k, v in (seeded_tensors() | changed).items() if v is not None}
        with pytest.raises(CheckpointError, match=message):
            SafetensorsFolder(write_folder(tmp_path, tensors), CONFIG)


def test_pickles_are_refused_with_what_to_do(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        SafetensorsFolder(tmp_path, CONFIG)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        SafetensorsFolder(tmp_path, CONFIG)

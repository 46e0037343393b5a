"""One door to every kind of checkpoint; what is broken is one line, whatever part is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoints.model_files import (
    CONFIG,
    CONFIG_JSON,
    METADATA,
    seeded_tensors,
    write_folder,
    write_tiny_gguf,
)
from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.errors import CheckpointError, ConfigError, ModelNotFoundError


def test_a_gguf(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.name, checkpoint.path) == (str(path), path)
    assert checkpoint.config == CONFIG and checkpoint.generation.eos_token_ids == (2,)
    assert checkpoint.tensors is checkpoint.tensors
    loaded = checkpoint.tensors.load("lm_head.weight", torch.float32)
    assert torch.equal(loaded, seeded_tensors()["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens"):
        checkpoint.tokenizer()


def test_a_folder_and_all_that_ends_an_answer(tmp_path: Path):
    write_folder(tmp_path, seeded_tensors())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.5, "eos_token_id": [7, 2]})
    )
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.generation.temperature == 0.5
    assert checkpoint.config.eos_token_ids == checkpoint.generation.eos_token_ids == (7, 2)
    assert checkpoint.tensors.names() == seeded_tensors().keys()


def test_dummy_weights_need_a_config_only_and_repeat(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON))
    tensors = open_checkpoint(str(tmp_path), load_format="dummy").tensors
    assert tensors.names() == seeded_tensors().keys()
    again = open_checkpoint(str(tmp_path), load_format="dummy").tensors
    other = open_checkpoint(str(tmp_path), load_format="dummy", seed=1).tensors
    for name in sorted(tensors.names(), reverse=True):
        loaded = tensors.load(name, torch.float32)
        assert tuple(loaded.shape) == tensors.shape(name) == tuple(seeded_tensors()[name].shape)
        assert torch.equal(loaded, again.load(name, torch.float32))
        assert not torch.equal(loaded, other.load(name, torch.float32))


def test_dummy_activations_keep_their_size(tmp_path: Path):
    raw = CONFIG_JSON | {"num_hidden_layers": 24, "hidden_size": 256, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = open_checkpoint(str(tmp_path), load_format="dummy").tensors
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    for layer in range(24):
        name = f"model.layers.{layer}.mlp."
        up = (
            torch.nn.functional.rms_norm(x, (256,))
            @ tensors.load(name + "up_proj.weight", torch.float32).T
        )
        x = x + up @ tensors.load(name + "down_proj.weight", torch.float32).T
    assert 1 < x.std() < 20


def test_a_load_format_that_does_not_fit(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    assert open_checkpoint(str(path), load_format="gguf").config == CONFIG
    with pytest.raises(ConfigError, match=r"load_format is safetensors, but tiny\.gguf"):
        open_checkpoint(str(path), load_format="safetensors")
    with pytest.raises(ConfigError, match="load_format 'pt' is unknown; one of auto"):
        open_checkpoint(str(path), load_format="pt")


BAD_INPUT = {
    "truncated GGUF": lambda d: truncate(write_tiny_gguf(d / "m.gguf"), 5_000),
    "header of 2^40 tensors": lambda d: patch(write_tiny_gguf(d / "m.gguf"), 8, 2**40),
    "unknown quantisation": lambda d: write_tiny_gguf(d / "m.gguf", types={}) and unknown_type(d),
    "GGUF without a key": lambda d: write_tiny_gguf(
        d / "m.gguf", metadata={k: v for k, v in METADATA.items() if "block_count" not in k}
    ),
    "config without a key": lambda d: (d / "config.json").write_text(
        json.dumps({k: v for k, v in CONFIG_JSON.items() if k != "hidden_size"})
    ),
    "config that is no JSON": lambda d: (d / "config.json").write_text("{"),
    "config that is a list": lambda d: (d / "config.json").write_text("[]"),
    "config of 2 MB": lambda d: (d / "config.json").write_text('{"a":"' + "x" * 2**21 + '"}'),
    "config with NaN": lambda d: (d / "config.json").write_text('{"rope_theta": NaN}'),
    "unknown model": lambda d: None,
}


def truncate(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def patch(path: Path, at: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + 8] = value.to_bytes(8, "little")
    path.write_bytes(data)


def unknown_type(folder: Path) -> None:
    data = bytearray((folder / "m.gguf").read_bytes())
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # one dimension, then the type
    data[at : at + 4] = (77).to_bytes(4, "little")
    (folder / "m.gguf").write_bytes(data)


@pytest.mark.parametrize("kind", BAD_INPUT)
def test_bad_input_is_one_line(tmp_path: Path, kind: str):
    BAD_INPUT[kind](tmp_path)
    model = str(tmp_path) if kind != "unknown model" else "smollm3-of-nobody"
    with pytest.raises((CheckpointError, ConfigError, ModelNotFoundError)) as caught:
        open_checkpoint(model)
    message = str(caught.value)
    assert "\n" not in message and 10 < len(message) < 300
    expected = {
        "header of 2^40 tensors": "1099511627776 tensors",
        "unknown quantisation": "'output_norm.weight' has the unknown type 77",
        "GGUF without a key": "llama.block_count",
        "config without a key": "hidden_size",
        "config with NaN": "NaN is no JSON number",
    }
    assert expected.get(kind, "") in message


def test_a_config_is_read_without_torch(tmp_path: Path):
    """Opening and planning stay quick: torch comes with the tensors."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    code = (
        "import sys; from stairs.checkpoints.checkpoint import open_checkpoint;"
        f"open_checkpoint({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    source = Path(__file__).parents[2] / "src"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}).returncode
        == 0
    )

"""``open_checkpoint``: a model by any name to its config, tokenizer and tensors.

Opening reads headers and configs only. Torch is imported when ``tensors`` is asked for, so a
plan of a model costs no more than its metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from stairs.checkpoints.configs import GenerationDefaults, read_config, read_generation
from stairs.checkpoints.gguf import open_gguf
from stairs.checkpoints.gguf_config import read_gguf_config, read_gguf_generation
from stairs.checkpoints.sources import resolve
from stairs.config import ModelConfig
from stairs.errors import ConfigError
from stairs.text.json_file import read_object
from stairs.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from stairs.checkpoints.tensors import TensorSource

__all__ = ["LOAD_FORMATS", "Checkpoint", "open_checkpoint"]

LOAD_FORMATS = ("auto", "gguf", "safetensors", "dummy")


@dataclass(frozen=True)
class Checkpoint:
    """``name`` as the user gave it, ``path`` the file or folder it stands for."""

    name: str
    path: Path
    config: ModelConfig
    generation: GenerationDefaults
    open_tokenizer: Callable[[], Tokenizer]
    open_tensors: Callable[[], TensorSource]

    def tokenizer(self) -> Tokenizer:
        """Made on the first call; ``CheckpointError`` where the checkpoint has none."""
        return self._tokenizer

    @cached_property
    def tensors(self) -> TensorSource:
        """The model's tensors, names, shapes and types checked."""
        return self.open_tensors()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.open_tokenizer()


def open_checkpoint(
    model: str, *, revision: str | None = None, load_format: str = "auto", seed: int = 0
) -> Checkpoint:
    """Open ``model``: an alias, a .gguf file, a folder or a hub id, fetched where it is missing.

    ``load_format="dummy"`` needs a config only and makes weights from ``seed``; ``gguf`` and
    ``safetensors`` refuse a checkpoint of the other kind. Raises ``ModelNotFoundError``,
    ``CheckpointError`` or ``ConfigError``, each with one line.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format {load_format!r} is unknown; one of {', '.join(LOAD_FORMATS)}",
            param="load_format",
        )
    dummy = load_format == "dummy"
    path = resolve(model, revision=revision, wanted="config" if dummy else "all")
    kind = "gguf" if path.suffix == ".gguf" else "safetensors"
    if load_format not in ("auto", "dummy", kind):
        raise ConfigError(
            f"load_format is {load_format}, but {path.name} is {kind}", param="load_format"
        )
    open_kind = _open_gguf if kind == "gguf" else _open_folder
    return open_kind(model, path, seed if dummy else None)


def _open_gguf(name: str, path: Path, dummy_seed: int | None) -> Checkpoint:
    file = open_gguf(path)
    config = read_gguf_config(file)

    def open_tensors() -> TensorSource:
        from stairs.checkpoints.gguf_tensors import GGUFTensors

        return GGUFTensors(file, config) if dummy_seed is None else _dummy(config, dummy_seed)

    return Checkpoint(
        name,
        path,
        config,
        read_gguf_generation(file, config),
        lambda: Tokenizer.from_gguf(file.metadata),
        open_tensors,
    )


def _open_folder(name: str, path: Path, dummy_seed: int | None) -> Checkpoint:
    config = read_config(read_object(path / "config.json"))
    generation_file = path / "generation_config.json"
    said = read_object(generation_file) if generation_file.is_file() else {}
    generation = read_generation(said, config)
    config = replace(config, eos_token_ids=generation.eos_token_ids)

    def open_tensors() -> TensorSource:
        from stairs.checkpoints.safetensors import SafetensorsFolder

        return SafetensorsFolder(path, config) if dummy_seed is None else _dummy(config, dummy_seed)

    return Checkpoint(
        name,
        path,
        config,
        generation,
        lambda: Tokenizer.from_folder(path),
        open_tensors,
    )


def _dummy(config: ModelConfig, seed: int) -> TensorSource:
    from stairs.checkpoints.dummy import DummyTensors

    return DummyTensors(config, seed=seed)

"""From what a user names to a config: a file, a folder, a built-in config, or the hub's.

Only a config is read, never weights; a GGUF's header is enough. A hub id that is not built in
costs one small download.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stairs.checkpoints.configs import FAMILIES
from stairs.checkpoints.hub import fetch_file
from stairs.checkpoints.planned import read_any_config
from stairs.checkpoints.residence import folder_types, gguf_types, plain_types
from stairs.checkpoints.sources import ALIASES
from stairs.config import ModelConfig
from stairs.errors import ModelNotFoundError
from stairs.planner.catalogue import CATALOGUE, SHORT_NAMES
from stairs.text.json_file import read_object

__all__ = ["Found", "find_model"]


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    origin: str
    config: ModelConfig
    types: Mapping[str, str] | None = None  # of a file's matrices; None: in the config's own dtype


def find_model(model: str, *, revision: str | None = None) -> Found:
    """Raises ModelNotFoundError, ConfigError or CheckpointError with one line."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return _in_file(path)
    packaged = ALIASES.get(model.lower())
    if packaged is not None and revision is None:
        config = read_any_config(CATALOGUE[SHORT_NAMES[model.lower()]])
        types = {
            name: packaged.table_type if "embed" in name else packaged.type
            for name in plain_types(config)
        }
        return Found(packaged.file, f"built-in config, {packaged.type}", config, types)
    name = SHORT_NAMES.get(model.lower(), model)
    if name in CATALOGUE and revision is None:
        return Found(name, "built-in config", read_any_config(CATALOGUE[name]))
    if path.suffix in (".json", ".gguf") or model.count("/") != 1:
        raise ModelNotFoundError(
            f"no file, folder, hub id or built-in config {model!r}; built in: "
            f"{', '.join(SHORT_NAMES)}",
            param="model",
        )
    file = fetch_file(model, "config.json", revision=revision)
    return Found(model, "hub", _read_json(file))


def _in_folder(folder: Path) -> Found:
    config = folder / "config.json"
    if config.is_file():
        found = _read_json(config)
        runs = found.model_type in FAMILIES
        return Found(folder.name, str(config), found, folder_types(folder, found) if runs else None)
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(f"{folder} has neither config.json nor a .gguf", param="model")
    return _in_file(files[0])


def _in_file(path: Path) -> Found:
    if path.suffix == ".gguf":
        from stairs.checkpoints.gguf import open_gguf
        from stairs.checkpoints.gguf_config import read_gguf_config

        file = open_gguf(path)
        config = read_gguf_config(file)
        return Found(path.stem, str(path), config, gguf_types(file, config))
    return Found(path.stem, str(path), _read_json(path))


def _read_json(path: Path) -> ModelConfig:
    return read_any_config(read_object(path))

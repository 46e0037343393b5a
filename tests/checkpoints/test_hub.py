"""The hub, played by a server on this machine that speaks the three requests the library makes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from safetensors.torch import save

from checkpoints.model_files import (
    CONFIG,
    CONFIG_JSON,
    seeded_tensors,
    write_folder,
    write_tiny_gguf,
)

COMMIT, OLDER = "a" * 40, "b" * 40
RESOLVE = """
import sys
from stairs.checkpoints.sources import resolve
from stairs.errors import StairsError
model, revision, wanted = sys.argv[1:]
try:
    print(resolve(model, revision=revision or None, wanted=wanted))
except StairsError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


class FakeHub:
    """Repositories as {name: {file: bytes}}; ``seen`` is what was asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.seen: list[str] = []
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(request.path.partition("?")[0])
        self.seen.append(f"{request.command} {path}")
        self.tokens.add(request.headers.get("Authorization"))
        api = re.fullmatch(r"/api/models/(\w+/[\w.-]+)(/(revision|tree)/([\w.-]+))?", path)
        file = re.fullmatch(r"/(\w+/[\w.-]+)/resolve/([\w.-]+)/(.+)", path)
        repo = (api or file)[1] if api or file else ""
        revision = (api and api[4]) or (file and file[2]) or "main"
        files = self.repos.get(repo)
        if files is None:
            return self.send(request, 404, {"X-Error-Code": "RepoNotFound"}, b"{}", body)
        if repo in self.gated:
            return self.send(request, 403, {"X-Error-Code": "GatedRepo"}, b"{}", body)
        if revision not in ("main", "v1", COMMIT, OLDER):
            return self.send(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"{}", body)
        commit = OLDER if revision in ("v1", OLDER) else COMMIT
        if api:
            if api[3] == "tree":
                answer = [{"type": "file", "path": n, "size": len(d), "oid": sha(d)[:40]}
                          for n, d in files.items()]  # fmt: skip
            else:
                answer = {"id": repo, "sha": commit, "siblings": [{"rfilename": n} for n in files]}
            return self.send(request, 200, {}, json.dumps(answer).encode(), body)
        data = files.get(file[3])
        if data is None:
            return self.send(request, 404, {"X-Error-Code": "EntryNotFound"}, b"", body)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{sha(data)[:40]}"'}
        return self.send(request, 200, headers, data, body)

    def send(
        self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes,
        body: bool,
    ) -> None:  # fmt: skip
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(data)

    def downloads(self) -> set[str]:
        found = (re.fullmatch(r"GET /\w+/[\w.-]+/resolve/[\w.-]+/(.+)", line) for line in self.seen)
        return {match[1] for match in found if match}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    fake = FakeHub()
    fake.repos["org/tiny"] = {
        "config.json": json.dumps(CONFIG_JSON).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": save(seeded_tensors()),
        "pytorch_model.bin": b"pickle",
        "modeling_tiny.py": b"raise SystemExit",
        "onnx/model.safetensors": b"second copy",
        "README.md": b"hello",
    }
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def resolve(hub: FakeHub, tmp_path: Path):
    def run(
        model: str, *, revision: str = "", wanted: str = "all", **env: str
    ) -> subprocess.CompletedProcess[str]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "STAIRS_"))}
        source = Path(__file__).parents[2] / "src"
        settings = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url,
                    "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
                    "PYTHONPATH": str(source), "NO_PROXY": "127.0.0.1"}  # fmt: skip
        return subprocess.run(
            [sys.executable, "-c", RESOLVE, model, revision, wanted],
            env=keep | settings | env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def test_fetches_what_is_read_and_nothing_else(hub: FakeHub, resolve):
    done = resolve("org/tiny", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name == COMMIT
    assert hub.downloads() == {"config.json", "tokenizer.json", "model.safetensors"}
    assert hub.tokens == {"Bearer hf_secret"}
    from stairs.checkpoints.safetensors import SafetensorsFolder

    name = "model.norm.weight"
    assert torch.equal(
        SafetensorsFolder(folder, CONFIG).load(name, torch.float32), seeded_tensors()[name]
    )
    # Again without the network: from the cache.
    hub.seen.clear()
    again = resolve("org/tiny", HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout and not hub.seen and again.stderr == ""


def test_a_model_in_shards(hub: FakeHub, resolve, tmp_path: Path):
    write_folder(tmp_path / "sharded", seeded_tensors(), num_files=3)
    files = {path.name: path.read_bytes() for path in (tmp_path / "sharded").iterdir()}
    hub.repos["org/large"] = files | {"consolidated.safetensors": b"second copy"}
    done = resolve("org/large")
    assert done.returncode == 0, done.stderr
    assert hub.downloads() == files.keys()
    hub.seen.clear()
    assert resolve("org/large").stdout == done.stdout and not hub.downloads()


def test_a_revision_and_a_config_alone(hub: FakeHub, resolve):
    done = resolve("org/tiny", revision="v1", wanted="config")
    assert Path(done.stdout.strip()).name == OLDER, done.stderr
    assert "model.safetensors" not in hub.downloads()


def test_a_model_that_cannot_run_is_refused_before_its_weights_come(hub: FakeHub, resolve):
    hub.repos["org/tiny"]["config.json"] = json.dumps(
        CONFIG_JSON | {"model_type": "mamba"}
    ).encode()
    done = resolve("org/tiny")
    assert "ConfigError: model_type 'mamba'" in done.stderr
    assert "model.safetensors" not in hub.downloads()


def test_ggufs_of_a_repository(hub: FakeHub, resolve, tmp_path: Path):
    data = write_tiny_gguf(tmp_path / "x.gguf").read_bytes()
    hub.repos["org/quants"] = {"m.Q4_0.gguf": data, "m.Q8_0.gguf": data, "README.md": b""}
    done = resolve("org/quants:q8_0")
    assert Path(done.stdout.strip()).name == "m.Q8_0.gguf", done.stderr
    assert hub.downloads() == {"m.Q8_0.gguf"}
    offline = resolve("org/quants:q8_0", HF_HUB_OFFLINE="1")
    assert offline.stdout == done.stdout, offline.stderr
    unclear = resolve("org/quants")
    assert (
        "has not one GGUF (it has m.Q4_0.gguf, m.Q8_0.gguf); write org/quants:FILE"
        in unclear.stderr
    )
    del hub.repos["org/quants"]["m.Q4_0.gguf"]
    assert Path(resolve("org/quants").stdout.strip()).name == "m.Q8_0.gguf"


@pytest.mark.parametrize(("model", "revision", "message"), [
    ("org/none", "", "org/none on the hub: no such repository"),
    ("org/tiny", "v9", "org/tiny on the hub: no such revision"),
    ("org/gated", "", "ask for access"),
])  # fmt: skip
def test_what_the_hub_refuses_is_one_line(
    hub: FakeHub, resolve, model: str, revision: str, message: str
):
    hub.repos["org/gated"] = {}
    hub.gated.add("org/gated")
    done = resolve(model, revision=revision)
    assert done.returncode == 1 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_no_hub_and_no_cache(resolve):
    for env in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        done = resolve("org/tiny", **env)
        assert "org/tiny on the hub: not in the cache" in done.stderr
        assert "Traceback" not in done.stderr

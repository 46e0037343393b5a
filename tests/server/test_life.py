"""Start, death of the engine, drain and return: with keys, a system prompt and pinned prefixes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server_process import Server, wait_until

HOUSE = "You keep the light of a lighthouse. " * 3
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefixes")
    (folder / "house.txt").write_text(HOUSE)
    (folder / "raw.txt").write_text("raw " * 10)
    return folder


def start(model: Path, files: Path, *, kept: Path) -> Server:
    return Server(
        model,
        *("--system-prompt", str(files / "house.txt")),
        *("--prefix-raw", f"raw={files / 'raw.txt'}"),
        *("--prefix-folder", str(kept)),
        *("--api-key", "secret", "--api-key", "other", "--allowed-origins", "http://page"),
        *("--num-gpu-blocks-override", "128", "--log-format", "json"),
    )


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, files: Path) -> Iterator[Server]:
    server = start(tiny_model, files, kept=files / "kept").wait_ready()
    server.http.headers.update(KEY)
    yield server
    server.stop()


def chat(server: Server, *messages: dict, **options):
    body = {"messages": list(messages), "max_tokens": 4, "temperature": 0} | options
    return server.http.post("/v1/chat/completions", json=body)


USER = {"role": "user", "content": "how is the light?"}


# -- keys and origins ---------------------------------------------------------------------------


def test_nothing_but_health_without_a_key(guarded: Server) -> None:
    nobody = {"Authorization": ""}
    assert guarded.http.get("/health", headers=nobody).status_code == 200
    for path in ("/", "/v1/models", "/metrics", "/openapi.json", "/docs", "/nowhere"):
        reply = guarded.http.get(path, headers=nobody)
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    wrong = {"Authorization": "Bearer secre"}
    assert guarded.http.post("/v1/completions", json={}, headers=wrong).status_code == 401


def test_a_key_as_token_or_as_a_browsers_password(guarded: Server) -> None:
    for key in ("secret", "other"):
        basic = base64.b64encode(f"anyone:{key}".encode()).decode()
        for value in (f"Bearer {key}", f"bearer {key}", f"Basic {basic}"):
            reply = guarded.http.get("/v1/models", headers={"Authorization": value})
            assert reply.status_code == 200


def test_browsers_of_other_origins_are_let_in_only_when_named(
    guarded: Server, server: Server
) -> None:
    allow = "access-control-allow-origin"
    asked = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    assert guarded.http.options("/v1/models", headers=asked).headers[allow] == "http://page"
    assert allow not in guarded.http.get("/health", headers={"Origin": "http://else"}).headers
    assert allow not in server.http.get("/health", headers=asked).headers


# -- prefixes -----------------------------------------------------------------------------------


def cached(reply) -> int:
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_services_own_prompt_is_ready_before_the_first_chat(guarded: Server) -> None:
    names = [one["name"] for one in guarded.http.get("/v1/prefixes").json()["data"]]
    assert names[:2] == ["system-prompt", "raw"]
    assert cached(chat(guarded, USER)) >= 96  # all whole blocks of the prompt
    assert cached(chat(guarded, {"role": "system", "content": "Be brief."}, USER)) < 96
    raw = {"prompt": "raw " * 10 + "and more", "max_tokens": 2}
    assert cached(guarded.http.post("/v1/completions", json=raw)) == 32


def test_a_prefix_comes_and_goes(guarded: Server) -> None:
    added = {"name": "guide", "prompt": "g" * 100}
    reply = guarded.http.post("/v1/prefixes", json=added)
    assert reply.status_code == 200, reply.text
    pinned = reply.json()
    assert (pinned["num_tokens"], pinned["num_pinned_tokens"]) == (100, 96)
    assert pinned["kv_bytes"] == 96 * 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, width, float32
    again = guarded.http.post("/v1/prefixes", json=added)
    assert again.status_code == 400 and again.json()["error"]["param"] == "name"
    prompt = {"prompt": "g" * 100 + "!", "max_tokens": 1}
    assert cached(guarded.http.post("/v1/completions", json=prompt)) == 96
    assert guarded.http.delete("/v1/prefixes/guide").status_code == 200
    names = [one["name"] for one in guarded.http.get("/v1/prefixes").json()["data"]]
    assert "guide" not in names
    assert guarded.http.delete("/v1/prefixes/guide").status_code == 400
    assert guarded.http.delete("/v1/prefixes/raw").status_code == 400  # the command line's


@pytest.mark.parametrize("name", [".", "..", "../x", "a/b", ""])
def test_a_prefix_has_a_name_that_can_stand_in_a_path(guarded: Server, name: str) -> None:
    reply = guarded.http.post("/v1/prefixes", json={"name": name, "prompt": "n" * 40})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "name"


def test_a_prefix_beyond_the_context_is_refused_before_it_is_encoded(guarded: Server) -> None:
    message = {"role": "system", "content": "l" * 150_000}
    for body in ({"prompt": "l" * 150_000}, {"messages": [message]}):
        reply = guarded.http.post("/v1/prefixes", json={"name": "long"} | body)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["code"] == "context_length_exceeded"
        assert "characters" in error["message"]


def test_a_pinned_prefix_survives_traffic_that_fills_the_pool(guarded: Server) -> None:
    for i in range(8):
        body = {"prompt": chr(97 + i) * 700, "max_tokens": 1}
        assert guarded.http.post("/v1/completions", json=body).status_code == 200
    assert cached(chat(guarded, USER)) >= 96


def test_prefixes_have_a_budget(guarded: Server) -> None:
    reply = guarded.http.post("/v1/prefixes", json={"name": "big", "prompt": "b" * 1000})
    assert reply.status_code == 400 and "pin_memory_fraction" in reply.json()["error"]["message"]


# -- death and return ---------------------------------------------------------------------------


def test_when_the_engine_dies_everyone_is_told_and_it_comes_back(guarded: Server) -> None:
    restarts = guarded.metric("stairs:engine_restarts_total")
    body = {"prompt": "k" * 20, "max_tokens": 1000, "ignore_eos": True}
    running = threading.Barrier(3, timeout=60)

    def whole(_: int):
        running.wait()
        return guarded.http.post("/v1/completions", json=body)

    def stream() -> list[str]:
        path = "/v1/completions"
        with guarded.http.stream("POST", path, json=body | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            running.wait()
            return [line for line in lines if line]

    with ThreadPoolExecutor(3) as pool:
        streamed = pool.submit(stream)
        wholes = [pool.submit(whole, i) for i in range(2)]
        wait_until(lambda: guarded.metric("vllm:num_requests_running") == 3)
        os.kill(guarded.engine_pid(), signal.SIGKILL)
        for answer in wholes:
            reply = answer.result()
            assert reply.status_code == 503 and "Retry-After" in reply.headers
            error = reply.json()["error"]
            assert error["code"] == "engine_dead" and "SIGKILL" in error["message"]
        last = json.loads(streamed.result()[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_dead"

    def ready() -> bool:
        health = guarded.http.get("/health")
        if health.status_code == 503:
            assert health.json()["status"] == "restarting"
            assert "SIGKILL" in health.json()["reason"]
        return health.json() == {"status": "ready", "reason": None}

    wait_until(ready)
    sources = {
        one["name"]: one["source"] for one in guarded.http.get("/v1/prefixes").json()["data"]
    }
    assert sources == {"system-prompt": "file", "raw": "file"}  # read, not computed again
    assert cached(chat(guarded, USER)) >= 96
    assert guarded.metric("stairs:engine_restarts_total") == restarts + 1


def test_the_engine_does_not_outlive_its_parent(tiny_model: Path) -> None:
    server = Server(tiny_model, "--num-gpu-blocks-override", "16").wait_ready()
    engine = server.engine_pid()
    server.process.kill()
    server.stop()

    def gone() -> bool:
        try:
            os.kill(engine, 0)
            stat = Path(f"/proc/{engine}/stat").read_text()
        except (ProcessLookupError, FileNotFoundError):
            return True
        return stat.split(")")[-1].split()[0] == "Z"  # nobody reaps it here

    wait_until(gone)


def test_it_ends_while_it_waits_to_start_an_engine_again(tiny_model: Path, tmp_path: Path) -> None:
    """Its model is gone, so each attempt fails and the next one is further away."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    server = Server(folder, "--num-gpu-blocks-override", "16").wait_ready()
    (folder / "config.json").rename(folder / "gone.json")
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.wait_line("starting it again in 2 s")
    assert server.http.get("/health").json()["status"] == "restarting"
    assert server.stop() == 0


def test_ctrl_c_drains_and_added_prefixes_return(
    tiny_model: Path, files: Path, tmp_path: Path
) -> None:
    first = start(tiny_model, files, kept=tmp_path).wait_ready()
    first.http.headers.update(KEY)
    added = {"name": "kept", "messages": [{"role": "system", "content": "s" * 40}]}
    assert first.http.post("/v1/prefixes", json=added).json()["source"] == "computed"
    body = {"prompt": "d", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with first.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        first.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert first.stop() == 0
    for line in first.log:
        if line.startswith("{"):
            assert {"time", "level", "message"} <= json.loads(line).keys()

    again = start(tiny_model, files, kept=tmp_path).wait_ready()
    again.http.headers.update(KEY)
    prefixes = {one["name"]: one for one in again.http.get("/v1/prefixes").json()["data"]}
    assert prefixes.keys() == {"system-prompt", "raw", "kept"}
    assert all(one["source"] == "file" for one in prefixes.values())
    assert again.stop() == 0


# -- what keeps it from starting ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-model-len", "99999"], "max_model_len"),
        (["--num-gpu-blocks-override", "0"], "num_blocks"),
        (["--pin-memory-fraction", "0", "--system-prompt", "HOUSE"], "pin_memory_fraction"),
    ],
)
def test_a_wrong_option_is_one_line_and_code_2(
    tiny_model: Path, files: Path, arguments: list[str], named: str
) -> None:
    given = [str(files / "house.txt") if a == "HOUSE" else a for a in arguments]
    server = Server(tiny_model, *given, "--log-level", "error")
    assert server.stop_when_done() == 2
    assert len(server.log) == 1 and server.log[0].startswith("stairs: ")
    assert named in server.log[0]


def test_a_broken_model_file_is_one_line_and_code_2(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)  # counts of 2^64 - 1
    server = Server(broken)
    assert server.stop_when_done() == 2
    assert len(server.log) == 1 and server.log[0].startswith("stairs: ")


def test_a_port_in_use_names_the_option(server: Server, tiny_model: Path) -> None:
    port = server.url.rpartition(":")[2]
    second = Server(tiny_model, "--port", port)
    assert second.stop_when_done() == 2
    assert second.log == [
        f"stairs: port {port} on 127.0.0.1 is in use; choose another with --port\n"
    ]

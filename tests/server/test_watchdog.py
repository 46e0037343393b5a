"""An engine that hangs without dying: told apart from one that works, ended, started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from server_process import Server, wait_until
from stairs.errors import ConfigError
from stairs.server.options import ServeOptions
from stairs.server.watchdog import Watchdog


class Kennel:
    """A watchdog and what it sees: ``inbox`` is what nobody read yet."""

    def __init__(self, seconds: float) -> None:
        self.pending = True
        self.inbox = False
        self.barks = 0
        self.dog = Watchdog(
            seconds, pending=lambda: self.pending, listen=self.listen, bark=self.bark
        )

    def listen(self) -> None:
        if self.inbox:
            self.inbox = False
            self.dog.heard()

    def bark(self) -> None:
        self.barks += 1

    @property
    def armed(self) -> bool:
        return self.dog._timer is not None

    def turn(self) -> None:
        """Its timer goes off, whenever that is."""
        assert self.dog._timer is not None
        self.dog._timer.cancel()
        self.dog._turn()


def run(body) -> None:
    async def start() -> None:
        body()

    asyncio.run(start())


def test_ten_silent_turns_while_work_is_pending() -> None:
    def body() -> None:
        one = Kennel(1000)
        one.dog.watch()
        for _ in range(9):
            one.turn()
        assert one.barks == 0
        one.turn()
        assert one.barks == 1 and not one.armed

    run(body)


def test_a_word_starts_the_count_again_also_one_that_nobody_read_yet() -> None:
    def body() -> None:
        one = Kennel(1000)
        one.dog.watch()
        for silence in (9, 9):
            for _ in range(silence):
                one.turn()
            one.inbox = True
            one.turn()
            assert one.barks == 0
        for _ in range(8):
            one.turn()
        one.dog.heard()
        for _ in range(9):
            one.turn()
        assert one.barks == 0
        one.turn()
        assert one.barks == 1

    run(body)


def test_it_sleeps_while_nothing_is_pending_and_starts_afresh() -> None:
    def body() -> None:
        one = Kennel(1000)
        assert not one.armed
        one.dog.watch()
        for _ in range(9):
            one.turn()
        one.pending = False
        one.turn()
        assert not one.armed and one.barks == 0
        one.pending = True
        one.dog.watch()
        for _ in range(9):
            one.turn()
        assert one.barks == 0
        one.dog.stop()
        assert not one.armed

    run(body)


def test_more_work_does_not_put_it_off() -> None:
    """Clients that go on asking would otherwise hide an engine that never answers."""

    def body() -> None:
        one = Kennel(1000)
        one.dog.watch()
        for _ in range(10):
            one.turn()
            if not one.barks:
                one.dog.watch()
        assert one.barks == 1

    run(body)


def test_zero_watches_nothing() -> None:
    def body() -> None:
        one = Kennel(0)
        one.dog.watch()
        assert not one.armed

    run(body)


def test_the_timer_is_the_loops_own() -> None:
    async def body() -> None:
        one = Kennel(0.05)
        one.dog.watch()
        while not one.barks:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_no_clock_takes_these(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--watchdog-timeout"):
        ServeOptions(watchdog_timeout=seconds)


def test_a_stopped_engine_is_told_ended_and_started_again(tiny_model: Path) -> None:
    server = Server(
        tiny_model, "--num-gpu-blocks-override", "64", "--watchdog-timeout", "12"
    ).wait_ready()
    try:
        stopped = server.engine_pid()
        os.kill(stopped, signal.SIGSTOP)
        body = {"prompt": "s" * 20, "max_tokens": 4}
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(server.http.post, "/v1/completions", json=body) for _ in range(3)]
            # Silence is no death as long as it may be a long step.
            assert server.http.get("/health").status_code == 200
            for one in asked:
                reply = one.result(60)
                assert reply.status_code == 503 and "Retry-After" in reply.headers
                error = reply.json()["error"]
                assert error["code"] == "engine_dead"
                assert "no sign of life for 12 s" in error["message"]
                assert "--watchdog-timeout" in error["message"]

        def ready() -> bool:
            health = server.http.get("/health")
            assert health.status_code == 200 or "no sign of life" in health.json()["reason"]
            return health.status_code == 200

        wait_until(ready)
        assert server.engine_pid() != stopped
        assert server.http.post("/v1/completions", json=body).status_code == 200
        assert server.metric("stairs:engine_restarts_total") == 1
        assert server.metric("vllm:request_success_total", finished_reason="error") == 3
    finally:
        assert server.stop() == 0


def test_a_stopped_engine_does_not_keep_the_server_from_ending(tiny_model: Path) -> None:
    server = Server(tiny_model, "--num-gpu-blocks-override", "16", "--drain-timeout", "1")
    server.wait_ready()
    os.kill(server.engine_pid(), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.http.post, "/v1/completions", json={"prompt": "a"})
        assert server.stop() == 0
        with contextlib.suppress(httpx.TransportError):  # where it came too late to be heard
            reply = asked.result(60)
            assert reply.status_code == 503
            assert "shutting down" in reply.json()["error"]["message"]


def test_a_stream_that_outlasts_the_draining_is_told_so(tiny_model: Path) -> None:
    server = Server(tiny_model, "--num-gpu-blocks-override", "256", "--drain-timeout", "0.5")
    server.wait_ready()
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    # It may be through before the half second is over, on a machine quicker than any known.
    assert rest[-1] == "data: [DONE]" or "shutting down" in rest[-1]
    assert server.stop() == 0

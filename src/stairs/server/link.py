"""One run of the engine process: its start, its socket, its end. ``Bridge`` starts the next one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from stairs.server import wire

__all__ = ["EngineLink"]

_TAIL = 4000  # bytes of the engine's last words kept for the reason of its death


class EngineLink:
    """A socket in a private folder and a process at its other end, which lives no longer than
    this one: its standard input is a pipe that only we hold open."""

    def __init__(self, receive: Callable[[wire.Report], None]) -> None:
        self._receive = receive
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.Report).decode
        self._folder = tempfile.TemporaryDirectory(prefix="stairs-")  # mode 0700
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self.address = f"ipc://{Path(self._folder.name) / 'engine'}"
        self._socket.bind(self.address)
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | None = None
        self._tail = b""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def run(self, start: wire.Start) -> str:
        """Start the process, serve the socket until the process ends; why it ended."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "stairs.server.engine_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # a terminal's Ctrl-C reaches us alone: we drain first
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        self._loop.add_reader(self._socket.fileno(), self.receive)
        try:
            while data := await self._process.stdout.read(65536):
                sys.stderr.buffer.write(data)
                sys.stderr.flush()
                self._tail = (self._tail + data)[-_TAIL:]
            code = await self._process.wait()
            self.receive()  # its last words
        finally:
            self._loop.remove_reader(self._socket.fileno())
            self._close()
        return self._reason(code)

    def send(self, command: wire.Command) -> None:
        self._socket.send(self._encode(command), zmq.NOBLOCK)
        # Sending may take the edge that would have told us of a message; look again.
        self._loop.call_soon(self.receive)

    def stop(self) -> None:
        """Ask the process to end, by closing its standard input."""
        if self._process and self._process.stdin:
            self._process.stdin.close()

    def kill(self) -> None:
        if self._process and self._process.returncode is None:
            self._process.kill()

    def receive(self) -> None:
        """Hand on all that has come."""
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(self._decode(data))

    def _close(self) -> None:
        self.kill()
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    def _reason(self, code: int) -> str:
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (the system may be out of memory)" if name == "SIGKILL" else ""
            return f"the engine process was killed by {name}{hint}"
        lines = self._tail.decode(errors="replace").strip().splitlines()
        last = f": {lines[-1]:.200}" if lines else ""
        return f"the engine process ended with code {code}{last}"


def _environment() -> dict[str, Any]:
    """Ours, but with one core left to HTTP where there are more than two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = dict(os.environ)
    # OpenMP's threads wait for one another by spinning, about 1 ms by default; beside another
    # process, as this one is, that takes the core from whom they wait for (docs/decisions.md).
    environment.setdefault("GOMP_SPINCOUNT", "5000")
    if cores and cores > 2:
        for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
            environment.setdefault(name, str(cores - 1))
    return environment

"""The engine in its own process: ``python -m stairs.server.engine_process``, started, not forked.

The first line on standard input says what to load and where to connect; the end of standard
input, which is the parent's end however it came, ends this process. One thread receives, steps
and reports; while there is no work it sleeps in the socket.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec
import zmq

from stairs.accounting.record import Ledger
from stairs.cache.residency import Residency
from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.config import SamplingParams
from stairs.engine.build import build_engine
from stairs.engine.core import Engine
from stairs.engine.grammar import Grammars
from stairs.engine.prefix_files import load_prefix, save_prefix
from stairs.engine.sequence import TokenEvent
from stairs.errors import CheckpointError, StairsError
from stairs.server import wire

__all__ = ["EngineLoop", "main"]

_log = logging.getLogger(__name__)


class EngineLoop:
    """Serves one engine over one socket until the process ends."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.Command).decode
        self._numbers: dict[int, int] = {}  # the HTTP side's number of a live request → ours
        self._requests: dict[int, int] = {}  # and back
        self._queued: list[int] = []  # ours, whose first step has not begun
        self._pins: dict[int, wire.Pin] = {}  # ours: prefixes being computed
        self._residency = engine.pool.residency = Residency(engine.pool.num_blocks)
        self._report = wire.Step(self._stats(0))

    def send(self, report: wire.Report) -> None:
        self._socket.send(self._encode(report))

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        """Obey what came, waiting for something if there is nothing to do; step; report."""
        self._receive()
        began = time.monotonic()
        steps = self._engine.num_steps
        events = self._engine.step() if self._engine.has_work else []
        num_tokens = 0
        if self._engine.num_steps != steps:
            num_tokens = int(self._engine.ledger.records[-1].rows["new_tokens"].sum())
        self._note_starts(began)
        for event in events:
            self._note(event)
        self._report.stats = self._stats(num_tokens)
        self._report.spans = self._residency.take()
        self.send(self._report)
        self._report = wire.Step(self._report.stats)

    # -- commands ---------------------------------------------------------------------------

    def _receive(self) -> None:
        """All commands that are there; waits for one if there is nothing else to do."""
        flags = zmq.NOBLOCK if self._engine.has_work else 0
        while True:
            try:
                command = self._decode(self._socket.recv(flags))
            except zmq.Again:
                return
            self._obey(command)
            flags = zmq.NOBLOCK

    def _obey(self, command: wire.Command) -> None:
        match command:
            case wire.Add() | wire.Pin():
                try:
                    number = (
                        self._add(command) if isinstance(command, wire.Add) else self._pin(command)
                    )
                except StairsError as error:
                    self._report.refused.append(
                        wire.Refused(command.request, error.code, str(error), error.param)
                    )
                    return
                if number is not None:
                    self._numbers[command.request] = number
                    self._requests[number] = command.request
                    self._queued.append(number)
                    self._report.accepted.append((command.request, number))
            case wire.Abort(request, index):
                number = self._numbers.get(request)
                costs = None if number is None else self._engine.abort(number, index=index)
                if costs is not None and number is not None:
                    self._report.ended.append(wire.Ended(request, costs))
                    self._forget(number)
            case wire.Unpin(name):
                if name in self._engine.prefix.pins:
                    self._engine.unpin(name)

    def _add(self, command: wire.Add) -> int:
        return self._engine.add(
            command.tokens, command.sampling, salt=command.salt, grammar=command.grammar
        )

    def _pin(self, command: wire.Pin) -> int | None:
        """The number of the request that computes the prefix; None if a file had its K/V."""
        if command.file and Path(command.file).exists():
            try:
                load_prefix(
                    self._engine,
                    command.name,
                    command.tokens,
                    file=Path(command.file),
                    salt=command.salt,
                )
                self._report.pinned.append(self._pinned(command, "file"))
                return None
            except CheckpointError as error:
                _log.warning("prefix %r is computed again: %s", command.name, error)
        number = self._engine.add_prefix(command.name, command.tokens, salt=command.salt)
        self._pins[number] = command
        return number

    # -- reports ----------------------------------------------------------------------------

    def _note_starts(self, began: float) -> None:
        waiting = []
        for number in self._queued:
            if number not in self._requests:
                continue
            if self._engine.is_waiting(number):
                waiting.append(number)
            else:
                self._report.started.append((self._requests[number], began))
        self._queued = waiting

    def _note(self, event: TokenEvent) -> None:
        pin = self._pins.pop(event.request, None)
        if pin is None:
            self._report.events.append(event)
        else:
            if pin.file:
                try:
                    save_prefix(self._engine, pin.name, file=Path(pin.file))
                except OSError as error:
                    _log.warning("prefix %r is pinned but not saved: %s", pin.name, error)
            self._report.pinned.append(self._pinned(pin, "computed"))
        if event.costs is not None:
            self._forget(event.request)

    def _forget(self, number: int) -> None:
        del self._numbers[self._requests.pop(number)]
        self._pins.pop(number, None)

    def _pinned(self, command: wire.Pin, source: wire.Source) -> wire.Pinned:
        pin = self._engine.prefix.pins[command.name]
        num_bytes = len(pin.blocks) * self._engine.kv.block_nbytes
        return wire.Pinned(
            command.request, pin.num_tokens, pin.num_pinned_tokens, num_bytes, source
        )

    def _stats(self, step_tokens: int) -> wire.Stats:
        engine, scheduler, total = self._engine, self._engine.scheduler, self._engine.ledger.total
        return wire.Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_owned=engine.pool.num_owned,
            blocks_cached=engine.pool.num_cached,
            blocks_pinned=engine.prefix.num_pinned_blocks,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.num_prefix_queries,
            prefix_hits=scheduler.num_prefix_hits,
            step_tokens=step_tokens,
            kv_bytes_written=total.kv_bytes_written,
            kv_bytes_read=total.kv_bytes_read,
            pairs_predicted=total.pairs,
            pairs_counted=total.pairs_counted,
        )


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which drains first
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=wire.Start)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(start.address)
    encode = msgspec.msgpack.encode
    try:
        began = time.monotonic()
        engine = _load(start)
        loop = EngineLoop(engine, socket)
        loop.send(_ready(engine, time.monotonic() - began))
        loop.run()
    except StairsError as error:
        socket.send(encode(wire.Failed(error.code, str(error), error.param)))
    except BaseException as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        socket.send(encode(wire.Failed("engine_dead", reason)))
    socket.close(linger=1000)
    context.term()
    sys.exit(1)


def _end_with_the_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)


def _load(start: wire.Start) -> Engine:
    checkpoint = open_checkpoint(
        start.model, revision=start.revision, load_format=start.load_format
    )
    engine = build_engine(checkpoint.config, checkpoint.tensors, start.config)
    engine.open_grammars = lambda: Grammars(
        checkpoint.tokenizer(), checkpoint.config.vocab_size, checkpoint.config.eos_token_ids
    )
    # Kernels are compiled (or read from their cache) here, not under the first user's request.
    room = engine.scheduler.num_usable_blocks * engine.config.cache.block_size
    length = min(2 * engine.config.prefill_chunk_size, engine.max_model_len - 2, room - 2)
    engine.add([0] * max(length, 1), SamplingParams(max_tokens=2, ignore_eos=True), salt="warm-up")
    while engine.has_work:
        engine.step()
    engine.ledger = Ledger()
    return engine


def _ready(engine: Engine, seconds: float) -> wire.Ready:
    cache = engine.config.cache
    assert cache.num_blocks is not None
    return wire.Ready(
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.config.max_num_seqs,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        kv_bytes_per_token=engine.kv.block_nbytes // cache.block_size,
        dtype=engine.config.dtype,
        kv_cache_dtype=cache.dtype,
        load_seconds=seconds,
    )


if __name__ == "__main__":
    main()

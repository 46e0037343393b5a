"""The HTTP process's side of the engine: submits, delivers, and starts it again when it dies.

States: ``loading`` → ``ready`` → ``restarting`` → ``ready`` ... → ``stopped``. In every state but
``ready`` a request is refused with EngineDeadError and the reason; those that wait when the engine
dies get the same. It is ready once its pinned prefixes are. One that hangs is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

from stairs.errors import EngineDeadError, InvalidRequestError, OverloadedError, StairsError
from stairs.server import wire
from stairs.server.answers import Answers, Prompt, Running
from stairs.server.link import EngineLink
from stairs.server.metrics import Metrics
from stairs.server.watchdog import Watchdog
from stairs.text.tokenizer import Tokenizer

__all__ = ["Bridge", "State"]

State = Literal["loading", "ready", "restarting", "stopped"]

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 30.0  # seconds between two attempts to start an engine that does not load
_GOODBYE = 5.0  # seconds an engine gets to end by itself


class Bridge:
    """One engine, whichever process it lives in just now.

    ``prepare`` runs each time an engine has loaded and before it is called ready: it pins what
    was pinned.
    """

    def __init__(
        self,
        start: Callable[[str], wire.Start],
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        max_queue: int,
        watchdog_timeout: float,
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        self._start = start
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._max_queue = max_queue
        self._prepare = prepare
        self._watchdog_timeout = watchdog_timeout
        self._watchdog = Watchdog(
            watchdog_timeout,
            pending=lambda: bool(self._live or self._pins),
            listen=self._listen,
            bark=self._end_silent_engine,
        )
        self._numbers = partial(next, itertools.count())
        self._link: EngineLink | None = None
        self._live: dict[int, Running] = {}  # by our number
        self._by_engine: dict[int, Running] = {}  # by the engine's
        self._pins: dict[int, asyncio.Future[wire.Pinned]] = {}
        self._loaded = asyncio.Event()
        self._stopping = asyncio.Event()
        self.became_ready = asyncio.Event()  # for the first time
        self._failed: wire.Failed | None = None
        self._was_ready = False  # the engine that runs now
        self.state: State = "loading"
        self.reason: str | None = None
        self.info: wire.Ready | None = None

    @property
    def engine_pid(self) -> int | None:
        return self._link.pid if self._link else None

    @property
    def stopped(self) -> bool:
        return self.state == "stopped"

    @property
    def num_live_answers(self) -> int:
        return sum(one.prompt.params.n for one in self._live.values())

    # -- requests ---------------------------------------------------------------------------

    def submit(self, prompts: list[Prompt], *, arrival: float) -> Answers:
        """Send prompts to the engine. Raises OverloadedError or EngineDeadError at once.

        ``arrival`` is the monotonic time at which the request came: its clocks start there.
        """
        info = self.ready()
        answers = Answers(
            prompts, self._tokenizer, arrival=arrival, numbers=self._numbers, abort=self._abort
        )
        self._check_room(answers.num_answers, info.max_num_seqs)
        for one in answers.running:
            prompt = one.prompt
            self._live[one.number] = one
            self._send(
                wire.Add(one.number, prompt.tokens, prompt.params, prompt.salt, prompt.grammar)
            )
        return answers

    def ready(self) -> wire.Ready:
        if self.state != "ready" or self.info is None:
            raise EngineDeadError(f"the engine is {self.state}" + self._because())
        return self.info

    def _because(self) -> str:
        return f": {self.reason}" if self.reason else ""

    def _check_room(self, num: int, max_num_seqs: int) -> None:
        limit = max_num_seqs + self._max_queue
        if num > limit:
            raise InvalidRequestError(
                f"{num} answers at once; this server holds at most {limit}", param="n"
            )
        if self.num_live_answers + num > limit:
            raise OverloadedError(
                f"{self.num_live_answers} answers are running or waiting, of at most {limit} "
                f"({max_num_seqs} at once and --max-queue {self._max_queue})"
            )

    def retry_after(self) -> int:
        """Seconds after which a place in the queue should be free: a guess from the latest ones."""
        at_once = self.info.max_num_seqs if self.info else 1
        rounds = max(1.0, self.num_live_answers / at_once)
        return min(60, max(1, round(self._metrics.recent_seconds() * rounds / 2)))

    async def pin(
        self, name: str, tokens: list[int], *, salt: str | None, file: str | None
    ) -> wire.Pinned:
        """Have a prefix computed or read, and held; raises the engine's refusal."""
        number = self._numbers()
        future: asyncio.Future[wire.Pinned] = asyncio.get_running_loop().create_future()
        self._pins[number] = future
        try:
            self._send(wire.Pin(number, name, tokens, salt, file))
            return await future
        except asyncio.CancelledError:
            self._send(wire.Abort(number))
            raise
        finally:
            del self._pins[number]

    def unpin(self, name: str) -> None:
        self._send(wire.Unpin(name))

    def _abort(self, one: Running, index: int | None) -> None:
        self._send(wire.Abort(one.number, index))

    def _send(self, command: wire.Command) -> None:
        if self._link is None:
            raise EngineDeadError(f"the engine is {self.state}" + self._because())
        self._link.send(command)
        self._watchdog.watch()

    # -- reports ----------------------------------------------------------------------------

    def _receive(self, report: wire.Report) -> None:
        self._watchdog.heard()
        match report:
            case wire.Step():
                self._step(report)
            case wire.Ready():
                self.info = report
                self._loaded.set()
            case wire.Failed():
                self._failed = report

    def _step(self, step: wire.Step) -> None:
        now = time.monotonic()
        for number, engine_number in step.accepted:
            if number in self._live:
                self._by_engine[engine_number] = one = self._live[number]
                one.engine_number = engine_number
                one.wake.set()
        for number, began in step.started:
            if number in self._live:
                self._live[number].started = began
        for event in step.events:
            running = self._by_engine.get(event.request)
            if running is not None:
                running.take(event)
                self._metrics.token(running, event.index, now)
                if running.settled:
                    self._end(running)
        for ended in step.ended:
            aborted = self._live.get(ended.request)
            if aborted is not None:
                aborted.settle(ended.costs)
                self._end(aborted)
        for refused in step.refused:
            error = wire.refusal(refused.code, refused.message, refused.param)
            self._refuse(refused.request, error)
        for pinned in step.pinned:
            waiting = self._pins.get(pinned.request)
            if waiting is not None and not waiting.done():  # done: its task was just cancelled
                waiting.set_result(pinned)
        self._metrics.step(step.stats)
        if step.spans is not None:
            self._metrics.residency(step.spans)

    def _end(self, one: Running) -> None:
        del self._live[one.number]
        if one.engine_number is not None:
            del self._by_engine[one.engine_number]
        self._metrics.ended(one)

    def _refuse(self, number: int, error: StairsError) -> None:
        pin = self._pins.get(number)
        if pin is not None and not pin.done():
            pin.set_exception(error)
        elif number in self._live:
            self._live.pop(number).fail(error)

    # -- life and death ---------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running until ``stop``. Raises what keeps the first one from loading."""
        pause = 0.0
        while True:
            loaded_before = self.info is not None
            reason, was_ready = await self._run_once()
            if self.stopped:
                return
            if not loaded_before and not was_ready:
                raise self._load_error(reason)
            pause = 0.0 if was_ready else min(max(1.0, pause * 2), _LONGEST_PAUSE)
            _log.error("%s; starting it again%s", reason, f" in {pause:.0f} s" if pause else "")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return

    async def _run_once(self) -> tuple[str, bool]:
        """One engine's life: why it ended, and whether it had become ready."""
        self._failed, self._was_ready = None, False
        self._loaded.clear()
        self._link = link = EngineLink(self._receive)
        preparing = asyncio.create_task(self._become_ready())
        try:
            reason = await link.run(self._start(link.address))
        finally:
            preparing.cancel()
            self._watchdog.stop()
            self._link = None
        if self._failed is not None:
            reason = f"the engine stopped: {self._failed.message}"
        if not self.stopped:
            self.state, self.reason = "restarting", reason
        self._metrics.engine_died(unexpected=not self.stopped)
        self._fail_all(EngineDeadError(reason))
        await asyncio.gather(preparing, return_exceptions=True)
        return reason, self._was_ready

    async def _become_ready(self) -> None:
        await self._loaded.wait()
        assert self.info is not None
        self._metrics.engine_loaded(self.info)
        try:
            await self._prepare()
        except EngineDeadError:
            return  # it died meanwhile; the next one is prepared anew
        except StairsError as error:
            self._failed = wire.Failed(error.code, str(error), error.param)
            assert self._link is not None
            self._link.stop()
            return
        self.state, self.reason, self._was_ready = "ready", None, True
        self.became_ready.set()

    def _listen(self) -> None:
        if self._link is not None:
            self._link.receive()

    def _end_silent_engine(self) -> None:
        """It is killed, which works on a stopped process too, and its end does the rest. Clients
        are told at once: a process that waits for a device's driver may not end."""
        assert self._link is not None
        reason = (
            f"it gave no sign of life for {self._watchdog_timeout:g} s while requests waited "
            "(--watchdog-timeout)"
        )
        self._failed = wire.Failed("engine_dead", reason)
        reason = f"the engine stopped: {reason}"
        if not self.stopped:
            self.state, self.reason = "restarting", reason
        self._fail_all(EngineDeadError(reason))
        self._link.kill()

    def _fail_all(self, error: EngineDeadError) -> None:
        for one in list(self._live.values()):
            self._metrics.failed(one)
            one.fail(error)
        self._live.clear()
        self._by_engine.clear()
        for future in self._pins.values():
            if not future.done():
                future.set_exception(error)

    def _load_error(self, reason: str) -> StairsError:
        if self._failed is not None:
            return wire.refusal(self._failed.code, self._failed.message, self._failed.param)
        return EngineDeadError(reason)

    def give_up(self) -> None:
        """Take nothing more on, and let whatever still waits fail."""
        self.state, self.reason = "stopped", "the server is shutting down"
        self._stopping.set()
        self._fail_all(EngineDeadError(self.reason))

    async def stop(self) -> None:
        """End the engine for good."""
        self.give_up()
        if self._link is not None:
            self._link.stop()
            asyncio.get_running_loop().call_later(_GOODBYE, self._link.kill)

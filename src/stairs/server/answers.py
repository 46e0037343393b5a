"""Requests as the HTTP process sees them while the engine computes: ids come in, text goes out.

One HTTP request is an ``Answers``: a ``Running`` for each of its prompts, all of which wake the one
task that serves it. A stop string is found here and ends its answer in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stairs.accounting.record import Phase, Totals
from stairs.config import SamplingParams
from stairs.engine.sequence import TokenEvent
from stairs.errors import StairsError
from stairs.outputs import GrowingOutput, RequestMetrics, RequestOutput, StreamEvent
from stairs.text.tokenizer import Tokenizer

__all__ = ["Answers", "ClientGoneError", "Prompt", "Running"]


class ClientGoneError(StairsError):
    """The client hung up: there is nobody to answer."""

    status = 499
    code = "client_gone"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine. ``grammar``: see ``engine.grammar``."""

    tokens: list[int]
    params: SamplingParams
    text: str | None = None
    salt: str | None = None
    grammar: str | None = None


@dataclass(slots=True)
class Running:
    """One prompt's answers. It is ``settled`` when its costs are known, or the error that ended
    it: nothing more will come from the engine."""

    number: int
    prompt: Prompt
    growing: GrowingOutput
    wake: asyncio.Event
    engine_number: int | None = None  # the engine's own, once it has taken the request
    settled: bool = False
    error: StairsError | None = None
    started: float | None = None  # monotonic time at which its first step began
    last_token: dict[int, float] = field(default_factory=dict)  # by answer index

    @property
    def output(self) -> RequestOutput:
        return self.growing.output

    def take(self, event: TokenEvent) -> None:
        assert event.token is not None
        self.growing.take(event, event.token)
        if event.costs is not None:
            self.settle(event.costs)
        self.wake.set()

    def settle(self, costs: dict[Phase, Totals]) -> None:
        metrics = self.output.metrics
        metrics.prefill, metrics.decode = costs[Phase.PREFILL], costs[Phase.DECODE]
        self.settled = True
        self.wake.set()

    def fail(self, error: StairsError) -> None:
        self.error = error
        self.settled = True
        self.wake.set()


class Answers:
    """All prompts of one HTTP request. Whoever submits it must ``close`` it."""

    def __init__(
        self,
        prompts: list[Prompt],
        tokenizer: Tokenizer,
        *,
        arrival: float,
        numbers: Callable[[], int],
        abort: Callable[[Running, int | None], None],
    ) -> None:
        self._wake = asyncio.Event()
        self._abort = abort
        self.running: list[Running] = []
        for i, prompt in enumerate(prompts):
            output = RequestOutput("", prompt.text, prompt.tokens, [], RequestMetrics(arrival))
            growing = GrowingOutput(
                output,
                prompt.params,
                tokenizer,
                prompt_index=i,
                end_answer=lambda index, i=i: abort(self.running[i], index),  # type: ignore[misc]
            )
            self.running.append(Running(numbers(), prompt, growing, self._wake))

    @property
    def num_answers(self) -> int:
        return sum(one.prompt.params.n for one in self.running)

    async def accepted(self) -> None:
        """Until the engine has taken every prompt; raises its refusal."""
        while any(one.engine_number is None for one in self.running):
            await self._next()

    async def events(self) -> AsyncIterator[list[StreamEvent]]:
        """What came since the last time, until every answer is complete."""
        while True:
            ready: list[StreamEvent] = []
            for one in self.running:
                ready += one.growing.ready
                one.growing.ready.clear()
            if ready:
                yield ready
            elif all(one.output.finished for one in self.running):
                return
            else:
                await self._next()

    async def settled(self) -> None:
        """Until the costs of every prompt are known too."""
        while not all(one.settled and one.error is None for one in self.running):
            await self._next()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def cancel(self) -> None:
        """The client is gone: abort, and let whoever waits here know."""
        self.close()
        for one in self.running:
            if not one.settled:
                one.fail(ClientGoneError("the client hung up"))

    def close(self) -> None:
        """Abort what still runs; nothing is sent for what has ended by itself."""
        for one in self.running:
            if not one.settled:
                self._abort(one, None)

    async def _next(self) -> None:
        error = next((one.error for one in self.running if one.error is not None), None)
        if error is not None:
            raise error
        self._wake.clear()
        await self._wake.wait()

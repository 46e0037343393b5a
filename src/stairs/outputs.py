"""Results, in vLLM's shape, and how they grow: ids become text, a stop string ends an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stairs.accounting.record import Phase, Totals
from stairs.config import SamplingParams
from stairs.engine.sequence import TokenEvent, TokenLogprobs
from stairs.text.stream import TextStream
from stairs.text.tokenizer import Tokenizer

__all__ = [
    "CompletionOutput",
    "GrowingOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "StreamEvent",
]


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on ``time.monotonic()``; ``prefill`` and ``decode`` are sums of records."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    prefill: Totals = field(default_factory=Totals)
    decode: Totals = field(default_factory=Totals)
    num_generated: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """(last token - first token) / (tokens - 1); None for answers of one token."""
        if self.first_token_time is None or self.finished_time is None or self.num_generated < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_generated - 1)


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float  # natural logarithm
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None  # one a token: the chosen one and the likeliest
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop string, or the stop id that is not EOS


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None  # one a prompt token; the first is None
    finished: bool = False
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one token added to answer ``index`` of ``output``, which grows as events come.

    ``prompt_index`` is the request's place in the list that was passed; ``delta`` may be empty
    while a character or a stop string is undecided.
    """

    prompt_index: int
    index: int
    delta: str
    token_id: int
    finish_reason: str | None
    output: RequestOutput


class GrowingOutput:
    """A request's output and the events that made it; ``ready`` are those not yet delivered.

    ``end_answer(index)`` is called when a stop string ends an answer before the engine does; it
    returns the request's costs if that was its last answer.
    """

    def __init__(
        self,
        output: RequestOutput,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        prompt_index: int,
        end_answer: Callable[[int], dict[Phase, Totals] | None],
    ) -> None:
        self.output = output
        self.ready: list[StreamEvent] = []
        self._prompt_index = prompt_index
        self._params = params
        self._tokenizer = tokenizer
        self._end_answer = end_answer
        self._streams = [
            TextStream(
                tokenizer,
                stop=params.stop,
                min_tokens=params.min_tokens,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
            for _ in range(params.n)
        ]
        output.outputs = [CompletionOutput(index) for index in range(params.n)]
        if params.logprobs is not None:
            for answer in output.outputs:
                answer.logprobs, answer.cumulative_logprob = [], 0.0

    def take(self, event: TokenEvent, token: int) -> None:
        output, now = self.output, time.monotonic()
        answer, stream = output.outputs[event.index], self._streams[event.index]
        if answer.finish_reason is not None:
            return
        metrics = output.metrics
        metrics.first_token_time = metrics.first_token_time or now
        metrics.num_generated += 1
        output.num_cached_tokens = event.num_cached_tokens
        answer.token_ids.append(token)
        self._take_logprobs(event, answer)
        delta = stream.push(token)
        costs = event.costs
        if stream.stop_reason is not None:
            answer.finish_reason, answer.stop_reason = "stop", stream.stop_reason
            costs = costs or self._end_answer(event.index)
        elif event.finish_reason is not None:
            delta += stream.finish()
            answer.finish_reason = event.finish_reason.value
            if stream.stop_reason is not None:  # completed by the bytes that were held back
                answer.finish_reason, answer.stop_reason = "stop", stream.stop_reason
            elif token in self._params.stop_token_ids:
                answer.stop_reason = token
        answer.text += delta
        if all(other.finish_reason is not None for other in output.outputs):
            output.finished = True
            metrics.finished_time = now
            if costs is not None:
                metrics.prefill, metrics.decode = costs[Phase.PREFILL], costs[Phase.DECODE]
        self.ready.append(
            StreamEvent(self._prompt_index, event.index, delta, token, answer.finish_reason, output)
        )

    def _take_logprobs(self, event: TokenEvent, answer: CompletionOutput) -> None:
        if event.prompt_logprobs is not None:
            rest = [self._named(scores) for scores in event.prompt_logprobs]
            self.output.prompt_logprobs = [None, *rest]
        if event.logprobs is not None and answer.logprobs is not None:
            answer.logprobs.append(self._named(event.logprobs))
            answer.cumulative_logprob = (answer.cumulative_logprob or 0) + event.logprobs.logprob

    def _named(self, scores: TokenLogprobs) -> Logprobs:
        def named(token: int, logprob: float, rank: int) -> Logprob:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            return Logprob(logprob, rank, text)

        found = {t: named(t, logprob, i + 1) for i, (t, logprob) in enumerate(scores.top)}
        found.setdefault(scores.token, named(scores.token, scores.logprob, scores.rank))
        return found

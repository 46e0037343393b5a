"""/v1/completions: texts or ids, one prompt or several, with echo and log probabilities."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from msgspec import UNSET, UnsetType

from stairs.errors import InvalidRequestError
from stairs.outputs import Logprobs, RequestOutput, StreamEvent
from stairs.server.answers import Answers, Prompt
from stairs.server.replies import (
    Account,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    Usage,
    encode,
)
from stairs.server.schemas import MAX_PROMPTS, CompletionRequest
from stairs.server.service import Service, new_id

__all__ = ["Completions"]


class Completions:
    """One request on its way through the server. Choice ``i`` of prompt ``p`` is p · n + i."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self._service = service
        self._request = request
        self._model = service.check_model(request.model)
        self._id = new_id("cmpl")
        self._created = int(time.time())
        # Scoring a prompt: echo with max_tokens 0. The one token computed for it is not given.
        self._scores_only = request.max_tokens == 0
        if self._scores_only and not request.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1, got 0; 0 goes with echo only", param="max_tokens"
            )
        if self._scores_only and request.stream:
            raise InvalidRequestError("max_tokens 0 cannot be streamed", param="max_tokens")

    async def prompts(self) -> list[Prompt]:
        request, service = self._request, self._service
        given = request.prompt
        many = isinstance(given, list) and not isinstance(given[0], int)
        prompts: Sequence[str | list[int]] = given if many else [given]  # type: ignore[assignment,list-item]
        if len(prompts) * request.n > MAX_PROMPTS:
            raise InvalidRequestError(
                f"{len(prompts)} prompts times n {request.n} are more than {MAX_PROMPTS} answers",
                param="n",
            )
        params = service.sampling(
            request,
            max_tokens=1 if self._scores_only else request.max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
        )
        grammar = await service.grammar(request.response_format, None)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(await service.encode(texts))
        return [
            Prompt(
                next(encoded) if isinstance(prompt, str) else prompt,
                params,
                text=prompt if isinstance(prompt, str) else None,
                salt=request.cache_salt,
                grammar=grammar,
            )
            for prompt in prompts
        ]

    # -- whole ------------------------------------------------------------------------------

    async def reply(self, answers: Answers) -> Completion:
        await answers.settled()
        outputs = [one.output for one in answers.running]
        if self._scores_only:
            for output in outputs:
                _take_back(output)
        return Completion(
            self._id,
            self._created,
            self._model,
            [choice for p, output in enumerate(outputs) for choice in self._choices(p, output)],
            Usage.of(outputs),
            Account.of(outputs, self._service.kv_bytes_per_token),
        )

    def _choices(self, p: int, output: RequestOutput) -> list[CompletionChoice]:
        choices = []
        for answer in output.outputs:
            scores = _Scores(self._request.logprobs)
            text = self._echo(output, scores)
            if answer.logprobs is not None:
                for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
                    scores.add(self._text(token), found[token].logprob, found)
            reason: FinishReason = "length" if answer.finish_reason == "length" else "stop"
            choices.append(
                CompletionChoice(
                    p * self._request.n + answer.index,
                    text + answer.text,
                    scores.found,
                    reason,
                    UNSET if answer.stop_reason is None else answer.stop_reason,
                )
            )
        return choices

    def _echo(self, output: RequestOutput, scores: _Scores) -> str:
        """The prompt's text, and its log probabilities: the first token has none."""
        if not self._request.echo:
            return ""
        tokens = output.prompt_token_ids
        for token, found in zip(tokens, output.prompt_logprobs or (), strict=False):
            scores.add(self._text(token), found[token].logprob if found else None, found)
        if output.prompt is not None:
            return output.prompt
        return self._service.tokenizer.decode(tokens)

    def _text(self, token: int) -> str:
        return self._service.tokenizer.decode([token], skip_special_tokens=False)

    # -- streamed ---------------------------------------------------------------------------

    async def chunks(self, answers: Answers) -> AsyncIterator[bytes]:
        request = self._request
        include_usage = bool(request.stream_options and request.stream_options.include_usage)
        usage = None if include_usage else UNSET
        written: dict[tuple[int, int], _Scores] = {}
        async for events in answers.events():
            choices = [self._chunk(event, written) for event in events]
            yield b"".join(self._event([one], usage) for one in choices if one is not None)
        if include_usage:
            await answers.settled()
            outputs = [one.output for one in answers.running]
            account = Account.of(outputs, self._service.kv_bytes_per_token)
            yield self._event([], Usage.of(outputs), account)

    def _chunk(
        self, event: StreamEvent, written: dict[tuple[int, int], _Scores]
    ) -> CompletionChoice | None:
        answer = event.output.outputs[event.index]
        key = event.prompt_index, event.index
        text = ""
        scores = written.get(key)
        if scores is None:
            scores = written[key] = _Scores(self._request.logprobs)
            text = self._echo(event.output, scores)
        if answer.logprobs is not None:
            found = answer.logprobs[scores.num_answer_tokens]
            scores.add(self._text(event.token_id), found[event.token_id].logprob, found)
            scores.num_answer_tokens += 1
        text += event.delta
        if not text and event.finish_reason is None and answer.logprobs is None:
            return None
        reason: FinishReason | None = None
        if event.finish_reason is not None:
            reason = "length" if event.finish_reason == "length" else "stop"
        stop = UNSET if answer.stop_reason is None or reason is None else answer.stop_reason
        index = event.prompt_index * self._request.n + event.index
        return CompletionChoice(index, text, scores.take(), reason, stop)

    def _event(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        account: Account | UnsetType = UNSET,
    ) -> bytes:
        chunk = Completion(self._id, self._created, self._model, choices, usage, account)
        return b"data: " + encode(chunk) + b"\n\n"


class _Scores:
    """OpenAI's parallel lists; offsets count the characters of the tokens before."""

    def __init__(self, num_top: int | None) -> None:
        self._num_top = num_top
        self._offset = 0
        self.found = None if num_top is None else CompletionLogprobs()
        self.num_answer_tokens = 0

    def add(self, text: str, logprob: float | None, found: Logprobs | None) -> None:
        if self.found is None or self._num_top is None:
            return
        self.found.tokens.append(text)
        self.found.token_logprobs.append(logprob)
        top = sorted((found or {}).values(), key=lambda one: one.rank)[: self._num_top]
        named = {one.decoded_token: one.logprob for one in top}
        self.found.top_logprobs.append(named if found else None)
        self.found.text_offset.append(self._offset)
        self._offset += len(text)

    def take(self) -> CompletionLogprobs | None:
        """What was added since the last chunk."""
        found = self.found
        if found is not None:
            self.found = CompletionLogprobs()
        return found


def _take_back(output: RequestOutput) -> None:
    """Forget the token that was only computed because an engine's request needs one."""
    for answer in output.outputs:
        answer.text, answer.token_ids, answer.finish_reason = "", [], "length"
        answer.logprobs = None if answer.logprobs is None else []

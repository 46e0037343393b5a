"""/v1/chat/completions: from a request to prompts, and from answers to the reply or its chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from msgspec import UNSET, UnsetType

from stairs.errors import InvalidRequestError
from stairs.outputs import CompletionOutput, Logprobs, StreamEvent
from stairs.server.answers import Answers, Prompt
from stairs.server.replies import (
    Account,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    FinishReason,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
    encode,
)
from stairs.server.schemas import ChatRequest
from stairs.server.service import Service, message_dict, new_id
from stairs.server.tools import CallReader, ToolUse
from stairs.text.tokenizer import Tokenizer

__all__ = ["Chat"]


class Chat:
    """One request on its way through the server."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self._service = service
        self._request = request
        self._model = service.check_model(request.model)
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._tools = ToolUse.of(request, service.tokenizer)

    async def prompt(self) -> Prompt:
        request, service = self._request, self._service
        max_tokens = request.max_completion_tokens
        if max_tokens is None:
            max_tokens = request.max_tokens
        if max_tokens == 0:
            raise InvalidRequestError("max_tokens must be at least 1, got 0", param="max_tokens")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = service.sampling(request, max_tokens=max_tokens, logprobs=logprobs)
        grammar = await service.grammar(request.response_format, self._tools)
        messages = [message_dict(message) for message in request.messages]
        messages, tools = self._tools.in_template(messages)
        tokens = await service.encode_chat(
            messages, tools=tools, template_kwargs=request.chat_template_kwargs
        )
        return Prompt(tokens, params, salt=request.cache_salt, grammar=grammar)

    # -- whole ------------------------------------------------------------------------------

    async def reply(self, answers: Answers) -> ChatCompletion:
        await answers.settled()
        (output,) = (one.output for one in answers.running)
        return ChatCompletion(
            self._id,
            self._created,
            self._model,
            [self._choice(answer) for answer in output.outputs],
            Usage.of([output]),
            Account.of([output], self._service.kv_bytes_per_token),
        )

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        reader = self._tools.reader()
        text, calls = reader.push(answer.text)
        rest, more = reader.finish()
        content, calls = text + rest, calls + more
        message = ChatMessage(content if content or not calls else None)
        if calls:
            message.tool_calls = calls
        logprobs = None
        if answer.logprobs is not None:
            pairs = zip(answer.token_ids, answer.logprobs, strict=True)
            logprobs = ChatLogprobs([self._named(token, found) for token, found in pairs])
        reason = _reason(answer.finish_reason, called=bool(calls))
        return ChatChoice(answer.index, message, logprobs, reason, answer.stop_reason)

    def _named(self, token: int, found: Logprobs) -> TokenLogprob:
        top = sorted(found.items(), key=lambda item: item[1].rank)[
            : self._request.top_logprobs or 0
        ]
        tokenizer = self._service.tokenizer
        return TokenLogprob(
            found[token].decoded_token,
            found[token].logprob,
            _bytes(tokenizer, token),
            [TopLogprob(one.decoded_token, one.logprob, _bytes(tokenizer, id)) for id, one in top],
        )

    # -- streamed ---------------------------------------------------------------------------

    async def chunks(self, answers: Answers) -> AsyncIterator[bytes]:
        num_answers = self._request.n
        writers = [_Writer(self._tools.reader()) for _ in range(num_answers)]
        include_usage = bool(
            self._request.stream_options and self._request.stream_options.include_usage
        )
        usage = None if include_usage else UNSET
        first = [ChunkChoice(i, Delta("assistant", "")) for i in range(num_answers)]
        yield b"".join(self._event([choice], usage) for choice in first)
        async for events in answers.events():
            data = b"".join(
                self._event([choice], usage)
                for event in events
                for choice in self._choices(writers[event.index], event)
            )
            if data:
                yield data
        if include_usage:
            await answers.settled()
            outputs = [one.output for one in answers.running]
            account = Account.of(outputs, self._service.kv_bytes_per_token)
            yield self._event([], Usage.of(outputs), account)

    def _event(
        self,
        choices: list[ChunkChoice],
        usage: Usage | UnsetType | None,
        account: Account | UnsetType = UNSET,
    ) -> bytes:
        chunk = ChatChunk(self._id, self._created, self._model, choices, usage, account)
        return b"data: " + encode(chunk) + b"\n\n"

    def _choices(self, writer: _Writer, event: StreamEvent) -> list[ChunkChoice]:
        """What a token adds: nothing while it is undecided, two chunks where it also ends."""
        answer = event.output.outputs[event.index]
        logprobs = None
        if answer.logprobs is not None:
            named = self._named(event.token_id, answer.logprobs[writer.num_tokens])
            logprobs = ChatLogprobs([named])
        writer.num_tokens += 1
        text, calls = writer.reader.push(event.delta)
        if event.finish_reason is not None:
            rest, more = writer.reader.finish()
            text, calls = text + rest, calls + more
        choices = []
        if text or calls or logprobs:
            delta = Delta(content=text if text or not calls else UNSET)
            if calls:
                delta.tool_calls = writer.numbered(calls)
            choices.append(ChunkChoice(event.index, delta, logprobs))
        if event.finish_reason is not None:
            reason = _reason(event.finish_reason, called=writer.num_calls > 0)
            stop = UNSET if answer.stop_reason is None else answer.stop_reason
            choices.append(ChunkChoice(event.index, Delta(), None, reason, stop))
        return choices


class _Writer:
    """How far one answer's stream has come."""

    def __init__(self, reader: CallReader) -> None:
        self.reader = reader
        self.num_tokens = 0
        self.num_calls = 0

    def numbered(self, calls: list[ToolCall]) -> list[ToolCall]:
        for call in calls:
            call.index = self.num_calls
            self.num_calls += 1
        return calls


def _reason(reason: str | None, *, called: bool) -> FinishReason | None:
    if reason == "stop" and called:
        return "tool_calls"
    return "length" if reason == "length" else "stop"


def _bytes(tokenizer: Tokenizer, token: int) -> list[int]:
    return list(tokenizer.token_bytes(token))

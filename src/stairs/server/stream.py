"""How answers leave: server-sent events that end with the client, and the watch over both kinds.

A client that goes away ends its request: its answers are aborted, streamed or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stairs.errors import StairsError
from stairs.server.answers import Answers, ClientGoneError
from stairs.server.errors import error_reply
from stairs.server.replies import encode

__all__ = ["EventStream", "Reply", "watched"]

_log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"


class Reply(Response):
    """A struct of ``replies`` as JSON."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode(content)


@asynccontextmanager
async def watched(receive: Receive, answers: Answers) -> AsyncIterator[None]:
    """Run the block while the client is there; whatever then still runs is aborted."""
    watch = asyncio.create_task(_cancel_when_gone(receive, answers))
    try:
        yield
    finally:
        watch.cancel()
        answers.close()


async def _cancel_when_gone(receive: Receive, answers: Answers) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answers.cancel()


class EventStream(Response):
    """``chunks`` as server-sent events, then [DONE]; an error on the way is the last event."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], answers: Answers) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with watched(receive, self._answers):
                await self._send(send)
        except ClientGoneError:
            pass

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        with self._reporting() as failure:
            async for data in self._chunks:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": failure or DONE})

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[bytearray]:
        failure = bytearray()
        try:
            yield failure
        except ClientGoneError:
            raise
        except StairsError as error:
            failure += b"data: " + encode(error_reply(error)) + b"\n\n"
        except Exception:
            _log.exception("a stream failed")
            failure += b"data: " + encode(error_reply(StairsError("internal error"))) + b"\n\n"

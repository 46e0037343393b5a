"""What the gate lets in, driven as ASGI: clients that stop half-way, and many at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from stairs.server.gate import Gate
from stairs.server.metrics import Metrics

LIMIT = 1000


async def app(scope, receive, send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(len(body)).encode()})


def gate(*, stall: float = 1000) -> Gate:
    return Gate(app, api_keys=(), max_body_bytes=LIMIT, metrics=Metrics("tiny"), stall=stall)


async def ask(to: Gate, pieces: AsyncIterator[bytes]) -> tuple[int, bytes]:
    """Status and body of a POST whose body comes in ``pieces``."""
    sent: list[dict] = []

    async def receive() -> dict:
        piece = await anext(pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "headers": []}
    await to(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def whole(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def error(body: bytes) -> dict:
    return json.loads(body)["error"]


def test_a_body_in_pieces_arrives_whole() -> None:
    assert asyncio.run(ask(gate(), whole(b"a" * 600, b"b" * 400))) == (200, b"1000")
    status, body = asyncio.run(ask(gate(), whole(b"a" * 600, b"b" * 401)))
    assert status == 413 and error(body)["code"] == "body_too_large"


def test_a_client_that_stops_half_way_is_let_go() -> None:
    async def stops() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.Event().wait()

    status, body = asyncio.run(ask(gate(stall=0.05), stops()))
    assert status == 408 and error(body)["code"] == "timeout"


def test_bodies_that_are_coming_in_have_an_end_together() -> None:
    """64 of the largest size; once they are there, or gone, there is room again."""

    async def body() -> None:
        one, go = gate(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"a" * LIMIT
            await go.wait()

        waiting = [asyncio.create_task(ask(one, slow())) for _ in range(64)]
        while one._coming < 64 * LIMIT:
            await asyncio.sleep(0)
        status, answer = await ask(one, whole(b"a"))
        assert status == 429 and error(answer)["code"] == "overloaded"
        go.set()
        assert {status for status, _ in await asyncio.gather(*waiting)} == {200}
        assert one._coming == 0
        assert await ask(one, whole(b"a")) == (200, b"1")

    asyncio.run(body())

"""What every request passes before a route sees it: an id, the key, the size of its body.

Plain ASGI. A body is read here up to the limit and then handed on whole, so a larger one is
refused before anything parses it, with or without Content-Length.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stairs.errors import OverloadedError
from stairs.server.errors import error_reply, status_reply
from stairs.server.metrics import Metrics
from stairs.server.replies import ErrorReply, encode

__all__ = ["Gate"]

_access = logging.getLogger("stairs.access")
_LABEL = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_STALL = 60.0  # seconds that a client may take to send a further piece of its body
_BODIES = 64  # of the largest size may be coming in at once
_PATIENCE = 5.0  # seconds that a client may go on sending what was refused
_OPEN = frozenset({"/health"})
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_POLLED = frozenset({"/health", "/metrics"})


class Gate:
    """``api_keys``: what may be sent as Bearer token or Basic password; none: everyone may in."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        max_body_bytes: int,
        metrics: Metrics,
        stall: float = _STALL,
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics
        self._stall = stall
        self._coming = 0  # bytes of bodies that are being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        scope.setdefault("state", {})["arrival"] = began
        headers = Headers(scope=scope)
        label = headers.get("x-request-id", "")
        request_id = label if _LABEL.fullmatch(label) else uuid.uuid4().hex
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._admit(scope, headers, receive, send_marked)
        finally:
            self._note(scope, request_id, status, time.monotonic() - began)

    async def _admit(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if self._keys and scope["path"] not in _OPEN and not self._has_key(headers):
            reply = status_reply(401, "a valid API key is needed", "invalid_api_key")
            how = 'Bearer, Basic realm="stairs", charset="UTF-8"'
            await _refuse(send, 401, reply, ("WWW-Authenticate", how))
            return
        length = headers.get("content-length", "")
        body: bytearray | None = None
        if not (length.isdigit() and int(length) > self._max_body_bytes):
            try:
                body = await self._read(receive)
            except TimeoutError:
                reply = status_reply(408, "the body did not come", "timeout")
                await _refuse(send, 408, reply, ("Connection", "close"))
                return
            except OverloadedError as error:
                await _refuse(send, 429, error_reply(error), ("Retry-After", "1"))
                return
        if body is None:
            await _discard(receive)
            limit = f"the body is larger than {self._max_body_bytes} bytes"
            reply = status_reply(413, limit, "body_too_large")
            await _refuse(send, 413, reply, ("Connection", "close"))
            return
        await self._app(scope, _Replay(bytes(body), receive), send)

    async def _read(self, receive: Receive) -> bytearray | None:
        """The whole body; None if it is larger than one may be. Raises TimeoutError for a client
        that stops half-way, OverloadedError where all that are coming in take too much memory."""
        body = bytearray()
        try:
            while True:
                async with asyncio.timeout(self._stall):
                    message = await receive()
                if message["type"] != "http.request":
                    return body  # hung up half-way: the route will find out
                data = message.get("body", b"")
                body += data
                self._coming += len(data)
                if len(body) > self._max_body_bytes:
                    return None
                if self._coming > _BODIES * self._max_body_bytes:
                    raise OverloadedError(f"{self._coming} bytes of requests are coming in")
                if not message.get("more_body", False):
                    return body
        finally:
            self._coming -= len(body)

    def _has_key(self, headers: Headers) -> bool:
        kind, _, value = headers.get("authorization", "").partition(" ")
        given = value.strip().encode()
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != "bearer":
            return False
        # All are compared, in constant time each: timing tells nothing of a key.
        return any([hmac.compare_digest(given, key) for key in self._keys])

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = scope.get("route")
        handler = getattr(route, "path", None) or "other"
        # A client may name any method; as labels they would be kept for ever.
        method = scope["method"] if handler != "other" and scope["method"] in _METHODS else "any"
        self._metrics.answered(method, handler, status, seconds)
        # What monitors ask for every few seconds would drown the rest.
        level = logging.DEBUG if scope["path"] in _POLLED else logging.INFO
        if _access.isEnabledFor(level):
            # As it was sent: decoded, it may hold line breaks, and so lines of a client's making.
            path = scope["raw_path"].decode("latin-1")
            line = f"{scope['method']:.10} {path:.100} {status} {seconds * 1000:.0f} ms"
            _access.log(level, "%s", line, extra={"request_id": request_id})


class _Replay:
    """The body once, then whatever the client still does: in the end, it hangs up."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _discard(receive: Receive) -> None:
    """Swallow what the client still sends, for a while: a connection that is closed under its
    hands would take our answer with it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            while (await receive()).get("more_body", False):
                pass


async def _refuse(send: Send, status: int, reply: ErrorReply, header: tuple[str, str]) -> None:
    headers = [(b"content-type", b"application/json"), tuple(part.encode() for part in header)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": encode(reply)})

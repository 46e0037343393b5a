"""``stairs serve``: from options to a server that runs until a signal, then drains and returns."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from stairs.checkpoints.checkpoint import Checkpoint, open_checkpoint
from stairs.checkpoints.sources import cache_folder
from stairs.errors import ConfigError
from stairs.server import wire
from stairs.server.app import make_app
from stairs.server.bridge import Bridge
from stairs.server.logs import configure_logging
from stairs.server.metrics import Metrics
from stairs.server.options import ServeOptions
from stairs.server.prefixes import PrefixTable, definitions_of, folder_for
from stairs.server.service import Service
from stairs.text.tokenizer import Tokenizer

__all__ = ["serve"]

_log = logging.getLogger(__name__)
_LINE_EVERY = 10.0  # seconds
_LAST_WORDS = 5  # seconds in which clients that outlast the draining are told so


def serve(options: ServeOptions) -> None:
    """Run until SIGINT or SIGTERM. Raises what a user can put right before or while loading."""
    configure_logging(options.log_level, options.log_format)
    options.engine  # a wrong one is told before anything is opened  # noqa: B018
    listener = _listen(options.host, options.port)
    try:
        checkpoint = open_checkpoint(
            options.model, revision=options.revision, load_format=options.load_format
        )
        asyncio.run(_serve(options, checkpoint, listener))
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded, so that a port in use is said at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with --port", param="port"
            ) from None
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}", param="host"
        ) from None
    return listener


async def _serve(options: ServeOptions, checkpoint: Checkpoint, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    service = make_service(options, checkpoint)
    bridge = service.bridge
    config = uvicorn.Config(
        make_app(service, options),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(options.drain_timeout) + _LAST_WORDS,
        lifespan="off",
    )
    server = _Server(config)

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
        else:
            _log.info("stopping; running answers have %g s to end", options.drain_timeout)
            server.should_exit = True
            loop.call_later(options.drain_timeout, bridge.give_up)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    engine = asyncio.create_task(bridge.run())
    http = asyncio.create_task(server.serve(sockets=[listener]))
    lines = asyncio.create_task(_log_lines(service.metrics))
    announce = asyncio.create_task(_announce(service, options, listener))
    await asyncio.wait({engine, http}, return_when=asyncio.FIRST_COMPLETED)
    announce.cancel()
    lines.cancel()
    server.should_exit = True
    await http
    await bridge.stop()
    await engine  # raises what kept it from loading


def make_service(options: ServeOptions, checkpoint: Checkpoint) -> Service:
    """Everything but the sockets, not yet running."""
    tokenizer = _tokenizer(options, checkpoint)
    names = options.served_model_name or (_own_name(options.model),)
    metrics = Metrics(names[0])
    system_prompt, given = definitions_of(options)
    folder = folder_for(options, checkpoint, cache_folder())
    prefixes = PrefixTable(tokenizer, folder, given=given)

    def start(address: str) -> wire.Start:
        model = str(checkpoint.path)
        return wire.Start(address, model, options.revision, options.load_format, options.engine)

    bridge = Bridge(
        start,
        tokenizer,
        metrics,
        max_queue=options.max_queue,
        watchdog_timeout=options.watchdog_timeout,
        prepare=prefixes.restore,
    )
    prefixes.attach(bridge)
    return Service(
        names=names,
        tokenizer=tokenizer,
        defaults=checkpoint.generation,
        bridge=bridge,
        prefixes=prefixes,
        metrics=metrics,
        system_prompt=system_prompt,
        pin_memory_fraction=options.pin_memory_fraction,
    )


def _tokenizer(options: ServeOptions, checkpoint: Checkpoint) -> Tokenizer:
    tokenizer = checkpoint.tokenizer()
    if options.chat_template is None:
        return tokenizer
    try:
        source = options.chat_template.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: {error}", param="chat_template") from None
    return tokenizer.with_chat_template(source)


def _own_name(model: str) -> str:
    """An alias or hub id as it is; of a path its last part."""
    path = Path(model)
    return path.name if path.exists() else model


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again after draining, and we exit with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _announce(service: Service, options: ServeOptions, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    _log.info("loading %s; %s/health says when it is ready", service.names[0], url)
    await service.bridge.became_ready.wait()
    info = service.bridge.info
    assert info is not None
    _log.info(
        "%s in %s: %d K/V blocks of %d tokens, context %d; loaded in %.1f s",
        service.names[0],
        info.dtype,
        info.num_blocks,
        info.block_size,
        info.max_model_len,
        info.load_seconds,
    )
    smallest = info.block_size + 1
    _log.info("prompts of %d tokens or more can share their beginning", smallest)
    print(f"Ready: chat at {url}, OpenAI's API at {url}/v1", file=sys.stderr, flush=True)


async def _log_lines(metrics: Metrics) -> None:
    while True:
        await asyncio.sleep(_LINE_EVERY)
        line = metrics.log_line(time.monotonic())
        if line is not None:
            _log.info("%s", line)

"""Serving: listening, loading the model meanwhile, and ending without cutting anybody off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from notes_cli.errors import NotesError
from notes_cli.serve.app import Service

DRAIN = 30.0  # seconds that answers have to come to their ends
SWITCH = 0.0005  # seconds that a thread which reads a large request may keep the others from their next call
KEEP_ALIVE = 75  # seconds; balancers expect more than their own 60
CUT_OFF = "ASGI callable returned without completing response"  # what uvicorn says of a client that takes nothing


class _Server(uvicorn.Server):
    """Signals are ours: the first one has it drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _is_news(record: logging.LogRecord) -> bool:
    """Whether it is worth telling: a client that is cut off, as it takes nothing, is no fault of anybody here."""
    return CUT_OFF not in record.getMessage()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any. Raise NotesError where that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Asyncio turns Nagle's algorithm off for TCP alone, and by that name: without it a stream on a connection that is
    # used again waits 40 ms for the client's acknowledgement.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(2048)
    except (OSError, OverflowError) as error:
        found.close()
        why = getattr(error, "strerror", None) or str(error)
        raise NotesError(f"cannot listen on {host} port {port}: {why}", "Choose another host or port") from error
    return found


def serve(service: Service, listening: socket.socket, told: Callable[[], object], drain: float = DRAIN) -> None:
    """Serve until a signal asks for the end, and those that were asked before it have their answers, or `drain`
    seconds have passed; a second signal ends it at once. `told`: the model is there. Raise what its loading raised."""
    sys.setswitchinterval(SWITCH)
    asyncio.run(_serve(service, listening, told, drain))


async def _serve(service: Service, listening: socket.socket, told: Callable[[], object], drain: float) -> None:
    config = uvicorn.Config(
        service.app,
        log_config=None,
        log_level="error",  # what clients do wrong is told them, not the log
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=5,
        server_header=False,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = _Server(config)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    asked = asyncio.Event()

    def end() -> None:
        if asked.is_set():
            server.should_exit = server.force_exit = True
        asked.set()

    loop = asyncio.get_running_loop()
    service.end = lambda: loop.call_soon_threadsafe(end)
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # not on Windows, nor outside the main thread
            loop.add_signal_handler(number, end)
    scheduler = service.scheduler
    scheduler.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    ready = asyncio.wrap_future(scheduler.ready)
    ending = asyncio.ensure_future(asked.wait())
    try:
        over = asyncio.wrap_future(scheduler.over)
        first: set[asyncio.Future[Any]] = {serving, ready, ending, over}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            told()
            await asyncio.wait(first - {ready}, return_when=asyncio.FIRST_COMPLETED)
        service.draining = True
        end_at = loop.time() + drain
        while scheduler.load and not over.done() and loop.time() < end_at and not server.should_exit:
            await asyncio.sleep(0.05)
        if over.done():
            over.result()
    finally:
        service.draining = server.should_exit = True
        ending.cancel()
        await asyncio.to_thread(scheduler.close)
        await serving

"""Runs the HTTP server: listens, loads the model meanwhile, and drains running answers at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import uvicorn

from notes_cli.errors import NotesError

if TYPE_CHECKING:
    from notes_cli.serve.app import Service
    from notes_cli.serve.upstream import Upstream

    Served = Service | Upstream

DRAIN = 30.0  # seconds for running answers at the end
SWITCH = 0.0005  # seconds of Python's switch interval: threads that parse large requests must not delay the others
KEEP_ALIVE = 75  # seconds; more than the 60 of load balancers
# uvicorn's message about a stalled client that was cut off, which is not an error of the server
CUT_OFF = "ASGI callable returned without completing response"


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to `_serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 is any port. Raises NotesError if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name TCP as their protocol. With it a stream on a reused
    # connection waits 40 ms for the client's acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        why = getattr(error, "strerror", None) or str(error)
        raise NotesError(f"cannot listen on {host} port {port}: {why}", "Choose another host or port") from error
    return listening


def serve(service: Served, listening: socket.socket, on_ready: Callable[[], object], drain: float = DRAIN) -> None:
    """Serve until SIGINT or SIGTERM, then wait at most `drain` seconds for running answers; a second signal ends it at
    once. `on_ready` is called once the model is loaded. Raises the error of loading it."""
    sys.setswitchinterval(SWITCH)
    asyncio.run(_serve(service, listening, on_ready, drain))


async def _serve(service: Served, listening: socket.socket, on_ready: Callable[[], object], drain: float) -> None:
    config = uvicorn.Config(
        service.app,
        log_config=None,
        log_level="error",  # clients' errors are in their responses
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=5,
        server_header=False,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = _Server(config)
    logging.getLogger("uvicorn.error").addFilter(lambda record: CUT_OFF not in record.getMessage())
    ended = asyncio.Event()

    def end() -> None:
        if ended.is_set():
            server.should_exit = server.force_exit = True
        ended.set()

    loop = asyncio.get_running_loop()
    service.end = lambda: loop.call_soon_threadsafe(end)
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # not on Windows, nor outside the main thread
            loop.add_signal_handler(number, end)
    scheduler = service.scheduler
    scheduler.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    loaded: Future[Any] = scheduler.ready
    ready = asyncio.wrap_future(loaded)
    ending = asyncio.ensure_future(ended.wait())
    over = asyncio.wrap_future(scheduler.over)
    try:
        first: set[asyncio.Future[Any]] = {serving, ready, ending, over}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            on_ready()
            await asyncio.wait(first - {ready}, return_when=asyncio.FIRST_COMPLETED)
        service.draining = True
        end_at = loop.time() + drain
        while scheduler.load and not over.done() and loop.time() < end_at and not server.should_exit:
            await asyncio.sleep(0.05)
    finally:
        service.draining = server.should_exit = True
        ending.cancel()
        await asyncio.to_thread(scheduler.close)
        await serving
    if scheduler.over.done():
        await over  # raises the error of a decode thread that failed, also while the server was ending

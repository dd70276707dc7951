"""What `notes ask` is told by a server of its user, as it comes (serve/own.py): the events of one call, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import anyio

from notes_cli.errors import NotesError
from notes_cli.serve import wire
from notes_cli.serve.answers import PING, PINGING, EventStream, event
from notes_cli.serve.jobs import JobEvent
from notes_cli.serve.own import Own
from notes_cli.serve.parsing import ChatRequest, no_forms
from notes_cli.serve.refusals import Refused
from notes_cli.serve.replies import Json
from notes_cli.serve.scheduler import Scheduler


class OwnEvents(EventStream):
    """The last event is `document`, `begun`, `error`, or `declined`: what this server cannot do, or not now."""

    def __init__(self, scheduler: Scheduler, data: Any, *, forms: bool) -> None:
        """`forms`: answers may be held to a grammar. Raise Refused where nothing is begun."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Json | None] = asyncio.Queue()
        own = Own(data, self._hear)
        if own.formed and not forms:
            raise no_forms()
        self._job = scheduler.submit(ChatRequest(""), self._ended, own)

    def _hear(self, told: Json | None) -> None:
        """In the scheduler's thread."""
        with suppress(RuntimeError):  # asyncio has ended, and with it whoever would hear
            self._loop.call_soon_threadsafe(self._queue.put_nowait, told)

    def _ended(self, told: JobEvent) -> None:
        """Likewise."""
        if isinstance(told, Refused):
            self._hear({"declined": str(told)})
        elif isinstance(told, NotesError):
            self._hear({"error": wire.as_json(told)})
        self._hear(None)

    def close(self) -> None:
        self._job.leave()

    async def events(self) -> AsyncGenerator[bytes, None]:
        while True:
            # Before Python 3.12 asyncio.wait_for ignores a cancellation that comes together with an event.
            with anyio.move_on_after(PING) as waiting:
                told = await self._queue.get()
            if waiting.cancelled_caught:
                yield PINGING
                continue
            if told is None:
                return
            yield event(told)

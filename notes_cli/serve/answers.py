"""From a request to its reply: put to the scheduler, heard of word by word, given up when the client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from notes_cli.errors import NotesError
from notes_cli.serve.answering import TextDelta, Written
from notes_cli.serve.jobs import Begun, Job
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.refusals import Refused, body, refused
from notes_cli.serve.replies import Json, Reply, headers, joined
from notes_cli.serve.scheduler import Scheduler

T = TypeVar("T")
Outcome = Begun | TextDelta | Written | NotesError | None
PING = 15.0  # seconds without a word after which a comment is sent, for those between us and the client
PINGING = b": still there\n\n"
STALLED = 60.0  # seconds that a client has to take what is sent to it


class Submission:
    """What the scheduler tells of the prompts of one request. Close it, and what goes on of them ends."""

    def __init__(self, scheduler: Scheduler, replies: Sequence[Reply]) -> None:
        """Raise Refused where too many wait already."""
        self.replies = replies
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()
        self._jobs: list[Job] = []
        self._open = len(replies)
        try:
            for number, reply in enumerate(replies):
                self._jobs.append(scheduler.submit(reply.request, self._teller(number)))
        except Refused:
            self.close()
            raise

    def _teller(self, number: int) -> Callable[[Outcome], None]:
        def tell(told: Outcome) -> None:  # in the scheduler's thread
            with suppress(RuntimeError):  # asyncio has ended, and with it whoever would hear
                self._loop.call_soon_threadsafe(self._told.put_nowait, (number, told))

        return tell

    async def next(self) -> tuple[Reply, Begun | TextDelta | Written] | None:
        """What is told next, and of which prompt; None when all is said. Raise Refused for what has failed."""
        while self._open:
            number, told = await self._told.get()
            reply = self.replies[number]
            if isinstance(told, NotesError):
                raise refused(told)
            if told is not None:
                reply.hear(told)
                return reply, told
            self._open -= 1
        return None

    async def all(self) -> None:
        while await self.next():
            pass

    def close(self) -> None:
        for job in self._jobs:
            job.leave()


async def answer(request: Request, scheduler: Scheduler, every: Sequence[ChatRequest], model: str) -> Response:
    """Answer a request that has one prompt or several. Raise Refused, ClientDisconnect."""
    if len(every) > scheduler.limits.requests:  # trying again would not help
        what = f"{len(every):,} prompts in one request: this server takes {scheduler.limits.requests:,} at a time"
        raise Refused(400, what, param="prompt", code="invalid_value")
    choices = every[0].params.choices
    heard = Submission(scheduler, [Reply(asked, model, number * choices) for number, asked in enumerate(every)])
    if not every[0].stream:
        try:
            await while_there(request.receive, heard.all())
        finally:
            heard.close()
        return JSONResponse(joined(heard.replies), headers=headers(heard.replies))
    return await begun(request, Stream(heard))


async def while_there(receive: Receive, work: Awaitable[T]) -> T:
    """Do some work, for as long as the client is there. Raise ClientDisconnect when it has gone."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return await doing
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, for as long as the client is there and takes them: each is data, and none has a name."""

    def __init__(self) -> None:
        self.background = None
        self.status_code = 200
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(receive, self._send(send))
        except (ClientDisconnect, TimeoutError):
            pass  # whoever has gone, or takes nothing, is not told
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.events()) as events:
            async for data in events:
                await _put(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def begin(self) -> None:
        """Wait for what comes first, not for ever: until then an error has a status of its own. Raise NotesError."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """What is sent, as `event` has it, or PINGING."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up what nobody hears any more."""
        raise NotImplementedError


async def begun(request: Request, stream: EventStream) -> EventStream:
    """A stream that has begun. Raise NotesError for what fails before, and ClientDisconnect."""
    try:
        await while_there(request.receive, stream.begin())
    except BaseException:
        stream.close()
        raise
    return stream


class Stream(EventStream):
    """A reply in chunks."""

    def __init__(self, heard: Submission) -> None:
        super().__init__()
        self._heard = heard
        self._first: asyncio.Future[Any] | None = None

    async def begin(self) -> None:
        self._first = asyncio.ensure_future(self._heard.next())
        await asyncio.wait({self._first}, timeout=PING)
        if self._first.done():
            self._first.result()

    def close(self) -> None:
        self._heard.close()
        if self._first is not None and not self._first.cancel() and not self._first.cancelled():
            self._first.exception()  # which nobody is told any more

    async def events(self) -> AsyncGenerator[bytes, None]:
        for reply in self._heard.replies:
            for chunk in reply.opening():
                yield event(chunk)
        try:
            waiting = self._first or asyncio.ensure_future(self._heard.next())
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=PING)
                if not done:
                    yield PINGING
                    continue
                if (found := waiting.result()) is None:
                    break
                for chunk in found[0].chunks(found[1]):
                    yield event(chunk)
                self._first = waiting = asyncio.ensure_future(self._heard.next())
        except Refused as error:
            yield event(body(error))
            return
        for chunk in self._heard.replies[0].closing(self._heard.replies):
            yield event(chunk)
        yield b"data: [DONE]\n\n"


class ProgressQueue:
    """How far something has come that takes long, for whoever waits for it."""

    def __init__(self) -> None:
        self.gone = False  # nobody waits any more
        self._queue: asyncio.Queue[Json] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def add(self, progress: Json) -> None:
        """In the scheduler's thread. Raise Refused where nobody waits."""
        if self.gone:
            raise Refused(400, "the client has gone")
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, progress)

    async def next(self) -> Json:
        return await self._queue.get()


class Events(EventStream):
    """Progress of a compile, then the skill."""

    def __init__(self, told: ProgressQueue, result: asyncio.Future[Json]) -> None:
        super().__init__()
        self._told, self._result = told, result
        self._first = asyncio.ensure_future(told.next())

    async def begin(self) -> None:
        both: set[asyncio.Future[Any]] = {self._first, self._result}
        await asyncio.wait(both, timeout=PING, return_when=asyncio.FIRST_COMPLETED)
        if self._result.done() and not self._first.done():
            self._result.result()

    def close(self) -> None:
        self._told.gone = True
        self._first.cancel()
        if not self._result.cancel() and not self._result.cancelled():
            self._result.exception()  # which nobody is told any more

    async def events(self) -> AsyncGenerator[bytes, None]:
        following = self._first
        try:
            while True:
                both: set[asyncio.Future[Any]] = {following, self._result}
                done, _ = await asyncio.wait(both, timeout=PING, return_when=asyncio.FIRST_COMPLETED)
                if following in done:
                    yield event(following.result())
                    following = asyncio.ensure_future(self._told.next())
                elif self._result in done:
                    break
                else:
                    yield PINGING
        finally:
            following.cancel()
        try:
            found = {"skill": self._result.result()}
        except NotesError as error:
            found = body(refused(error))
        yield event(found)


async def _put(send: Send, data: bytes) -> None:
    """Send a part of a body. Raise TimeoutError where it is not taken."""
    with anyio.fail_after(STALLED):
        await send({"type": "http.response.body", "body": data, "more_body": True})


def event(data: Json) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"

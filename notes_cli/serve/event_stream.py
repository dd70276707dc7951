"""Submits requests to the scheduler, streams their events as server-sent events, and cancels them on disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from notes_cli.errors import NotesError
from notes_cli.serve.access_log import COUNTS, counts_of
from notes_cli.serve.jobs import JobEvent, ServerJob
from notes_cli.serve.refusals import Refused, as_refusal, error_body
from notes_cli.serve.replies import AnswerEvent, Json, Reply, headers, join_replies
from notes_cli.serve.scheduler import DecodeThread

T = TypeVar("T")
PING = 15.0  # seconds without an event after which a comment is sent, as proxies close idle connections
PINGING = b": still there\n\n"
STALLED = 60.0  # seconds that a client has to take sent data


class Submission:
    """The prompts of one request, in the scheduler; `close` cancels them."""

    def __init__(self, scheduler: DecodeThread, replies: Sequence[Reply]) -> None:
        """Submit the prompts. Raises Refused if too many requests are waiting."""
        self.replies = replies
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, JobEvent]] = asyncio.Queue()
        self._jobs: list[ServerJob] = []
        self._running = len(replies)
        try:
            for number, reply in enumerate(replies):
                self._jobs.append(scheduler.submit(reply.request, self._on_event(number)))
        except Refused:
            self.close()
            raise

    def _on_event(self, number: int) -> Callable[[JobEvent], None]:
        def put(event: JobEvent) -> None:  # in a thread of the scheduler
            with suppress(RuntimeError):  # asyncio's loop has ended
                self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

        return put

    async def next(self) -> tuple[Reply, AnswerEvent] | None:
        """Wait for the next event, and return it with its reply; None at the end. Raises Refused if a prompt fails."""
        while self._running:
            number, event = await self._events.get()
            reply = self.replies[number]
            if isinstance(event, NotesError):
                raise as_refusal(event)
            if event is not None:
                reply.add(event)
                return reply, event
            self._running -= 1
        return None

    async def wait(self) -> None:
        while await self.next():
            pass

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()


async def respond(
    request: Request,
    scheduler: DecodeThread,
    replies: Sequence[Reply],
    join: Callable[[Sequence[Reply]], Json] = join_replies,
) -> Response:
    """Answer a request with one prompt or several. Raises Refused, ClientDisconnect."""
    if len(replies) > scheduler.limits.requests:  # trying again would not help
        message = f"{len(replies):,} prompts in one request: this server takes {scheduler.limits.requests:,} at a time"
        raise Refused(400, message, param="prompt", code="invalid_value")
    request.scope.setdefault("state", {})[COUNTS] = partial(counts_of, replies)
    submission = Submission(scheduler, replies)
    if not replies[0].request.stream:
        try:
            await while_connected(request.receive, submission.wait())
        finally:
            submission.close()
        return JSONResponse(join(submission.replies), headers=headers(submission.replies))
    return await start_stream(request, ReplyStream(submission))


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; raises ClientDisconnect as soon as the client disconnects."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends server-sent events, with data and no names, until the client disconnects or stalls."""

    def __init__(self) -> None:
        self.background = None
        self.status_code = 200
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientDisconnect, TimeoutError):
            pass  # the client is gone or stalled
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.events()) as events:
            async for data in events:
                await _send_part(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def begin(self) -> None:
        """Wait at most PING seconds for the first event: until then an error gets its own status. Raises NotesError."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield encoded events, or PINGING."""
        raise NotImplementedError

    def close(self) -> None:
        """Cancel the work."""
        raise NotImplementedError


async def start_stream(request: Request, stream: EventStream) -> EventStream:
    """Wait for the first event of a stream. Raises NotesError for an error before it, and ClientDisconnect."""
    try:
        await while_connected(request.receive, stream.begin())
    except BaseException:
        stream.close()
        raise
    return stream


class ReplyStream(EventStream):
    """Streams a reply in the chunks or named events of its API."""

    def __init__(self, submission: Submission) -> None:
        super().__init__()
        self._submission = submission
        self._next: asyncio.Future[Any] | None = None

    async def begin(self) -> None:
        self._next = asyncio.ensure_future(self._submission.next())
        await asyncio.wait({self._next}, timeout=PING)
        if self._next.done():
            self._next.result()

    def close(self) -> None:
        self._submission.close()
        if self._next is not None and not self._next.cancel() and not self._next.cancelled():
            self._next.exception()  # retrieved, as asyncio would log it

    async def events(self) -> AsyncGenerator[bytes, None]:
        first = self._submission.replies[0]
        for reply in self._submission.replies:
            for chunk in reply.opening():
                yield encode_event(chunk, first.named_events)
        try:
            following = self._next or asyncio.ensure_future(self._submission.next())
            while True:
                done, _ = await asyncio.wait({following}, timeout=PING)
                if not done:
                    yield PINGING
                    continue
                if (result := following.result()) is None:
                    break
                reply, event = result
                for chunk in reply.chunks(event):
                    yield encode_event(chunk, first.named_events)
                self._next = following = asyncio.ensure_future(self._submission.next())
        except Refused as error:
            yield encode_event(first.failure(error), first.named_events)
            return
        for chunk in first.closing(self._submission.replies):
            yield encode_event(chunk, first.named_events)
        if not first.named_events:
            yield b"data: [DONE]\n\n"


class ProgressQueue:
    """Passes the progress of a compile from the decode thread to the client's stream."""

    def __init__(self) -> None:
        self.closed = False  # the client is gone
        self._queue: asyncio.Queue[Json] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def add(self, progress: Json) -> None:
        """Add progress, in the decode thread. Raises Refused if the client is gone, which ends the compile."""
        if self.closed:
            raise Refused(400, "the client has gone")
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, progress)

    async def next(self) -> Json:
        return await self._queue.get()


class CompileStream(EventStream):
    """Streams the progress of a compile, then the skill."""

    def __init__(self, progress: ProgressQueue, result: asyncio.Future[Json]) -> None:
        super().__init__()
        self._progress, self._result = progress, result
        self._first = asyncio.ensure_future(progress.next())

    async def begin(self) -> None:
        both: set[asyncio.Future[Any]] = {self._first, self._result}
        await asyncio.wait(both, timeout=PING, return_when=asyncio.FIRST_COMPLETED)
        if self._result.done() and not self._first.done():
            self._result.result()

    def close(self) -> None:
        self._progress.closed = True
        self._first.cancel()
        if not self._result.cancel() and not self._result.cancelled():
            self._result.exception()  # retrieved, as asyncio would log it

    async def events(self) -> AsyncGenerator[bytes, None]:
        following = self._first
        try:
            while True:
                both: set[asyncio.Future[Any]] = {following, self._result}
                done, _ = await asyncio.wait(both, timeout=PING, return_when=asyncio.FIRST_COMPLETED)
                if following in done:
                    yield encode_event(following.result())
                    following = asyncio.ensure_future(self._progress.next())
                elif self._result in done:
                    break
                else:
                    yield PINGING
        finally:
            following.cancel()
        try:
            last = {"skill": self._result.result()}
        except NotesError as error:
            last = error_body(as_refusal(error))
        yield encode_event(last)


async def _send_part(send: Send, data: bytes) -> None:
    """Send a part of a body. Raises TimeoutError if the client does not take it."""
    with anyio.fail_after(STALLED):
        await send({"type": "http.response.body", "body": data, "more_body": True})


def encode_event(data: Json, named: bool = False) -> bytes:
    """Encode an event. `named`: its name is the value of `type`."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {data['type']}\n".encode() if named else b""
    return name + b"data: " + text.encode("utf-8", "replace") + b"\n\n"

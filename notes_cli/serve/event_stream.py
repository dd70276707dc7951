"""Submits requests to the scheduler, replies with JSON or a stream, and cancels them on disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from notes_cli.errors import NotesError
from notes_cli.serve.answer_tasks import JobEvent, ServerJob
from notes_cli.serve.metrics import COUNTS, counts_of
from notes_cli.serve.refusals import Refused, as_refusal, error_body, invalid
from notes_cli.serve.replies import AnswerEvent, Framing, Json, Reply, headers, join_replies
from notes_cli.serve.scheduler import DecodeThread

T = TypeVar("T")
PING = 15.0  # seconds without an event after which a comment is sent, as proxies close idle connections
PINGING = b": still there\n\n"
BLANK = b" "  # before the next line of JSON, where there are no comments
STALLED = 60.0  # seconds that a client has to take sent data
EVENTS, LINES = b"text/event-stream; charset=utf-8", b"application/x-ndjson"  # types of streams
# Escapes of characters that are line breaks for some clients (httpx's iter_lines), though not in server-sent events.
LINE_ENDS = str.maketrans({char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"})


async def events_of(
    scheduler: DecodeThread, replies: Sequence[Reply]
) -> AsyncGenerator[tuple[Reply, AnswerEvent], None]:
    """Submit the prompts of one request, and yield the events with their replies, to which they are added. Closing it
    cancels the prompts. Raises Refused if too many requests are waiting, or if a prompt fails."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[Reply, JobEvent]]()

    def put(reply: Reply, event: JobEvent) -> None:  # in a thread of the scheduler
        with suppress(RuntimeError):  # asyncio's loop has ended
            loop.call_soon_threadsafe(arrived.put_nowait, (reply, event))

    jobs: list[ServerJob] = []
    try:
        for reply in replies:
            jobs.append(scheduler.submit(reply.request, partial(put, reply)))
        running = len(jobs)
        while running:
            reply, event = await arrived.get()
            if isinstance(event, NotesError):
                raise as_refusal(event)
            if event is None:
                running -= 1
                continue
            reply.add(event)
            if isinstance(event, AnswerEvent):
                yield reply, event
    finally:
        for job in jobs:
            job.cancel()


async def respond(
    request: Request,
    scheduler: DecodeThread,
    replies: Sequence[Reply],
    join: Callable[[Sequence[Reply]], Json] = join_replies,
) -> ASGIApp:
    """Answer a request with one prompt or several. Raises NotesError, ClientDisconnect."""
    if len(replies) > scheduler.options.requests:  # trying again would not help
        message = f"{len(replies):,} prompts in one request: this server takes {scheduler.options.requests:,} at a time"
        raise invalid("prompt", message)
    request.scope.setdefault("state", {})[COUNTS] = partial(counts_of, replies)
    first = replies[0]
    if first.request.stream:
        events = _reply_events(scheduler, replies)

        def failure(error: Refused) -> bytes:
            return encode_event(first.failure(error), first.framing)

        return await start_stream(request, events, failure, first.framing)

    async def answered() -> None:
        async with aclosing(events_of(scheduler, replies)) as arriving:
            async for _ in arriving:
                pass

    await while_connected(request.receive, answered())
    return JSONResponse(join(replies), headers=headers(replies))


async def _reply_events(scheduler: DecodeThread, replies: Sequence[Reply]) -> AsyncGenerator[bytes, None]:
    """Submit the prompts, and yield the chunks or named events of the API. Raises Refused if a prompt fails."""
    first, begun = replies[0], False
    async with aclosing(events_of(scheduler, replies)) as arriving:
        async for reply, event in arriving:
            opening = [] if begun else [chunk for each in replies for chunk in each.opening()]
            for chunk in (*opening, *reply.chunks(event)):
                yield encode_event(chunk, first.framing)
            begun = True
    for chunk in first.closing(replies):
        yield encode_event(chunk, first.framing)
    if first.framing == "done":
        yield b"data: [DONE]\n\n"


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


async def start_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    failure: Callable[[Refused], bytes] = lambda error: encode_event(error_body(error)),
    framing: Framing = "done",
) -> ASGIApp:
    """Wait at most PING seconds for the first of encoded events: until then an error gets its own status. Return the
    response that sends them until the client disconnects or stalls, and comments while there are none. `failure`:
    encodes a later error. Raises NotesError, ClientDisconnect."""
    following = asyncio.ensure_future(anext(events, None))

    async def first() -> None:
        await asyncio.wait({following}, timeout=PING)
        if following.done():
            following.result()

    async def close() -> None:  # cancels the work
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await events.aclose()

    async def parts() -> AsyncGenerator[bytes, None]:
        nonlocal following
        try:
            while True:
                done, _ = await asyncio.wait({following}, timeout=PING)
                if not done:
                    yield BLANK if framing == "lines" else PINGING
                elif (data := following.result()) is not None:
                    yield data
                    following = asyncio.ensure_future(anext(events, None))
                else:
                    return
        except NotesError as error:
            yield failure(as_refusal(error))

    async def send_all(send: Send) -> None:
        kind = LINES if framing == "lines" else EVENTS
        headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(parts()) as arriving:
            async for data in arriving:
                with anyio.fail_after(STALLED):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def response(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, send_all(send))
        except (ClientDisconnect, TimeoutError):
            pass  # the client is gone or stalled
        finally:
            await close()

    try:
        await while_connected(request.receive, first())
    except BaseException:
        await close()
        raise
    return response


def encode_event(data: Json, framing: Framing = "done") -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)
    encoded = text.encode("utf-8", "replace")
    if framing == "lines":
        return encoded + b"\n"
    name = f"event: {data['type']}\n".encode() if framing == "named" else b""
    return name + b"data: " + encoded + b"\n\n"

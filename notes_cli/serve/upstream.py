"""A proxy in front of another server with OpenAI's API: it adds skills and errata to the messages of requests.

skill_texts.py edits the messages. Threads wait for the other server, with the standard library's HTTP client. If a
client disconnects, the connection to the other server is closed, which ends the answer there.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from notes_cli.errors import NotesError, reason
from notes_cli.serve.access_log import COUNTS
from notes_cli.serve.app import Options, application, read_body
from notes_cli.serve.errata import parse_correction
from notes_cli.serve.event_stream import EventStream, encode_event, while_connected
from notes_cli.serve.json_body import read_json
from notes_cli.serve.metrics import KIND, Metrics, render_metrics
from notes_cli.serve.refusals import Refused, error_body
from notes_cli.serve.skill_texts import Json, Placed, Placer
from notes_cli.sessions.global_correction import errata_of
from notes_cli.text.skill import Skill

CONNECT = 10.0  # seconds
SILENT = 600.0  # seconds without a byte, as in OpenAI's clients: a long prompt is read meanwhile
AT_A_TIME = 256  # requests that are passed on; more wait
PART = 1 << 16  # bytes
PASSED_ON = ("content-type", "accept", "anthropic-version", "anthropic-beta")  # headers of requests
RETURNED = ("content-type", "content-encoding", "retry-after", "x-request-id")  # headers of replies
LONGEST_CORRECTION = 1000  # characters
LONGEST_EVENT = 16 << 20  # bytes
MOST_TOKENS = 1 << 53  # that a reply may count
DONE = b"[DONE]"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """The other server. `key` is sent to it, and not shown."""

    url: str  # without /v1
    key: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str, key: str = "") -> Target:
        """Raises NotesError for an address that is not http(s)://HOST[:PORT][/PATH], and for an invalid key."""
        try:
            parts = urlsplit(url.strip())
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.query or parts.fragment:
            raise NotesError(f"{url!r} is no address of a server", "Write it like http://127.0.0.1:8000")
        if parts.username is not None or parts.password is not None:
            raise NotesError("the address of the upstream has a password in it", "Give a key by NOTES_UPSTREAM_KEY")
        if not all("!" <= letter <= "~" for letter in key):
            raise NotesError("the key of the upstream has a character that a header cannot have")
        return cls(url.strip().rstrip("/").removesuffix("/v1"), key)


class Call:
    """A request to the other server. `send` and `read` are for threads; `close` ends them from any other."""

    def __init__(self, target: Target, method: str, path: str, body: bytes = b"", headers: Json | None = None) -> None:
        parts = urlsplit(target.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=CONNECT)
        self._url, self._key, self._closed = target.url, target.key, False
        self._socket: socket.socket | None = None
        self._response: HTTPResponse | None = None
        key = {"Authorization": f"Bearer {target.key}"} if target.key else {}
        self._request = (method, parts.path + path, body or None, {**(headers or {}), **key, "Connection": "close"})

    def send(self) -> None:
        """Send it, and wait for the status and headers of the reply. Raises Refused."""
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            if self._closed:
                raise ConnectionAbortedError("closed")
            self._socket.settimeout(SILENT)
            self._connection.request(*self._request)
            self._response = self._connection.getresponse()
        except (OSError, HTTPException, ValueError) as error:
            raise self._failure(error) from error

    @property
    def status(self) -> int:
        return self._response.status if self._response else 0

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the reply that are returned to a client, each on one line."""
        assert self._response
        found = {name: " ".join(self._response.headers.get(name, "").split()) for name in RETURNED}
        return {name: value for name, value in found.items() if value and value.isprintable()}

    @property
    def streams(self) -> bool:
        return self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")

    def read(self, most: int = 0) -> bytes:
        """Read all of the reply, or at most so many bytes as soon as there are any. Raises Refused."""
        assert self._response
        try:
            data = self._response.read1(most) if most else self._response.read()
        except (OSError, HTTPException, ValueError) as error:
            raise self._failure(error) from error
        hidden = self._key if self.status >= 400 else ""  # errors may quote the request
        return data.replace(hidden.encode(), b"***") if hidden else data

    def close(self) -> None:
        self._closed = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._response is not None:
            with suppress(OSError, ValueError):  # another thread may be reading
                self._response.close()
        self._connection.close()

    def refuse_errors(self, data: bytes) -> None:
        """Raise Refused for a reply that the client must not see: a failure of the other server, or the refusal of its
        key."""
        if self.status in (401, 403):
            message = (
                f"the upstream {self._url} answers {self.status}: NOTES_UPSTREAM_KEY must be a key that it accepts"
            )
            raise Refused(502, message, code="upstream_key")
        if not 200 <= self.status < 300 and not 400 <= self.status < 500:
            body = _object(data)
            error = body.get("error", body)
            detail = error.get("message") if isinstance(error, dict) else error
            message = f"the upstream {self._url} answers {self.status}"
            if isinstance(detail, str) and detail.strip():
                message += f": {' '.join(detail.split())[:300]}".encode(errors="replace").decode()  # surrogates
            raise Refused(502, message, code="upstream_error")

    def _failure(self, error: Exception) -> Refused:
        if isinstance(error, TimeoutError):
            return Refused(504, f"the upstream {self._url} does not answer in time", code="upstream_timeout")
        if self._response is not None:
            return Refused(502, f"the upstream {self._url} broke off its answer", code="upstream_error")
        why = reason(error) if isinstance(error, OSError) else type(error).__name__
        return Refused(502, f"the upstream {self._url} cannot be reached: {why}", code="upstream_unreachable")


@dataclass(slots=True)
class Exchange:
    """One request: its pieces, and its token counts as the other server reports them."""

    placed: Placed | None = None
    usage_wanted: bool = True  # by the client, in its stream
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None  # seconds until the first event of a stream
    prompt: int = 0
    cached: int | None = None
    answer: int = 0

    def add(self, data: Json) -> None:
        """Take the counts of a reply or an event: from OpenAI's `usage`, else from llama-server's `timings`."""
        usage, timings = data.get("usage"), data.get("timings")
        if isinstance(usage, dict):
            self.prompt = _count(usage.get("prompt_tokens")) or 0
            self.answer = _count(usage.get("completion_tokens")) or 0
            details = usage.get("prompt_tokens_details")
            self.cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        if isinstance(timings, dict) and self.cached is None:
            self.cached = _count(timings.get("cache_n"))

    def text(self) -> str:
        """Return the counts for the access log."""
        if not self.prompt:
            return ""
        reused = "unknown" if self.cached is None else f"{self.cached:,}"
        first = "" if self.first is None else f", {round(1000 * self.first):,} ms"
        return f"prompt {self.prompt:,} tokens ({reused} reused{first}), answer {self.answer:,}, "


class Forwarding:
    """A pool of threads that wait for the other server; it has the methods of server.Work."""

    def __init__(self) -> None:
        self.ready: Future[None] = Future()
        self.over: Future[None] = Future()
        self.ready.set_result(None)
        self.load = 0
        self._pool = ThreadPoolExecutor(AT_A_TIME, "upstream")

    def start(self) -> None: ...

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


class Upstream:
    """The endpoints of the proxy."""

    def __init__(self, target: Target, placer: Placer, options: Options) -> None:
        self.scheduler = Forwarding()
        self.draining = False
        self.end: Callable[[], object] = lambda: None
        self.metrics = Metrics()
        self._target, self._placer, self._options = target, placer, options

    @property
    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.render_metrics),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/notes", self.skills),
            Route("/v1/notes/errata", self.correct, methods=["POST"]),
            Route("/v1/notes/skills", self.skills),
            Route("/v1/notes/skills/{name}", self.skill),
            Route("/v1/notes/{name}", self.skill),
            Route("/v1/{path:path}", self.forward, methods=["GET", "POST", "DELETE"]),
        ]
        return application(routes, self._options)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "draining" if self.draining else "ok"}, 503 if self.draining else 200)

    async def render_metrics(self, request: Request) -> Response:
        gauges = {"requests_running": float(self.scheduler.load)}
        return Response(render_metrics(self.metrics, gauges), media_type=KIND)

    # Skills and errata.

    async def skills(self, request: Request) -> Response:
        skills = await self.scheduler.run(self._placer.texts.all)
        return JSONResponse({"skills": [self._facts(skill) for skill in skills.values()]})

    async def skill(self, request: Request) -> Response:
        skill = await self.scheduler.run(lambda: self._placer.texts.find(request.path_params["name"]))
        spans = [place._asdict() for place in skill.fields]
        return JSONResponse({**self._facts(skill), "text": skill.text, "spans": spans})

    def _facts(self, skill: Skill) -> Json:
        standing = self._placer.texts.values(skill)
        return {"name": skill.name, "description": skill.description, "fields": skill.values, "standing": standing}

    async def correct(self, request: Request) -> Response:
        values = parse_correction((await self._read(request))[1])
        if max(map(len, values.values())) > LONGEST_CORRECTION:
            raise Refused(400, f"value has more than {LONGEST_CORRECTION:,} characters", param="value")
        texts = self._placer.texts
        added = await self.scheduler.run(lambda: texts.errata.add(errata_of(texts.all(), values)))
        errata = [{"skill": one.skill, "field": one.field, "was": one.was, "value": one.value} for one in added]
        return JSONResponse({"errata": errata})

    # Requests that are passed on.

    async def chat(self, request: Request) -> Response:
        _, data = await self._read(request)
        return await self._pass_on(request, *await self.scheduler.run(lambda: self._placed(data)))

    def _placed(self, data: Any) -> tuple[bytes, Exchange]:
        """Put skills and errata into a request. Raises NotesError."""
        try:
            placed = self._placer.place(data)
            body, usage_wanted = placed.body, True
            options = body.get("stream_options") or {}
            if body.get("stream") is True and isinstance(options, dict) and not options.get("include_usage"):
                body, usage_wanted = {**body, "stream_options": {**options, "include_usage": True}}, False
            return json.dumps(body, ensure_ascii=False).encode(), Exchange(placed, usage_wanted)
        except RecursionError:
            raise Refused(400, "the body is nested too deeply", code="invalid_json") from None

    async def forward(self, request: Request) -> Response:
        """Pass any other request on, unchanged."""
        path = request.scope["path"]
        if path.startswith("/v1/notes/") or ".." in path.split("/"):
            raise Refused(404, f"there is no {path[:200]!r} in front of another server")
        if request.method != "POST":
            return await self._pass_on(request, b"", Exchange())
        raw, data = await self._read(request)
        for key in ("notes", "model") if isinstance(data, dict) else ():
            if data.get(key) and (key == "notes" or self._names_skills(data[key])):
                raise Refused(400, "skills are put into messages: use /v1/chat/completions", param=key)
        return await self._pass_on(request, raw, Exchange())

    def _names_skills(self, model: object) -> bool:
        try:
            return bool(self._placer.skills_of_alias(model)[1])
        except Refused:
            return False  # a name of the other server

    async def _pass_on(self, request: Request, body: bytes, exchange: Exchange) -> Response:
        """Send a request, and return the reply. Raises Refused, ClientDisconnect."""
        path = quote(request.scope["path"]) + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        if body:
            headers["content-type"] = "application/json"
        call = Call(self._target, request.method, path, body, headers)
        request.scope.setdefault("state", {})[COUNTS] = exchange.text
        self.scheduler.load += 1
        relay, outcome = Relay(self, call, exchange), "failed"
        try:
            await while_connected(request.receive, self.scheduler.run(call.send))
            if call.streams:
                outcome = ""  # not known before its end
                return relay
            data = await while_connected(request.receive, self.scheduler.run(call.read))
            call.refuse_errors(data)
            outcome = "answered" if call.status < 400 else "refused"
        except ClientDisconnect:
            outcome = "gone"
            raise
        finally:
            if outcome:
                relay.finish(outcome)
        reply = _object(data) if call.status == 200 else {}
        exchange.add(reply)
        self.count(exchange)
        if reply and exchange.placed and exchange.placed.explain:
            with suppress(RecursionError):  # it is passed on as it is
                data = json.dumps({**reply, "notes": exchange.placed.notes}).encode()
        return Response(data, call.status, call.headers)

    def count(self, exchange: Exchange) -> None:
        """Add the counts of an answered request to the metrics."""
        metrics = self.metrics
        if not exchange.prompt:
            return
        if exchange.cached is None:
            metrics.unreported += exchange.prompt
        else:
            metrics.live += exchange.cached
            metrics.decoded += max(0, exchange.prompt - exchange.cached)
        metrics.generated += exchange.answer
        if exchange.first is not None:
            metrics.first_token.add(exchange.first)

    async def _read(self, request: Request) -> tuple[bytes, Any]:
        """Read a JSON body; return its bytes and its value. Raises Refused."""
        if self.draining:
            raise Refused(503, "the server is ending", code="draining", wait=5, last=True)
        raw = await read_body(request, self._options.body)
        return raw, await self.scheduler.run(lambda: read_json(raw))


class Relay(EventStream):
    """Passes a stream on as it arrives."""

    def __init__(self, upstream: Upstream, call: Call, exchange: Exchange) -> None:
        super().__init__()
        self._upstream, self._call, self._exchange = upstream, call, exchange
        self._finished = False

    def finish(self, outcome: str) -> None:
        """Close the connection, and count the outcome, once."""
        self._call.close()
        if not self._finished:
            self._finished = True
            self._upstream.scheduler.load -= 1
            self._upstream.metrics.outcomes[outcome] += 1

    def close(self) -> None:
        self.finish("gone")

    async def events(self) -> AsyncGenerator[bytes, None]:
        exchange, head = self._exchange, dict[str, Any]()
        notes = exchange.placed.notes if exchange.placed and exchange.placed.explain else None
        try:
            async for event in self._parts():
                data = _data(event)
                body = _object(data) if data else {}
                if exchange.first is None and body:
                    exchange.first = time.perf_counter() - exchange.began
                    named = ((key, body.get(key)) for key in ("id", "object", "created", "model"))
                    head = {key: value for key, value in named if isinstance(value, (str, int))}
                exchange.add(body)
                if not exchange.usage_wanted and body.get("usage") and not body.get("choices"):
                    continue  # an event that the client has not asked for
                if notes is not None and data == DONE:
                    yield encode_event({**head, "choices": [], "notes": notes})
                yield event
        except Refused as error:
            yield encode_event(error_body(error))
            self.finish("failed")
            return
        self._upstream.count(exchange)
        self.finish("answered")

    async def _parts(self) -> AsyncIterator[bytes]:
        """Yield whole events. Raises Refused."""
        waiting, searched = b"", 0
        while part := await self._upstream.scheduler.run(lambda: self._call.read(PART)):
            waiting += part
            while (end := _end_of_event(waiting, searched)) > 0:
                yield waiting[:end]
                waiting, searched = waiting[end:], 0
            searched = max(0, len(waiting) - 3)  # an empty line may have come in part
            if len(waiting) > LONGEST_EVENT:
                message = f"the upstream sends an event of more than {LONGEST_EVENT:,} bytes"
                raise Refused(502, message, code="upstream_error")
        if waiting:
            yield waiting


def _end_of_event(data: bytes, searched: int) -> int:
    """Return the end of the first event, after its empty line, which is not in the bytes `searched`; 0 if it is not
    complete."""
    ends = [place + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (place := data.find(mark, searched)) >= 0]
    return min(ends, default=0)


def _data(event: bytes) -> bytes:
    """Return the data of an event."""
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))


def _object(data: bytes) -> Json:
    """Return a JSON object; {} for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_TOKENS else None

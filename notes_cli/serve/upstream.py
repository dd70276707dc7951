"""A proxy in front of another server with OpenAI's API: it adds skills and errata to the messages of requests.

skill_texts.py edits the messages. If a client disconnects, the connection to the other server is closed, which ends the
answer there.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from notes_cli.errors import NotesError
from notes_cli.explanations import erratum_as_json
from notes_cli.serve.app import SIZE, application, client_of, read_body
from notes_cli.serve.event_stream import encode_event, start_stream, while_connected
from notes_cli.serve.library import parse_correction
from notes_cli.serve.metrics import COUNTS, KIND, Metrics, render_metrics
from notes_cli.serve.prepare import Options
from notes_cli.serve.refusals import Refused, read_json
from notes_cli.serve.scheduler import LARGE
from notes_cli.serve.skill_texts import Json, Placed, Placer
from notes_cli.sessions.session import errata_of
from notes_cli.text.skill import Skill

CONNECT = 10.0  # seconds
SILENT = 600.0  # seconds without a byte, as in OpenAI's clients: a long prompt is read meanwhile
AT_A_TIME = 256  # requests that are passed on; more wait
PASSED_ON = ("content-type", "accept", "anthropic-version", "anthropic-beta")  # headers of requests
RETURNED = ("content-type", "content-encoding", "retry-after", "x-request-id")  # headers of replies
LONGEST_CORRECTION = 1000  # characters
LONGEST_EVENT = 16 << 20  # bytes
MOST_TOKENS = 1 << 53  # that a reply may count
DONE = b"[DONE]"
PROBE = 2.0  # seconds that the other server has to report its health
KEYS = {  # of the system text and of the messages, by path
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), ("system", "messages")),
    "/v1/responses": ("instructions", "input"),
}

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
        if not self.prompt:
            return ""
        reused = "unknown" if self.cached is None else f"{self.cached:,}"
        first = "" if self.first is None else f", {round(1000 * self.first):,} ms"
        return f"prompt {self.prompt:,} tokens ({reused} reused{first}), answer {self.answer:,}, "


class Upstream:
    """The endpoints of the proxy; for server.py it is its own scheduler, too."""

    def __init__(self, target: Target, placer: Placer, options: Options) -> None:
        self.ready: Future[None] = Future()
        self.over: Future[None] = Future()
        self.ready.set_result(None)
        self.load = 0
        self.draining = False
        self.end: Callable[[], object] = lambda: None
        self.metrics = Metrics()
        self._target, self._placer, self._options = target, placer, options
        limits = httpx.Limits(max_connections=AT_A_TIME, max_keepalive_connections=0)
        certificates = ssl.create_default_context()  # those of the system
        self._large = anyio.CapacityLimiter(1)
        self._client = httpx.AsyncClient(limits=limits, verify=certificates, trust_env=False)

    @property
    def scheduler(self) -> Upstream:
        return self

    def start(self) -> None: ...
    def close(self) -> None: ...

    @property
    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.render_metrics),
            *(Route(path, self.chat, methods=["POST"]) for path in ("/v1/chat/completions", *KEYS)),
            Route("/v1/notes", self.skills),
            Route("/v1/notes/errata", self.correct, methods=["POST"]),
            Route("/v1/notes/skills", self.skills),
            Route("/v1/notes/skills/{name}", self.skill),
            Route("/v1/notes/{name}", self.skill),
            Route("/{path:path}", self.forward, methods=["GET", "POST", "PUT", "DELETE"]),
        ]
        return application(routes, self._options)

    async def health(self, request: Request) -> Response:
        """Report the health of this server and of the other one, which may have no path for it."""
        status = "draining" if self.draining else "ok"
        if not self.draining:
            try:
                found = await self._client.get(f"{self._target.url}/health", timeout=PROBE)
                status = {503: "loading"}.get(found.status_code, "failed" if found.status_code >= 500 else "ok")
            except (httpx.HTTPError, httpx.InvalidURL):
                status = "unreachable"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def render_metrics(self, request: Request) -> Response:
        gauges = {"requests_running": float(self.load)}
        return Response(render_metrics(self.metrics, gauges), media_type=KIND)

    # Skills and errata.

    async def skills(self, request: Request) -> Response:
        skills = await anyio.to_thread.run_sync(self._placer.texts.all)
        return JSONResponse({"skills": [self._facts(skill) for skill in skills.values()]})

    async def skill(self, request: Request) -> Response:
        skill = await anyio.to_thread.run_sync(self._placer.texts.find, request.path_params["name"])
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
        added = await anyio.to_thread.run_sync(lambda: texts.errata.add(errata_of(texts.all(), values)))
        return JSONResponse({"errata": list(map(erratum_as_json, added))})

    # Requests that are passed on.

    async def chat(self, request: Request) -> ASGIApp:
        _, data = await self._read(request)
        client, keys = client_of(request, self._options), KEYS.get(request.url.path)
        return await self._pass_on(request, *await self._in_thread(request, partial(self._placed, data, client, keys)))

    def _placed(self, data: Any, client: str, keys: tuple[str, str] | None) -> tuple[bytes, Exchange]:
        """Put skills and errata into a request. `keys`: as in KEYS; None for a chat. Raises NotesError."""
        try:
            placed = self._placer.place_in(keys, data, client) if keys else self._placer.place(data, client)
            body, usage_wanted = placed.body, True
            options = body.get("stream_options") or {}
            streams = keys is None and body.get("stream") is True and isinstance(options, dict)
            if streams and not options.get("include_usage"):
                body, usage_wanted = {**body, "stream_options": {**options, "include_usage": True}}, False
            return json.dumps(body, ensure_ascii=False).encode(), Exchange(placed, usage_wanted)
        except RecursionError:
            raise Refused(400, "the body is nested too deeply", code="invalid_json") from None

    async def forward(self, request: Request) -> ASGIApp:
        """Pass any other request on, unchanged."""
        path = request.scope["path"]
        if path.startswith("/v1/notes/") or ".." in path.split("/"):
            raise Refused(404, f"there is no {path[:200]!r} in front of another server")
        if request.method != "POST":
            return await self._pass_on(request, b"", Exchange())
        raw, data = await self._read(request)
        given = data if isinstance(data, dict) else {}
        skills: list[str] = []
        with suppress(Refused):  # a name of the other server
            skills = self._placer.skills_of_alias(given.get("model"))[1]
        if given.get("notes") or skills:
            param = "notes" if given.get("notes") else "model"
            where = ", ".join(("/v1/chat/completions", *KEYS))
            raise Refused(400, f"skills are put into messages: use {where}", param=param)
        return await self._pass_on(request, raw, Exchange())

    async def _pass_on(self, request: Request, body: bytes, exchange: Exchange) -> ASGIApp:
        """Send a request, and return the reply. Raises Refused, ClientDisconnect."""
        path = quote(request.scope["path"]) + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers["accept-encoding"] = "identity"
        if body:
            headers["content-type"] = "application/json"
        if self._target.key:
            headers["Authorization"] = f"Bearer {self._target.key}"
        request.scope.setdefault("state", {})[COUNTS] = exchange.text
        self.load += 1
        outcome: str | None = "failed"
        try:
            reply = await while_connected(request.receive, self._send(request.method, path, body, headers))
            if reply.status_code == 200 and reply.headers.get("content-type", "").startswith("text/event-stream"):
                outcome = None  # not known before its end
                return await start_stream(request, self._relay(reply, exchange))
            data = await while_connected(request.receive, self._read_all(reply))
            self._refuse_errors(reply.status_code, data)
            outcome = "answered" if reply.status_code < 400 else "refused"
        except ClientDisconnect:
            outcome = outcome and "gone"
            raise
        finally:
            if outcome:
                self._end(outcome)
        answer = _object(data) if reply.status_code == 200 else {}
        exchange.add(answer)
        self.count(exchange)
        if answer and exchange.placed and exchange.placed.explain:
            with suppress(RecursionError):  # it is passed on as it is
                data = json.dumps({**answer, "notes": exchange.placed.notes}).encode()
        returned = {name: " ".join(reply.headers[name].split()) for name in RETURNED if name in reply.headers}
        return Response(data, reply.status_code, returned)

    async def _send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        """Send a request, and wait for the status and headers of the reply. Raises Refused."""
        timeout = httpx.Timeout(SILENT, connect=CONNECT, pool=None)
        with self._refusing("cannot be reached", "upstream_unreachable"):
            request = self._client.build_request(
                method, self._target.url + path, content=body or None, headers=headers, timeout=timeout
            )
            return await self._client.send(request, stream=True)

    async def _read_all(self, reply: httpx.Response) -> bytes:
        async with aclosing(reply):
            with self._refusing("broke off its answer"):
                data = b"".join([part async for part in reply.aiter_raw()])
        hidden = self._target.key if reply.status_code >= 400 else ""  # errors may quote the request
        return data.replace(hidden.encode(), b"***") if hidden else data

    @contextmanager
    def _refusing(self, failure: str, code: str = "upstream_error") -> Iterator[None]:
        """Convert errors of the connection to Refused."""
        name = f"the upstream {self._target.url}"
        try:
            yield
        except httpx.TimeoutException as error:
            raise Refused(504, f"{name} does not answer in time", code="upstream_timeout") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Refused(502, f"{name} {failure}: {error or type(error).__name__}", code=code) from error

    def _refuse_errors(self, status: int, data: bytes) -> None:
        """Raises Refused for a reply that the client must not see: a failure of that server, a refusal of its key."""
        message = f"the upstream {self._target.url} answers {status}"
        if status in (401, 403):
            raise Refused(502, f"{message}: NOTES_UPSTREAM_KEY must be a key that it accepts", code="upstream_key")
        if status == 503:  # as engines answer while they load their model
            raise Refused(503, message, code="upstream_unavailable", wait=5)
        if not 200 <= status < 300 and not 400 <= status < 500:
            body = _object(data)
            error = body.get("error", body)
            detail = error.get("message") if isinstance(error, dict) else error
            if isinstance(detail, str) and detail.strip():
                message += f": {' '.join(detail.split())[:300]}".encode(errors="replace").decode()  # surrogates
            raise Refused(502, message, code="upstream_error")

    async def _relay(self, reply: httpx.Response, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream as they arrive. Raises Refused."""
        outcome, head = "gone", dict[str, Any]()
        notes = exchange.placed.notes if exchange.placed and exchange.placed.explain else None
        try:
            async for event in self._events(reply):
                data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
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
            self.count(exchange)
            outcome = "answered"
        except Refused:
            outcome = "failed"
            raise
        finally:
            self._end(outcome)
            await reply.aclose()

    async def _events(self, reply: httpx.Response) -> AsyncIterator[bytes]:
        """Yield whole events. Raises Refused."""
        waiting, searched = b"", 0
        with self._refusing("broke off its answer"):
            async for part in reply.aiter_raw():
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

    def _end(self, outcome: str) -> None:
        self.load -= 1
        self.metrics.outcomes[outcome] += 1

    def count(self, exchange: Exchange) -> None:
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
            metrics.first_token.observe(exchange.first)

    async def _in_thread(self, request: Request, function: Callable[[], T]) -> T:
        """Call a function that reads the request's body in another thread. Large ones take turns."""
        limiter = self._large if request.scope["state"][SIZE] > LARGE else None
        return await anyio.to_thread.run_sync(function, limiter=limiter)

    async def _read(self, request: Request) -> tuple[bytes, Any]:
        """Read a JSON body; return its bytes and its value. Raises Refused."""
        if self.draining:
            raise Refused(503, "the server is ending", code="draining", wait=5, last=True)
        raw = await read_body(request, self._options.body)
        return raw, await self._in_thread(request, partial(read_json, raw))


def _end_of_event(data: bytes, searched: int) -> int:
    """Return the end of the first event, after its empty line, which is not in the bytes `searched`; 0: incomplete."""
    ends = [place + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (place := data.find(mark, searched)) >= 0]
    return min(ends, default=0)


def _object(data: bytes) -> Json:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_TOKENS else None

"""The HTTP endpoints. They read requests in preparation threads of the scheduler, and submit work on K/V to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from notes_cli import output
from notes_cli.engine.model import Model
from notes_cli.errors import NotesError
from notes_cli.serve import errata, library
from notes_cli.serve.answers import Events, ProgressQueue, answer, begun
from notes_cli.serve.parsing import ChatRequest, Reader, parse_chat, parse_completion
from notes_cli.serve.prepare import check_messages, check_size, model_of
from notes_cli.serve.prometheus import KIND, exposed
from notes_cli.serve.questions import PreparedTurn, prepare
from notes_cli.serve.reading import read_json
from notes_cli.serve.refusals import Refused, body, refused
from notes_cli.serve.scheduler import Scheduler
from notes_cli.serve.security import Guard, from_browser
from notes_cli.serve.webpage import page_routes

BODY = 16 << 20  # bytes of a request
SLOW = 30.0  # seconds that a client has to send it
CURL = "application/x-www-form-urlencoded"  # the type that `curl -d` sends, whatever the body is

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How the service is offered."""

    host: str = "127.0.0.1"
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()  # pages of other sites that may ask
    body: int = BODY
    page: bool = True  # to look at, at /
    forms: bool = True  # requests may bring a grammar, or a schema, that the answer is held to
    token: str = ""  # a key for processes of the same user (serve/registry.py)


class Service:
    """The endpoints over one scheduler."""

    def __init__(self, scheduler: Scheduler, options: Options) -> None:
        self.scheduler, self.options = scheduler, options
        self.draining = False
        self._ignored: set[str] = set()  # keys of requests of which it was logged that they change nothing
        self.end: Callable[[], object] = lambda: None  # has the server end, from any thread

    @property
    def app(self) -> Starlette:
        """For a server of ASGI."""
        routes = self.routes()
        keys = self.options.keys
        if keys and self.options.token:
            keys = (*keys, self.options.token)
        guard = Middleware(Guard, keys, self.options.host, self.options.origins, pages_of(routes))
        cors = Middleware(CORSMiddleware, allow_origins=self.options.origins, allow_methods=["*"], allow_headers=["*"])
        handlers: dict[Any, Any] = {
            NotesError: _told,
            HTTPException: _http,
            ClientDisconnect: _gone,
            Exception: _fault,
        }
        middleware = [*([cors] if self.options.origins else []), guard]  # a refusal can be read by the page, too
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/notes", self.skills),
            Route("/v1/notes/compile", self.compile, methods=["POST"]),
            Route("/v1/notes/explain", self.explain, methods=["POST"]),
            Route("/v1/notes/errata", self.errata, methods=["POST"]),
            Route("/v1/notes/sessions", self.sessions),
            Route("/v1/notes/skills", self.skills),
            Route("/v1/notes/skills/{name}", self.skill, methods=["GET", "DELETE"]),
            Route("/v1/notes/{name}", self.skill, methods=["GET", "DELETE"]),
            *(page_routes() if self.options.page else ()),
        ]

    # What a server is asked.

    async def health(self, request: Request) -> Response:
        if self.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not self.scheduler.ready.done():
            return JSONResponse({"status": "loading"}, 503)
        if self.scheduler.ended:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        there = self.scheduler.ready.done() and not self.scheduler.ended  # also while it drains
        gauges = await asyncio.wrap_future(self.scheduler.call(self.scheduler.gauges)) if there else {}
        return Response(exposed(self.scheduler.metrics, gauges), media_type=KIND)

    async def models(self, request: Request) -> Response:
        self._check()
        names = await self._prepare(lambda: [one.name for one in self.scheduler.segment_cache.known()])
        model = self.scheduler.names[0]
        listed = [self._model(name) for name in (model, *(f"{model}@{name}" for name in names))]
        return JSONResponse({"object": "list", "data": listed})

    async def model(self, request: Request) -> Response:
        self._check()
        name = request.path_params["name"]
        if not name:
            return await self.models(request)

        def found() -> None:
            for skill in model_of(name, self.scheduler.names):
                self.scheduler.segment_cache.segment(skill)

        await self._prepare(found)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        """The model, with the tokens of its context as vLLM (`max_model_len`) and llama-server (`meta`) name them."""
        found = {"id": name, "object": "model", "created": self.scheduler.started, "owned_by": "notes"}
        longest, model = self.scheduler.state.longest, self.scheduler.workspace.model
        meta = {"n_vocab": model.n_vocab, "n_ctx_train": model.n_ctx_train}
        if longest is None:  # nothing bounds it
            return {**found, "meta": meta}
        return {**found, "max_model_len": longest, "meta": {**meta, "n_ctx": longest}}

    async def tokenize(self, request: Request) -> Response:
        given = Reader(await self._body(request))
        content, special = given.needed("content"), given.flag("parse_special")
        begins, pieces = given.flag("add_special"), given.flag("with_pieces")
        given.end()

        def tokens() -> Sequence[object]:
            check_size(self.scheduler.state, [content], "content")
            workspace = self.scheduler.workspace
            found = workspace.model.tokenize(content, special=special)
            ids = [int(token) for token in (workspace.with_bos(found) if begins else found)]
            return [_piece(workspace.model, token) for token in ids] if pieces else ids

        return JSONResponse({"tokens": await self._prepare(tokens)})

    # Questions.

    async def chat(self, request: Request) -> Response:
        asked = await self._chat(request)
        return await answer(request, self.scheduler, [asked], asked.model or self.scheduler.names[0])

    async def completions(self, request: Request) -> Response:
        data = await self._body(request)
        every = await self._prepare(lambda: parse_completion(data, forms=self.options.forms))
        self._log_ignored(every[0])
        return await answer(request, self.scheduler, every, every[0].model or self.scheduler.names[0])

    # The library.

    async def skills(self, request: Request) -> Response:
        return JSONResponse({"skills": await self._prepare(lambda: library.listed(self.scheduler))})

    async def skill(self, request: Request) -> Response:
        name, way = request.path_params["name"], library.removed if request.method == "DELETE" else library.shown
        return JSONResponse(await self._prepare(lambda: way(self.scheduler, name)))

    async def compile(self, request: Request) -> Response:
        data, told = await self._body(request), ProgressQueue()
        compiling = asyncio.ensure_future(library.compile_text(self.scheduler, data, told.add))
        return await begun(request, Events(told, compiling))

    async def explain(self, request: Request) -> Response:
        asked = await self._chat(request)
        if asked.notes.session is not None:
            raise Refused(400, "a turn of a session is not explained before it is asked", param="notes.session")
        prepared = await self._prepare(lambda: prepare(self.scheduler.state, asked, ExitStack(), dry=True))
        assert not isinstance(prepared, PreparedTurn)
        return JSONResponse(await self._at_context(lambda: self.scheduler.turns.explain(prepared)))

    async def errata(self, request: Request) -> Response:
        correction = errata.parse(await self._body(request))
        parts = errata.correcting_all(self.scheduler, correction)
        done = await self._prepare(lambda: next(parts))
        while done is None:
            done = await self._at_context(lambda: next(parts))
        return JSONResponse(done)

    async def sessions(self, request: Request) -> Response:
        return JSONResponse({"sessions": await self._prepare(lambda: errata.sessions(self.scheduler))})

    # What they share.

    async def _chat(self, request: Request) -> ChatRequest:
        """What messages ask for."""
        data = await self._body(request)

        def parsed() -> ChatRequest:
            check_messages(self.scheduler.state, data)
            return parse_chat(data, forms=self.options.forms)

        chat = await self._prepare(parsed)
        self._log_ignored(chat)
        return chat

    def _log_ignored(self, chat: ChatRequest) -> None:
        """Log the keys of a request that change nothing here, each once."""
        if new := [key for key in chat.ignored if key not in self._ignored]:
            self._ignored.update(new)
            output.say(f"ignored, as it changes no answer here: {', '.join(new)}")

    async def _prepare(self, function: Callable[[], T]) -> T:
        """Call a function in a preparation thread: it may take seconds, and no answer waits for it."""
        self._check()
        return await asyncio.wrap_future(self.scheduler.prepare(function))

    def _check(self) -> None:
        """Raise Refused while nobody can be answered."""
        if self.draining:
            raise Refused(503, "the server is ending", code="draining", wait=5, last=True)
        if not self.scheduler.ready.done():
            raise Refused(503, "the model is being loaded", code="loading", wait=5)

    async def _at_context(self, function: Callable[[], Any]) -> Any:
        """Call a function in the decode thread."""
        self._check()
        return await asyncio.wrap_future(self.scheduler.call(function))

    async def _body(self, request: Request) -> Any:
        """The JSON of a request. Raise Refused for what is none, too much, or does not come."""
        self._check()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind == CURL and not from_browser(request.headers)):
            raise Refused(415, "the body must be JSON: send Content-Type: application/json")
        if (packed := request.headers.get("content-encoding", "identity")) != "identity":
            raise Refused(415, f"the body is packed with {packed[:40]!r}: send it as it is")
        what = f"the body is larger than {self.options.body:,} bytes"
        too_large = Refused(413, what, code="too_large", last=True)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.options.body:
            raise too_large  # none of it is waited for
        data = bytearray()
        try:
            with anyio.fail_after(SLOW):
                async for part in request.stream():
                    data += part
                    if len(data) > self.options.body:
                        raise too_large
        except TimeoutError:
            raise Refused(408, "the body did not come in time") from None
        self._check()  # it may have taken its time
        return await self._prepare(lambda: read_json(data))


def _piece(model: Model, token: int) -> dict[str, object]:
    """A token and its text; of one that is no text, as a part of a character, its bytes. As llama-server has them."""
    spelt = model.token_bytes(token, special=True)
    try:
        return {"id": token, "piece": spelt.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(spelt)}


Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotesError)
    found = refused(error)
    return JSONResponse(body(found), found.status, found.headers)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    words = {
        404: f"there is no {request.url.path[:200]!r} here. There are {', '.join(paths_of(request.app.routes))}",
        405: f"{request.url.path[:200]} does not take {request.method}. It takes {allowed}",
    }
    found = Refused(error.status_code, words.get(error.status_code, str(error.detail)))
    return JSONResponse(body(found), found.status, error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _fault(request: Request, error: Exception) -> Response:
    return JSONResponse(body(Refused(500, f"a fault of the server: {type(error).__name__}")), 500)


def pages_of(routes: Sequence[Route]) -> tuple[str, ...]:
    """Paths that a browser loads before it can send a key."""
    return tuple(route.path for route in routes if route.name == "page")


def paths_of(routes: Sequence[BaseRoute]) -> list[str]:
    """The paths that clients may ask, in order."""
    found = [route.path_format for route in routes if isinstance(route, Route) and route.name != "page"]
    return list(dict.fromkeys(found))

"""Defines the HTTP endpoints and the routes of the web page; has requests parsed, prepared and answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from notes_cli import output
from notes_cli.errors import NotesError
from notes_cli.serve import library
from notes_cli.serve.answer_tasks import explain
from notes_cli.serve.decisions import NAMES as DECISION_NAMES
from notes_cli.serve.decisions import DecisionReply, join_decisions, parse_decisions
from notes_cli.serve.event_stream import respond, start_stream
from notes_cli.serve.llama_api import LlamaReply, infill_tokens, join_native, parse_infill, parse_native, props_json
from notes_cli.serve.messages_api import MessagesReply, parse_messages
from notes_cli.serve.metrics import KIND, POLLED, access_log, render_metrics
from notes_cli.serve.ollama_api import OllamaReply, loaded, model_json, parse_generate, parse_ollama_chat, show_json
from notes_cli.serve.parsing import ChatRequest, Reader, parse_chat, parse_completion
from notes_cli.serve.prepare import (
    Options,
    check_messages,
    check_size,
    prepare,
    prepare_request,
    skills_of_alias,
)
from notes_cli.serve.refusals import (
    KEY,
    Guard,
    Refused,
    as_refusal,
    error_of,
    from_browser,
    read_json,
    renaming,
    too_long,
)
from notes_cli.serve.replies import Reply, is_utf8, join_replies
from notes_cli.serve.responses_api import NAMES, ResponsesReply, ResponseStore, parse_responses
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.serve.segment_cache import skill_name

SLOW = 30.0  # seconds that a client has to send it
COUNTED = 1 << 17  # tokens of a text at /tokenize, also in a smaller context
EMBEDDINGS = ("/embedding", "/embeddings", "/v1/embeddings", "/api/embed", "/api/embeddings")
OLLAMA_VERSION = "0.12.11"  # the version of its API: the first with log-probabilities. Some clients refuse an old one
LOGGED = 256  # ignored keys that are logged
SIZE = "size"  # key of the request's state: bytes of its body
CURL = "application/x-www-form-urlencoded"  # sent by `curl -d` for any body

T = TypeVar("T")


class Service:
    """The endpoints over one scheduler."""

    def __init__(self, scheduler: DecodeThread) -> None:
        self.scheduler, self.options = scheduler, scheduler.options
        self.draining = False
        self._responses = ResponseStore()
        self._ignored: set[str] = set()  # ignored keys of requests that were logged
        self.end: Callable[[], object] = lambda: None  # ends the server, from any thread

    @property
    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/v1/health", self.health),
            Route("/metrics", self.metrics),
            Route("/models", self.models),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/decisions", self.decisions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/apply-template", self.apply_template, methods=["POST"]),
            Route("/props", self.props),
            Route("/slots", self.slots),
            *(Route(path, self.native, methods=["POST"]) for path in ("/completion", "/completions", "/infill")),
            *(Route(path, self.embed, methods=["POST"]) for path in EMBEDDINGS),
            *(Route(path, self.ollama_models) for path in ("/api/version", "/api/tags", "/api/ps")),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/chat", self.ollama, methods=["POST"]),
            Route("/api/generate", self.ollama, methods=["POST"]),
            Route("/api/pull", self.pull, methods=["POST"]),
            Route("/v1/notes", self.skills),
            Route("/v1/notes/compile", self.compile, methods=["POST"]),
            Route("/v1/notes/explain", self.explain, methods=["POST"]),
            Route("/v1/notes/errata", self.errata, methods=["POST"]),
            Route("/v1/notes/sessions", self.sessions),
            Route("/v1/notes/skills", self.skills),
            Route("/v1/notes/skills/{name}", self.skill, methods=["GET", "DELETE"]),
            Route("/v1/notes/{name}", self.skill, methods=["GET", "DELETE"]),
            *(page_routes() if self.options.page else [Route("/", ollama_root, name="page")]),
        ]
        return application(routes, self.options)

    # The server and its model.

    async def health(self, request: Request) -> Response:
        states = {"draining": self.draining, "loading": not self.scheduler.ready.done(), "failed": self.scheduler.ended}
        status = next((name for name, holds in states.items() if holds), "ok")
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        running = self.scheduler.ready.done() and not self.scheduler.ended  # also while it drains
        gauges = await asyncio.wrap_future(self.scheduler.call(self.scheduler.gauges)) if running else {}
        return Response(render_metrics(self.scheduler.metrics, gauges), media_type=KIND)

    async def models(self, request: Request) -> Response:
        models = list(map(self._model, await self._prepare(self._names)))
        return JSONResponse({"object": "list", "data": models})

    def _names(self) -> list[str]:
        """Return the model's name, and that with each compiled skill."""
        model = self.scheduler.names[0]
        return [model, *(f"{model}@{info.name}" for info in self.scheduler.segment_cache.known())]

    async def model(self, request: Request) -> Response:
        self._check()
        name = request.path_params["name"]
        if not name:
            return await self.models(request)

        skills = skills_of_alias(name, self.scheduler.names)
        await self._prepare(lambda: list(map(self.scheduler.segment_cache.segment, skills)))  # raises for unknown ones
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        """Return a model as JSON, with its context length as in vLLM, OpenRouter and llama-server (`meta`)."""
        facts = {"id": name, "object": "model", "created": self.scheduler.started, "owned_by": "notes"}
        longest, model = self.scheduler.state.longest, self.scheduler.workspace.model
        meta = {"n_vocab": model.n_vocab, "n_ctx_train": model.n_ctx_train}
        if longest is None:  # unlimited
            return {**facts, "meta": meta}
        return {**facts, "max_model_len": longest, "context_length": longest, "meta": {**meta, "n_ctx": longest}}

    async def tokenize(self, request: Request) -> Response:
        reader = Reader(await self._body(request))
        content, special = reader.needed("content"), reader.flag("parse_special")
        add_bos, pieces = reader.flag("add_special"), reader.flag("with_pieces")
        reader.end()

        def tokenize() -> Sequence[object]:
            state, workspace = self.scheduler.state, self.scheduler.workspace
            check_size(state, [content], "content")
            if state.longest is not None and workspace.model.exceeds(content, most := max(state.longest, COUNTED)):
                raise too_long(state.longest, f"has more than {most} tokens", "content")
            tokens = workspace.model.tokenize(content, special=special)
            ids = [int(token) for token in (workspace.with_bos(tokens) if add_bos else tokens)]
            if not pieces:
                return ids
            raw = ((token, workspace.model.token_bytes(token, special=True)) for token in ids)
            return [{"id": token, "piece": text.decode() if is_utf8(text) else list(text)} for token, text in raw]

        return JSONResponse({"tokens": await self._prepare(tokenize, request)})

    async def detokenize(self, request: Request) -> Response:
        reader = Reader(await self._body(request))
        tokens = reader.take("tokens", "a list of tokens", lambda value: isinstance(value, list), list[int]())
        reader.end()
        model = self.scheduler.workspace.model
        known = all(isinstance(token, int) and 0 <= token < model.n_vocab for token in tokens)
        if not known or len(tokens) > COUNTED:
            raise reader.wrong(
                "tokens", f"a list of at most {COUNTED:,} tokens, from 0 to {model.n_vocab - 1:,}", tokens
            )
        return JSONResponse({"content": await self._prepare(lambda: model.text(tokens, special=True), request)})

    async def apply_template(self, request: Request) -> Response:
        chat = self._with_defaults(request, await self._parse(request, parse_chat))
        prepared = await self._prepare(lambda: prepare_request(self.scheduler.state, chat, dry=True), request)
        tokens = prepared.layout.tokens.tolist() if prepared.layout else ()
        return JSONResponse({"prompt": self.scheduler.workspace.model.text(tokens, special=True)})

    async def props(self, request: Request) -> Response:
        return JSONResponse(await self._prepare(lambda: props_json(self.scheduler.state)))

    async def slots(self, request: Request) -> Response:
        gauges, parallel = await self._compute(self.scheduler.gauges), self.options.parallel
        running, longest = int(gauges["requests_running"]), self.scheduler.state.longest
        if running >= parallel and "fail_on_no_slot" in request.query_params:
            raise Refused(503, "no slot is free", code="no_slot")
        slots = [{"id": number, "n_ctx": longest, "is_processing": number < running} for number in range(parallel)]
        return JSONResponse(slots)

    async def embed(self, request: Request) -> Response:
        message = "this server makes no embeddings: its model writes text. Run an embedding model beside it"
        raise Refused(501, message, code="no_embeddings")

    # Chats and completions.

    async def chat(self, request: Request) -> ASGIApp:
        chat = self._with_defaults(request, await self._parse(request, parse_chat))
        return await self._respond(request, [Reply(chat, chat.model or self.scheduler.names[0])])

    async def completions(self, request: Request) -> ASGIApp:
        chats = await self._parse(request, parse_completion)
        chats = [replace(chat, **origin_of(request, self.options)) for chat in chats]
        model, choices = chats[0].model or self.scheduler.names[0], chats[0].answers
        with renaming({"messages": "prompt"}):
            return await self._respond(request, [Reply(chat, model, at * choices) for at, chat in enumerate(chats)])

    async def native(self, request: Request) -> ASGIApp:
        """Complete a prompt as llama-server does, or the text between two."""
        self._check()
        infill = partial(parse_infill, self.scheduler.workspace)
        chats, fields = await self._parse(request, infill if request.url.path == "/infill" else parse_native)
        origin, answers = origin_of(request, self.options), chats[0].answers
        replies = [
            LlamaReply(replace(chat, **origin), self.scheduler.names[0], at * answers, fields=fields)
            for at, chat in enumerate(chats)
        ]
        with renaming({"messages": "prompt"}):
            return await self._respond(request, replies, join_native)

    async def responses(self, request: Request) -> ASGIApp:
        earlier = partial(self._responses.messages, client_of(request, self.options))
        parsed = await self._parse(request, partial(parse_responses, earlier=earlier))
        parsed = replace(parsed, chat=self._with_defaults(request, parsed.chat))
        model = parsed.chat.model or self.scheduler.names[0]
        reply = ResponsesReply(parsed.chat, model, asked=parsed, kept=self._responses)
        with renaming(NAMES):
            return await self._respond(request, [reply])

    async def messages(self, request: Request) -> ASGIApp:
        chat = self._with_defaults(request, await self._parse(request, parse_messages))
        return await self._respond(request, [MessagesReply(chat, chat.model or self.scheduler.names[0])])

    async def count_tokens(self, request: Request) -> Response:
        chat = self._with_defaults(request, await self._parse(request, parse_messages))
        return JSONResponse({"input_tokens": await self._prepare(lambda: self._count(chat), request)})

    def _count(self, chat: ChatRequest) -> int:
        """Return the tokens of a prompt; of one beyond the context about as many. Raises Refused beyond COUNTED."""
        try:
            return len(prepare_request(self.scheduler.state, chat, dry=True).layout or ())
        except NotesError as error:
            if as_refusal(error).code != "context_length_exceeded":
                raise
            model = self.scheduler.workspace.model
            text = "\n".join((*(message.text for message in chat.messages), *map(json.dumps, chat.tools)))
            if model.exceeds(text, COUNTED):
                raise
            return len(model.tokenize(text))

    async def decisions(self, request: Request) -> ASGIApp:
        asked = await self._parse(request, parse_decisions)
        asked = [(question, self._with_defaults(request, chat)) for question, chat in asked]
        model = asked[0][1].model or self.scheduler.names[0]
        with renaming(DECISION_NAMES):
            replies = [DecisionReply(chat, model, question=question) for question, chat in asked]
            return await respond(request, self.scheduler, replies, join_decisions)

    # Ollama's API.

    async def ollama_models(self, request: Request) -> Response:
        """Return the API's version, the model with its skills, or the loaded one."""
        if request.url.path == "/api/version":
            return JSONResponse({"version": OLLAMA_VERSION})

        def models() -> list[dict[str, Any]]:
            names = self._names() if request.url.path == "/api/tags" else self.scheduler.names[:1]
            return [model_json(self.scheduler.state, name, self.scheduler.started) for name in names]

        return JSONResponse({"models": await self._prepare(models)})

    async def show(self, request: Request) -> Response:
        await self._body(request)  # any name is the model's
        return JSONResponse(await self._prepare(lambda: show_json(self.scheduler.workspace)))

    async def pull(self, request: Request) -> Response:
        reader = Reader(await self._body(request))
        name = (reader.text("model") or reader.text("name")).removesuffix(":latest")
        if name not in self.scheduler.names:
            message = f"this server has one model, {self.scheduler.names[0]}, and downloads none"
            raise Refused(501, message, param="model")
        return JSONResponse({"status": "success"})

    async def ollama(self, request: Request) -> ASGIApp:
        generated = request.url.path == "/api/generate"
        generate = partial(parse_generate, lambda *texts: infill_tokens(self.scheduler.workspace, *texts))
        chat = await self._parse(request, generate if generated else parse_ollama_chat)
        if chat is None:
            return JSONResponse(loaded(self.scheduler.names[0], generated))
        chat = self._with_defaults(request, chat)
        reply = OllamaReply(chat, chat.model or self.scheduler.names[0], generated=generated)
        return await self._respond(request, [reply])

    # Skills, errata and sessions.

    async def skills(self, request: Request) -> Response:
        skills = await self._prepare(lambda: library.list_skills(self.scheduler))
        return JSONResponse({"skills": skills, "splice": self.scheduler.splice, "errata": self.options.errata})

    async def skill(self, request: Request) -> Response:
        name = request.path_params["name"]
        function = library.remove_skill if request.method == "DELETE" else library.skill_json
        return JSONResponse(await self._prepare(lambda: function(self.scheduler, name)))

    async def compile(self, request: Request) -> ASGIApp:
        data = await self._body(request)
        return await start_stream(request, library.compile_events(self.scheduler, data, request.scope["state"][SIZE]))

    async def explain(self, request: Request) -> Response:
        chat = self._with_defaults(request, await self._parse(request, parse_chat))
        if chat.notes.session is not None:
            raise Refused(400, "a turn of a session is not explained before it is asked", param="notes.session")
        prepared = await self._prepare(lambda: prepare(self.scheduler.state, chat, ExitStack(), dry=True), request)
        return JSONResponse(await self._compute(lambda: explain(self.scheduler.state, prepared)))

    async def errata(self, request: Request) -> Response:
        steps = library.apply_correction(self.scheduler, library.parse_correction(await self._body(request)))
        result = await self._prepare(lambda: next(steps), request)
        while result is None:
            result = await self._compute(lambda: next(steps))
        return JSONResponse(result)

    async def sessions(self, request: Request) -> Response:
        return JSONResponse({"sessions": await self._prepare(lambda: library.list_sessions(self.scheduler))})

    # Helpers.

    async def _parse(self, request: Request, parse: Callable[..., T]) -> T:
        data = await self._body(request)

        def check_and_parse() -> T:
            check_messages(self.scheduler.state, data)
            return parse(data, forms=self.options.forms)

        return await self._prepare(check_and_parse, request)

    def _with_defaults(self, request: Request, chat: ChatRequest) -> ChatRequest:
        """Set the origin of a chat. Add the skills of the server's options, but for its memory, to one that names no
        skills and no session, and their errata if it has none."""
        chat = replace(chat, **origin_of(request, self.options))
        notes, known = chat.notes, self.scheduler.names
        if notes.session is not None or "splice" in notes.given or ("@" in chat.model and chat.model not in known):
            return chat
        errata = notes.errata if notes.given & {"errata", "fields"} else self.options.errata
        memory = skill_name(notes.memory or "")
        splice = tuple(name for name in self.scheduler.splice if name != memory)
        return replace(chat, notes=replace(notes, splice=splice, errata=errata))

    async def _respond(
        self, request: Request, replies: Sequence[Reply], join: Callable[[Sequence[Reply]], Any] = join_replies
    ) -> ASGIApp:
        """Log the ignored keys of a request, each once, and answer it."""
        new = [key for key in replies[0].request.ignored if key not in self._ignored]
        if new and len(self._ignored) < LOGGED:  # clients may name any key
            self._ignored.update(new)
            output.say(f"ignored: {', '.join(new)}")
        return await respond(request, self.scheduler, replies, join)

    async def _prepare(self, function: Callable[[], T], request: Request | None = None) -> T:
        """Call a function in a preparation thread, where it may take seconds. `request`: one whose body it reads."""
        self._check()
        size = 0 if request is None else request.scope["state"][SIZE]
        return await asyncio.wrap_future(self.scheduler.prepare(function, size=size))

    def _check(self) -> None:
        """Raises Refused while the model is being loaded and while the server drains."""
        if self.draining:
            raise Refused(503, "the server is ending", code="draining", wait=5, last=True)
        if not self.scheduler.ready.done():
            raise Refused(503, "the model is being loaded", code="loading", wait=5)

    async def _compute(self, function: Callable[[], Any]) -> Any:
        self._check()
        return await asyncio.wrap_future(self.scheduler.call(function))

    async def _body(self, request: Request) -> Any:
        """Read the JSON of a request. Raises Refused for an invalid, large or slow body."""
        self._check()
        data = await read_body(request, self.options.body)
        return await self._prepare(lambda: read_json(data), request)


def application(routes: list[Route], options: Options) -> Starlette:
    """Return the ASGI application of these endpoints, with access log, checks of keys and origins, and errors."""
    keys = (*options.keys, options.token) if options.keys and options.token else options.keys
    guard = Middleware(Guard, keys, options.host, options.origins, pages_of(routes))
    cors = Middleware(CORSMiddleware, allow_origins=options.origins, allow_methods=["*"], allow_headers=["*"])
    handlers: dict[Any, Any] = {
        NotesError: _on_notes_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_fault,
    }
    log = Middleware(access_log, () if options.verbose else (*POLLED, *pages_of(routes)))
    # CORS before the guard, so that pages can read refusals
    middleware = [log, *([cors] if options.origins else []), guard]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def client_of(request: Request, options: Options) -> str:
    """Return the digest of a request's API key if there are several keys, else ""."""
    digest: str = request.scope["state"][KEY] if len({*options.keys}) > 1 else ""
    return digest


def origin_of(request: Request, options: Options) -> dict[str, Any]:
    """Return values of a ChatRequest that are not in its body, once that is read."""
    return {"client": client_of(request, options), "size": request.scope["state"][SIZE]}


async def read_body(request: Request, most: int) -> bytes:
    """Read a JSON body of at most so many bytes, and put its size into the request's state. Raises Refused for another
    type, or a large or slow one."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind == CURL and not from_browser(request.headers)):
        raise Refused(415, "the body must be JSON: send Content-Type: application/json")
    if (packed := request.headers.get("content-encoding", "identity")) != "identity":
        raise Refused(415, f"the body is packed with {packed[:40]!r}: send it as it is")
    too_large = Refused(413, f"the body is larger than {most:,} bytes", code="too_large", last=True)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large  # without reading it
    data = bytearray()
    try:
        with anyio.fail_after(SLOW):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise too_large
    except TimeoutError:
        raise Refused(408, "the body did not come in time") from None
    request.scope.setdefault("state", {})[SIZE] = len(data)
    return bytes(data)


async def _on_notes_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotesError)
    refusal = as_refusal(error)
    return JSONResponse(error_of(request.url.path, refusal), refusal.status, refusal.headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, message = request.url.path[:200], str(error.detail)
    if error.status_code == 404:
        routes = (route for route in request.app.routes if isinstance(route, Route) and route.name != "page")
        paths = dict.fromkeys(route.path_format for route in routes)
        message = f"there is no {path!r} here. There are {', '.join(paths)}"
    elif error.status_code == 405:
        allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
        message = f"{path} does not take {request.method}. It takes {', '.join(allowed)}"
    body = error_of(path, Refused(error.status_code, message))
    return JSONResponse(body, error.status_code, error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the log: the client is gone


async def _on_fault(request: Request, error: Exception) -> Response:
    refused = Refused(500, f"a fault of the server: {type(error).__name__}")
    return JSONResponse(error_of(request.url.path, refused), 500)


def pages_of(routes: Sequence[Route]) -> tuple[str, ...]:
    """Return the paths that a browser loads before it can send a key."""
    return tuple(route.path for route in routes if route.name == "page")


FOLDER = Path(__file__).parent / "page"

# Set here, as systems guess them differently, and browsers do not run scripts of other types.
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_POLICY = {
    **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"), "'none'"),
    **dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'"),
    "require-trusted-types-for": "'script'",  # scripts cannot turn text into HTML
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # file names are the same in all versions
}


async def ollama_root(request: Request) -> Response:
    """Answer `/` as Ollama does, for clients that check whether a server runs."""
    return Response("Ollama is running", media_type="text/plain")


def page_routes() -> list[Route]:
    """Return routes of `/` and the files that it loads. All are named "page": a browser loads them without a key."""
    routes = []
    for path in sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES):
        url_path = "/" if path.name == "index.html" else f"/page/{path.name}"
        response = Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=HEADERS)
        routes.append(Route(url_path, response, methods=["GET", "HEAD"], name="page"))
    return routes

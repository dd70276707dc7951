"""Refuses requests: checks API keys, the headers Host and Origin, and JSON bodies; formats errors of each API.

Host and Origin are checked against other sites' pages in the user's browser. A body may have millions of values.
"""

from __future__ import annotations

import gc
import hashlib
import hmac
import ipaddress
import json
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from notes_cli.errors import (
    ContextLengthError,
    EngineError,
    HeldSessionError,
    Help,
    ImageError,
    ModelError,
    NotesError,
    SegmentError,
    SessionError,
    SkillError,
    TakenError,
    UnsupportedError,
    UnwritableError,
)
from notes_cli.runtime.scheduler import NoRoomError

LONGEST = 1000  # characters of a message, which may quote a value of the request


class Refused(NotesError):
    """An HTTP error response: its status, and `param`, the key of the request that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        wait: int | None = None,
        last: bool = False,
    ) -> None:
        """`wait`: seconds for Retry-After. `last`: close the connection."""
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]} ...")
        self.status, self.param, self.code, self.wait, self.last = status, param, code, wait, last

    @property
    def headers(self) -> dict[str, str]:
        later = {} if self.wait is None else {"Retry-After": str(self.wait)}
        return {**later, "Connection": "close"} if self.last else later


def invalid(param: str, message: str) -> Refused:
    """Return the refusal of the value of a key, `param`."""
    return Refused(400, message, param=param, code="invalid_value")


class ServerError(NotesError):
    """An internal error, which no request should be able to cause."""


_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {409: "conflict_error", 413: "invalid_request_error", 415: "invalid_request_error"}
_TYPES |= {405: "invalid_request_error", 408: "timeout_error", 429: "rate_limit_error", 503: "overloaded_error"}
# The status, `param` and code of an error, by the first of its classes here.
_KINDS: tuple[tuple[type[NotesError], int, str | None, str | None], ...] = (
    (TakenError, 409, "name", "name_taken"),
    (UnwritableError, 500, None, "unwritable"),
    (SegmentError, 400, "notes.splice", "skill_not_usable"),
    (HeldSessionError, 409, "notes.session", "session_in_use"),
    (SessionError, 400, "notes.session", None),
    (ImageError, 400, "messages", "invalid_image"),
    (SkillError, 400, "notes", None),
    (UnsupportedError, 400, None, None),
    (ServerError, 500, None, "engine_error"),
    (EngineError, 500, None, "engine_error"),
    (ModelError, 400, "messages", "template_error"),
)
_TOO_LONG = (Help.LARGER_CONTEXT, Help.FEWER_TOKENS)  # of other errors than ContextLengthError


def too_long(longest: int, what: str, param: str = "messages") -> Refused:
    """Return the refusal of a request that does not fit the context. `what`: "needs 5000 tokens". Clients recognise it
    by its code, or by the first words of the message, which OpenAI's API and vLLM use, too."""
    message = f"This model's maximum context length is {longest} tokens. However, this request {what}. Shorten it"
    return Refused(400, message, param=param, code="context_length_exceeded")


def as_refusal(error: NotesError) -> Refused:
    if isinstance(error, Refused):
        return error
    message = str(error)
    help_ = error.remedy.help if error.remedy else None
    if isinstance(error, NoRoomError):
        return Refused(503, message, code="no_room", wait=1)
    if isinstance(error, ContextLengthError):
        return too_long(error.longest, f"needs {'' if error.counted else 'more than '}{error.tokens} tokens")
    if isinstance(error, EngineError) and help_ in _TOO_LONG:
        return Refused(400, message, param="messages", code="context_length_exceeded")
    missing = isinstance(error, SegmentError) and help_ in (Help.LIST_SKILLS, Help.COMPILE_NAMED)
    if missing and not isinstance(error, (TakenError, UnwritableError)):
        return Refused(404, message, param="notes.splice", code="skill_not_found")
    for kind, status, param, code in _KINDS:
        if isinstance(error, kind):
            return Refused(status, message, param=param, code=code)
    return Refused(400, message)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Convert the keys in errors to those of another API. `names`: its key for each key of a chat; a key comes before
    those that it begins with."""

    def renamed(text: str) -> str:
        key = next((key for key in names if re.match(rf"{re.escape(key)}(?!\w)", text)), None)
        return text if key is None else names[key] + text[len(key) :]

    try:
        yield
    except Refused as error:
        error.what, error.param = renamed(error.what), error.param and renamed(error.param)
        raise


def error_body(error: Refused) -> dict[str, Any]:
    """Return the error as JSON of OpenAI's API."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


_MESSAGES = {**_TYPES, 409: "invalid_request_error", 413: "request_too_large", 415: "invalid_request_error"}
_NEEDS = re.compile(r"length is (\d+) tokens\. However, this request needs (more than )?(\d+) tokens")


def messages_error(error: Refused) -> dict[str, Any]:
    """Return the error as JSON of Anthropic's API. Clients compact a conversation by its first words and numbers, and
    send it whole where `details` say that there are no threads."""
    message, details = str(error), {}
    if error.code == "context_length_exceeded":
        numbers = _NEEDS.search(message)
        if numbers:
            message = f"{int(numbers[3]) + bool(numbers[2])} tokens > {numbers[1]} maximum"
        message = f"prompt is too long: {message}"
    if error.param == "thread":
        details = {"details": {"error_code": "thread_unsupported_request", "unsupported": []}}
    kind = _MESSAGES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def ollama_error(error: Refused) -> dict[str, Any]:
    return {"error": str(error)}


def error_of(path: str, error: Refused) -> dict[str, Any]:
    """Return the error as JSON of the API that has this path."""
    if path.startswith("/v1/messages"):
        return messages_error(error)
    return ollama_error(error) if path.startswith("/api/") else error_body(error)


# A name or an IPv4 address, or an IPv6 address in brackets; then a port.
HOST = re.compile(
    r"(?:(?P<name>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)|\[(?P<address>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{1,5}))?",
    re.IGNORECASE | re.ASCII,
)
OPEN = ("/health", "/v1/health")  # paths without a key, for load balancers
KEY = "key"  # key of the request's state: the digest of its API key, if one is required


def is_loopback(host: str) -> bool:
    """Return True if only processes of this machine can reach this address."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class Guard:
    """ASGI middleware that passes requests on or refuses them.

    A browser sends the origin of the page (Origin) and the name in the URL (Host). Pages of other origins are refused,
    and so is DNS rebinding: a site's name that points to this machine. If a key is required, which such a page does not
    have, any Host is accepted. Without one, on loopback: localhost and addresses; on a network: also names that public
    DNS does not have.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], host: str, origins: Sequence[str], pages: Sequence[str]
    ) -> None:
        """`keys`: accepted keys; none: no key is required. `host`: the address that the server listens on. `origins`:
        other origins that are accepted. `pages`: paths without a key, which a browser loads before it has one."""
        self._app, self._origins, self._pages = app, tuple(origins), tuple(pages)
        self._keys = [key.encode() for key in keys]
        self._host, self._on_loopback = host.lower(), is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = re.sub("/{2,}", "/", scope["path"])  # of a base URL that ends with one
            error = self._refusal(Headers(scope=scope), scope["path"], scope["method"])
            if error is not None:
                headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
                await JSONResponse(error_of(scope["path"], error), error.status, headers)(scope, receive, send)
                return
            if (key := self._sent_key(Headers(scope=scope))) is not None:
                scope.setdefault("state", {})[KEY] = hashlib.sha256(key).hexdigest()
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, path: str, method: str) -> Refused | None:
        host = headers.get("host", "localhost")  # absent from probes in HTTP/1.0, never from a browser
        name = _host_name(host)
        if name is None:
            return Refused(400, f"Host: {host[:80]!r} is not a name or an address, with a port or without")
        local = not self._on_loopback and ("." not in name or name.endswith(".local"))
        if not (self._keys or local or name in (self._host, "localhost") or _is_address(name)):
            message = f"this server answers to localhost and to its address, not to {host[:80]!r}"
            return Refused(403, f"{message}: ask it by one of these, or let it listen by that name, or require a key")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != host:
            return Refused(403, f"pages of {origin[:80]} may not ask this server")
        if not self._keys or path in OPEN or (path in self._pages and method in ("GET", "HEAD")) or method == "OPTIONS":
            return None
        if self._sent_key(headers) is not None:
            return None
        message = "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key: KEY"
        return Refused(401, message, code="invalid_api_key")

    def _sent_key(self, headers: Headers) -> bytes | None:
        """Return the accepted key that a request has; None without one."""
        sent_keys = [headers.get("x-api-key", "")]  # from clients of Anthropic's API
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            sent_keys.append(bearer)
        # Compares all of them, so that the time does not depend on which matches.
        pairs = [(sent.strip().encode("latin-1"), key) for sent in sent_keys for key in self._keys]
        accepted = [key for sent, key in pairs if hmac.compare_digest(sent, key)]
        return accepted[0] if accepted else None


def from_browser(headers: Headers) -> bool:
    """Return True if a browser may have sent these headers: it adds one of them to every POST."""
    return any(name in ("origin", "referer") or name.startswith("sec-fetch-") for name in headers)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str | None:
    """Return the name in a Host header, in lower case and without the port; None if it is invalid by RFC 9110, as with
    a user name, a path, a dot at its end, or an IPv6 address without brackets."""
    match = HOST.fullmatch(host)
    if match is None or int(match["port"] or 1) not in range(1, 1 << 16):
        return None
    name = (match["name"] or match["address"]).lower()
    return name if match["name"] or (_is_address(name) and ":" in name) else None


SURROGATE = re.compile("[\ud800-\udfff]")


_without_gc = set[int]()  # threads that need garbage collection disabled
_gc_lock = threading.Lock()


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable garbage collection while any thread is inside: the collector would scan millions of new lists again and
    again, and stop all threads meanwhile."""
    with _gc_lock:
        _without_gc.add(threading.get_ident())
        gc.disable()
    try:
        yield
    finally:
        with _gc_lock:
            _without_gc.remove(threading.get_ident())
            if not _without_gc:
                gc.enable()


def read_json(data: bytes | bytearray) -> Any:
    """Parse a JSON body. Raises Refused if it is not JSON, or has a lone surrogate or a number beyond those of floats,
    as an answer that repeats one would be no JSON."""
    try:
        with _gc_disabled():
            value = json.loads(data, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"
        raise Refused(400, message, code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        message = f"the body is not JSON: {' '.join(str(error).split())[:200]}"
        raise Refused(400, message, code="invalid_json") from None
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise Refused(400, "the body is not JSON: it is nested too deeply", code="invalid_json") from None
    except ValueError:  # also for surrogates
        path, fault = _find_invalid(value)
        path = path[:200]
        raise Refused(400, f"{path or 'the body'} {fault}", param=path or None, code="invalid_json") from None
    return value


def _find_invalid(data: Any) -> tuple[str, str]:
    """Return the path of the first value with a lone surrogate or an infinite number, such as `messages[0].content`,
    and the fault."""
    stack: list[tuple[str, Any]] = [("", data)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and math.isinf(value):
            return path, "is too large a number"
        if isinstance(value, str) and (fault := _surrogate_in(value)):
            return path, fault
        if isinstance(value, dict):
            for key in value:
                if fault := _surrogate_in(key):
                    return f"a key of {path}" if path else "a key", fault
            children = [(f"{path}.{key}" if path else key, child) for key, child in value.items()]
        else:
            children = [(f"{path}[{n}]", child) for n, child in enumerate(value)] if isinstance(value, list) else []
        stack += reversed(children)
    raise AssertionError("all of it can be encoded")


def _surrogate_in(text: str) -> str:
    match = SURROGATE.search(text)
    return f"holds {match[0]!a}, which is half of a character (a UTF-16 surrogate)" if match else ""


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")

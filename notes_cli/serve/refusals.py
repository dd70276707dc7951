"""Maps errors to HTTP statuses and to the JSON of OpenAI's error objects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
        return too_long(error.longest, f"needs {error.tokens} tokens")
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

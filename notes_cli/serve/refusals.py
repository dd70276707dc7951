"""What a client is told when something cannot be done: a status, and the body of OpenAI's errors."""

from __future__ import annotations

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


class Refused(NotesError):
    """A request that is not answered: `status` is that of HTTP, `param` what of the request is meant."""

    def __init__(
        self,
        status: int,
        what: str,
        *,
        param: str | None = None,
        code: str | None = None,
        wait: int | None = None,
        last: bool = False,
    ) -> None:
        """`wait`: seconds after which it may be tried again, `last`: over another connection."""
        super().__init__(what)
        self.status, self.param, self.code, self.wait, self.last = status, param, code, wait, last

    @property
    def headers(self) -> dict[str, str]:
        later = {} if self.wait is None else {"Retry-After": str(self.wait)}
        return {**later, "Connection": "close"} if self.last else later


class ServerError(NotesError):
    """A fault of ours: no request should be able to cause it."""


_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {409: "conflict_error", 413: "invalid_request_error", 415: "invalid_request_error"}
_TYPES |= {405: "invalid_request_error", 408: "timeout_error", 429: "rate_limit_error", 503: "overloaded_error"}
_TOO_LONG = (Help.LARGER_CONTEXT, Help.FEWER_TOKENS)  # of other errors than ContextLengthError


def too_long(longest: int, what: str, param: str = "messages") -> Refused:
    """A request that does not fit a context. `what`: "needs 5000 tokens". Programs know it by the code, or by the first
    words of the message, which are those of OpenAI's API and of vLLM."""
    message = f"This model's maximum context length is {longest} tokens. However, this request {what}. Shorten it"
    return Refused(400, message, param=param, code="context_length_exceeded")


def refused(error: NotesError) -> Refused:
    """An error as a client is told of it."""
    if isinstance(error, Refused):
        return error
    what = str(error)
    help_ = error.remedy.help if error.remedy else None
    if isinstance(error, ContextLengthError):
        return too_long(error.longest, f"needs {error.tokens} tokens")
    if isinstance(error, EngineError) and help_ in _TOO_LONG:
        return Refused(400, what, param="messages", code="context_length_exceeded")
    if isinstance(error, SegmentError):
        return _segment(error, what)
    if isinstance(error, SessionError):
        held = isinstance(error, HeldSessionError)
        return Refused(409 if held else 400, what, param="notes.session", code="session_in_use" if held else None)
    if isinstance(error, ImageError):
        return Refused(400, what, param="messages", code="invalid_image")
    if isinstance(error, SkillError):
        return Refused(400, what, param="notes")
    if isinstance(error, (ServerError, EngineError)) and not isinstance(error, UnsupportedError):
        return Refused(500, what, code="engine_error")
    if isinstance(error, ModelError):
        return Refused(400, what, param="messages", code="template_error")
    return Refused(400, what)


def _segment(error: SegmentError, what: str) -> Refused:
    if isinstance(error, TakenError):
        return Refused(409, what, param="name", code="name_taken")
    if isinstance(error, UnwritableError):
        return Refused(500, what, code="unwritable")
    missing = error.remedy is not None and error.remedy.help in (Help.LIST_SKILLS, Help.COMPILE_NAMED)
    code = "skill_not_found" if missing else "skill_not_usable"
    return Refused(404 if missing else 400, what, param="notes.splice", code=code)


def body(error: Refused) -> dict[str, Any]:
    """As OpenAI's API words it."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}

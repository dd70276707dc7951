"""Parses the JSON body of a request, which may have millions of values."""

from __future__ import annotations

import gc
import json
import math
import re
import threading
from typing import Any

from notes_cli.serve.refusals import Refused

SURROGATE = re.compile("[\ud800-\udfff]")


class _GcPause:
    """Disables garbage collection while any thread is inside: the collector would scan millions of new lists again and
    again, and stop all threads meanwhile."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            gc.disable()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                gc.enable()


_gc_pause = _GcPause()


def read_json(data: bytes | bytearray) -> Any:
    """Parse a JSON body. Raises Refused if it is not JSON, or has a lone surrogate or a number beyond those of floats,
    as an answer that repeats one would be no JSON."""
    try:
        with _gc_pause:
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

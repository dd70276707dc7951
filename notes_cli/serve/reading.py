"""The JSON of a request's body, which may hold millions of values."""

from __future__ import annotations

import gc
import json
import re
import threading
from typing import Any

from notes_cli.serve.refusals import Refused

HALF = re.compile("[\ud800-\udfff]")


class _Uncollected:
    """While someone is in it, Python looks for no garbage: it would look through millions of new lists again and again,
    and stop all threads meanwhile."""

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


_uncollected = _Uncollected()


def read_json(data: bytes | bytearray) -> Any:
    """Parse a JSON body. Raise Refused if it is no JSON or has a lone surrogate."""
    try:
        with _uncollected:
            found = json.loads(data, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        what = f"the body is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"
        raise Refused(400, what, code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        what = f"the body is not JSON: {' '.join(str(error).split())[:200]}"
        raise Refused(400, what, code="invalid_json") from None
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise Refused(400, "the body is not JSON: it is nested too deeply", code="invalid_json") from None
    except UnicodeEncodeError:
        place, half = _half(found)
        place = place[:200]
        what = f"{place or 'the body'} holds {half!a}, which is half of a character (a UTF-16 surrogate)"
        raise Refused(400, what, param=place or None, code="invalid_json") from None
    return found


def _half(data: Any) -> tuple[str, str]:
    """Where a text of the data holds half of a surrogate pair, `messages[0].content`, and that; the first one."""
    waiting: list[tuple[str, Any]] = [("", data)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, str) and (found := HALF.search(value)):
            return place, found[0]
        if isinstance(value, dict):
            for key in value:
                if found := HALF.search(key):
                    return f"a key of {place}" if place else "a key", found[0]
            inside = [(f"{place}.{key}" if place else key, one) for key, one in value.items()]
        else:
            inside = [(f"{place}[{at}]", one) for at, one in enumerate(value)] if isinstance(value, list) else []
        waiting += reversed(inside)
    raise AssertionError("all of it can be encoded")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")

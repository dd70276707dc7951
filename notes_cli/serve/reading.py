"""The JSON of a request's body, which may hold millions of values."""

from __future__ import annotations

import gc
import json
import threading
from typing import Any

from notes_cli.serve.refusals import Refused


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
    """What a body says. Raise Refused for what is no JSON."""
    try:
        with _uncollected:
            found = json.loads(data, parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # half a character, too
        what = f"the body is not JSON: {' '.join(str(error).split())[:200]}"
        raise Refused(400, what, code="invalid_json") from None
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")

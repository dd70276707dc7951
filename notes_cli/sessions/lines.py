"""The parts of a ledger's line, each checked as it is taken out: a ledger may be anybody's.

All raise an error of Python's where a part is not what it must be: KeyError, TypeError or ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from notes_cli.engine.patches import Patch, Range, ascending

ROWS = re.compile(r"[0-9]{4,9}\.gguf")  # names of the files of rows

Line = Mapping[str, Any]


def text_of(data: Line, key: str) -> str:
    found = data[key]
    if not isinstance(found, str):
        raise TypeError(key)
    return found


def number_of(data: Line, key: str) -> int:
    found = data[key]
    if type(found) is not int:
        raise TypeError(key)
    return found


def heard_of(line: Line) -> str:
    """Up to when what everybody is told (library/standing.py) was known to whoever wrote it."""
    return text_of(line, "heard") if "heard" in line else str(line.get("time", ""))


def rows_of(line: Line) -> str:
    """The name of the file of its rows; empty if it has none. The checksum of that file is with it."""
    found = text_of(line, "rows")
    if found and not (ROWS.fullmatch(found) and text_of(line, "rows_checksum")):
        raise ValueError("rows")
    return found


def ids_of(tokens: Iterable[int]) -> list[int]:
    """Token ids."""
    found = list(tokens)
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in found):
        raise ValueError("tokens")
    return found


def ranges_of(pairs: Iterable[Sequence[int]], length: int) -> list[Range]:
    """Ranges that ascend inside a sequence of `length` tokens, as they must."""
    found = [(first, last) for first, last in pairs]
    if not all(type(position) is int for span in found for position in span) or not ascending(found, length):
        raise ValueError("range")
    return found


def patches_of(line: Line, length: int) -> list[Patch]:
    """Which tokens gave way to which."""
    spans = ranges_of([(part["first"], part["last"]) for part in line["patches"]], length)
    return [Patch(*span, ids_of(part["tokens"])) for span, part in zip(spans, line["patches"], strict=True)]

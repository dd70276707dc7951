"""The parts of a ledger's line, each checked as it is taken out: a ledger may be anybody's.

All raise an error of Python's where a part is not what it must be: KeyError, TypeError or ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ROWS = re.compile(r"[0-9]{4,}\.gguf")  # names of the files of rows

Line = Mapping[str, Any]


def text_of(data: Line, key: str) -> str:
    found = data[key]
    if not isinstance(found, str):
        raise TypeError(key)
    return found


def ids_of(tokens: Iterable[int]) -> list[int]:
    """Token ids."""
    found = list(tokens)
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in found):
        raise ValueError("tokens")
    return found


def spans_of(pairs: Iterable[Sequence[int]], length: int) -> list[tuple[int, int]]:
    """Ranges [first, last) that ascend in [0, length), as they must."""
    found: list[tuple[int, int]] = []
    for first, last in pairs:
        numbers = type(first) is int and type(last) is int
        if not numbers or not (found[-1][1] if found else 0) <= first <= last <= length:
            raise ValueError("range")
        found.append((first, last))
    return found


def patches_of(line: Line, length: int) -> list[tuple[tuple[int, int], Line]]:
    """Where tokens gave way, and the part of the line that says to which."""
    found = spans_of([(part["first"], part["last"]) for part in line["patches"]], length)
    return list(zip(found, line["patches"], strict=True))

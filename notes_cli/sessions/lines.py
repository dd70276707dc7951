"""The parts of a ledger's line, each checked as it is read, because a ledger may be from anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from notes_cli.engine.patches import Patch, Range, is_ascending
from notes_cli.engine.pieces import Piece, Reason

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
    """Up to when what everybody is told (library/global_errata.py) was known to whoever wrote it."""
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
    if not all(type(position) is int for span in found for position in span) or not is_ascending(found, length):
        raise ValueError("range")
    return found


def patches_of(line: Line, length: int) -> list[Patch]:
    """Which tokens gave way to which."""
    spans = ranges_of([(part["first"], part["last"]) for part in line["patches"]], length)
    return [Patch(*span, ids_of(part["tokens"])) for span, part in zip(spans, line["patches"], strict=True)]


@dataclass(frozen=True, slots=True)
class Origin:
    """Of a piece: what engine/pieces.Piece says of it. Of an edit: what it did."""

    reason: Reason = Reason.PLAIN
    detail: str = ""
    moved: int = 0
    rewritten: int = 0  # of an edit: rows that it computed
    blocks: int = 0
    passed: int = 0
    selected: str = ""
    kept: str = ""
    nbytes: int = 0
    erratum: bool = False  # of an edit: an erratum is to be said before the next question
    contradicted: bool = False  # of an edit of the text: an erratum that was said earlier comes after it

    @classmethod
    def of(cls, piece: Piece) -> Origin:
        return cls(**{key: getattr(piece, key) for key in ("reason", *_TEXTS, *_NUMBERS)})


_TEXTS, _NUMBERS = ("detail", "selected", "kept"), ("moved", "rewritten", "blocks", "passed", "nbytes")


def as_line(origin: Origin) -> Line:
    """Its keys in a ledger; those that say nothing are left out."""
    keys = ("reason", *_TEXTS, *_NUMBERS, "contradicted")
    return {key: value for key, value in asdict(origin).items() if key in keys and value}


def origin_of(line: Line) -> Origin:
    """Read back what as_line wrote. Raise KeyError, TypeError or ValueError otherwise."""
    found: dict[str, Any] = {key: text_of(line, key) for key in _TEXTS if key in line}
    found |= {key: number_of(line, key) for key in _NUMBERS if key in line}
    reason = text_of(line, "reason") if "reason" in line else ""
    if reason in _REASONS:  # a newer version may have others
        found["reason"] = Reason(reason)
    return Origin(**found, contradicted=line.get("contradicted") is True)


_REASONS = {reason.value for reason in Reason}

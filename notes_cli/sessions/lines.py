"""Parses and validates the values in a ledger line: ledgers are untrusted input."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from notes_cli.engine.patches import Patch, Range, is_ascending
from notes_cli.engine.pieces import Piece, Reason

ROWS = re.compile(r"[0-9]{4,9}\.gguf")  # names of K/V files

Line = Mapping[str, Any]


def text_of(data: Line, key: str) -> str:
    value = data[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def number_of(data: Line, key: str) -> int:
    value = data[key]
    if type(value) is not int:
        raise TypeError(key)
    return value


def heard_of(line: Line) -> str:
    """Return the time up to which the writer of the line had read the global errata (library/global_errata.py)."""
    return text_of(line, "heard") if "heard" in line else str(line.get("time", ""))


def rows_of(line: Line) -> str:
    """Return the name of the line's K/V file, empty without one. Raises ValueError if the checksum is missing."""
    name = text_of(line, "rows")
    if name and not (ROWS.fullmatch(name) and text_of(line, "rows_checksum")):
        raise ValueError("rows")
    return name


def ids_of(tokens: Iterable[int]) -> list[int]:
    ids = list(tokens)
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ValueError("tokens")
    return ids


def ranges_of(pairs: Iterable[Sequence[int]], length: int) -> list[Range]:
    """Return the pairs as ranges. Raises ValueError unless they ascend within a sequence of `length` tokens."""
    ranges = [(first, last) for first, last in pairs]
    if not all(type(position) is int for span in ranges for position in span) or not is_ascending(ranges, length):
        raise ValueError("range")
    return ranges


def patches_of(line: Line, length: int) -> list[Patch]:
    """Return the token patches of a line, for a sequence of `length` tokens."""
    spans = ranges_of([(part["first"], part["last"]) for part in line["patches"]], length)
    return [Patch(*span, ids_of(part["tokens"])) for span, part in zip(spans, line["patches"], strict=True)]


@dataclass(frozen=True, slots=True)
class Origin:
    """Provenance of a piece, as in engine/pieces.Piece; of an edit, its effects."""

    reason: Reason = Reason.PLAIN
    detail: str = ""
    moved: int = 0
    rewritten: int = 0  # of an edit: KV entries that it computed
    blocks: int = 0
    passed: int = 0
    selected: str = ""
    kept: str = ""
    nbytes: int = 0
    erratum: bool = False  # of an edit: it adds an erratum before the next question
    contradicted: bool = False  # of an edit of the text: an earlier erratum comes after it

    @classmethod
    def of(cls, piece: Piece) -> Origin:
        return cls(**{key: getattr(piece, key) for key in ("reason", *_TEXTS, *_NUMBERS)})


_TEXTS, _NUMBERS = ("detail", "selected", "kept"), ("moved", "rewritten", "blocks", "passed", "nbytes")


def as_line(origin: Origin) -> Line:
    """Return its keys for a ledger line, without defaults."""
    keys = ("reason", *_TEXTS, *_NUMBERS, "contradicted")
    return {key: value for key, value in asdict(origin).items() if key in keys and value}


def origin_of(line: Line) -> Origin:
    """Parse the output of `as_line`. Raises KeyError, TypeError or ValueError for anything else."""
    values: dict[str, Any] = {key: text_of(line, key) for key in _TEXTS if key in line}
    values |= {key: number_of(line, key) for key in _NUMBERS if key in line}
    reason = text_of(line, "reason") if "reason" in line else ""
    if reason in _REASONS:  # a newer version may have others
        values["reason"] = Reason(reason)
    return Origin(**values, contradicted=line.get("contradicted") is True)


_REASONS = {reason.value for reason in Reason}

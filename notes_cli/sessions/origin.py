"""How a piece or an edit came about, as ledgers keep it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from notes_cli.engine.pieces import Piece, Reason
from notes_cli.sessions.lines import Line, number_of, text_of


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

"""Serializes and parses a session's ledger: a JSONL log whose lines are chained by checksums (docs/format.md).

Each turn, edit, compaction, cut and undo appends a line; forgetting for good replaces all lines by one. Each line ends
with a checksum over itself and the previous line's checksum, which detects lines that were changed, moved, removed or
copied from another ledger. The head, a file with the number of lines and the last checksum, detects truncation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from typing import NamedTuple

from notes_cli.engine.segment import Identity
from notes_cli.sessions.state import Line, State, fold, text_of

FORMAT = 8  # changes when an older version would read a newer ledger wrongly
TIME = "%Y-%m-%dT%H:%M:%SZ"  # UTC
DIGITS = 16  # of a checksum
SEAL = len(', "checksum": ""}') + DIGITS  # bytes that end a line
HEAD_LINE = re.compile(r"([1-9][0-9]{0,8}) ([0-9a-f]{16})\n")


@dataclass(frozen=True, slots=True)
class Header:
    """Settings that are fixed when a session begins."""

    identity: Identity
    cache: str  # types of K and V in the cache, "q8_0/f16"
    prefix_only: bool  # K/V cannot be moved, so each turn stores that of the whole sequence
    model: str  # path of the model file, for display


class Head(NamedTuple):
    """The end of a ledger: its number of lines, and the checksum of the last."""

    lines: int
    checksum: str

    def __str__(self) -> str:
        return f"{self.lines} {self.checksum}\n"

    @classmethod
    def read(cls, text: str) -> Head | None:
        """Parse the output of `str`; return None for anything else."""
        match = HEAD_LINE.fullmatch(text)
        return cls(int(match[1]), match[2]) if match else None


class Ledger(NamedTuple):
    """A parsed ledger. `end`: bytes in complete lines."""

    header: Header
    lines: list[Line]
    state: State
    end: int
    head: Head

    @property
    def kept(self) -> list[str]:
        """The K/V files still needed. Of a prefix-only model the last two, enough for one undo."""
        names = [str(line["rows"]) for line in self.state.live if line["rows"]]
        return names[-2:] if self.header.prefix_only else names


class LedgerError(ValueError):
    """The reason why bytes are not a ledger."""


class CutError(LedgerError):
    """A ledger of valid lines that does not match its head: truncated, or replaced by another."""


class FormatError(LedgerError):
    """A ledger in a format that this version does not read; the message is its number."""


def read_ledger(data: bytes, head: Head | None = None) -> Ledger:
    """Parse a ledger, skipping bytes after the last complete line: an interrupted write. Without `head`, truncation at
    a line is not detected. Raises LedgerError if it is damaged, CutError if its valid lines do not match `head`."""
    end = data.rfind(b"\n") + 1
    whole = data[:end].split(b"\n")[:-1]
    _check_format(data.partition(b"\n")[0])
    lines: list[Line] = []
    checksums: list[str] = []
    for number, written in enumerate(whole, 1):
        content, checksum = _parse_line(written, checksums[-1] if checksums else "", number)
        lines.append(content)
        checksums.append(checksum)
    if len(lines) < 2:  # a session begins with two
        raise LedgerError(_missing(len(lines), end < len(data)) if data else "it is empty")
    try:
        for line in lines:
            datetime.strptime(text_of(line, "time"), TIME)
        first = lines[0]
        identity = Identity.from_dict({key: text_of(first["identity"], key) for key in first["identity"]})
        header = Header(identity, text_of(first, "cache"), first["whole"] is True, text_of(first, "model"))
        replaced = text_of(first, "replaces") if "replaces" in first else ""
        ledger = Ledger(header, lines, fold(lines[1:]), end, Head(len(lines), checksums[-1]))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise LedgerError("its lines contradict each other") from error
    if head and head.checksum != replaced and head.checksum not in checksums:
        if len(lines) < head.lines:
            raise CutError(f"{_missing(len(lines), end < len(data))} of {head.lines}")
        raise CutError("its lines are not those that were written last")
    return ledger


def _check_format(line: bytes) -> None:
    """Raise FormatError if the first line has another format number."""
    try:
        number = json.loads(line)["format"]
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        return  # reported when it is parsed
    if type(number) is int and number != FORMAT:
        raise FormatError(str(number))


def _missing(lines: int, torn: bool) -> str:
    return f"it ends within line {lines + 1}" if torn else f"it ends after line {lines}"


def _parse_line(line: bytes, before: str, number: int) -> tuple[Line, str]:
    """Return a line without its checksum, and the checksum. Raises LedgerError if either is invalid."""
    body = line[:-SEAL] + b"}"
    checksum = _checksum(before, body)
    if not line.endswith(_seal(checksum)):
        raise LedgerError(f"line {number} is not as it was written")
    try:
        content = json.loads(body)
    except (ArithmeticError, RecursionError, ValueError) as error:
        raise LedgerError(f"line {number} is not JSON") from error
    if not isinstance(content, dict):
        raise LedgerError(f"line {number} is not a JSON object")
    return content, checksum


def _checksum(before: str, line: bytes) -> str:
    return sha256(before.encode() + line).hexdigest()[:DIGITS]


def _seal(checksum: str) -> bytes:
    return f', "checksum": "{checksum}"}}'.encode()


def serialize(lines: Iterable[Line], before: str = "") -> bytes:
    """Serialize lines that follow one with the checksum `before`."""
    return chain((json.dumps(line, ensure_ascii=False).encode() for line in lines), before)


def chain(objects: Iterable[bytes], before: str = "") -> bytes:
    """As `serialize`, for lines that are JSON already."""
    written = []
    for body in objects:
        before = _checksum(before, body)
        written.append(body[:-1] + _seal(before) + b"\n")
    return b"".join(written)


def first_line(header: Header) -> Line:
    """Return the first line of a ledger."""
    return {
        "op": "open",
        "format": FORMAT,
        "identity": header.identity.as_dict(),
        "cache": header.cache,
        "whole": header.prefix_only,
        "model": header.model,
    }


def with_time(line: Line) -> Line:
    """Return the line with the current time."""
    return {**line, "time": datetime.now(timezone.utc).strftime(TIME)}

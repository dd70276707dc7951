"""A ledger's bytes: its first line, the lines after it, and reading them back. Described in docs/format.md.

A line for each turn, edit, compaction, forgetting and undo. Lines are appended, but for a forgetting, after which a
ledger may begin with what was left. Each line ends with a checksum over itself and the checksum of the line before it,
so that a line that was changed, moved, left out or taken from another ledger is found. What was cut off at the end is
found by the head: the number of lines and the last checksum, kept beside the ledger and written after it. It knows
neither llama.cpp nor files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from typing import NamedTuple

from notes_cli.engine.identity import Identity
from notes_cli.sessions.lines import Line, text_of
from notes_cli.sessions.state import State, fold

FORMAT = 5  # changes when an older version would read a newer ledger wrongly
TIME = "%Y-%m-%dT%H:%M:%SZ"  # UTC
DIGITS = 16  # of a checksum
SEAL = len(', "checksum": ""}') + DIGITS  # bytes that end a line
HEAD_LINE = re.compile(r"([1-9][0-9]{0,8}) ([0-9a-f]{16})\n")


@dataclass(frozen=True, slots=True)
class Header:
    """What a session was begun with; the rest of its life it must be the same."""

    identity: Identity
    cache: str  # K and V as the cache keeps them, "q8_0/f16": rows are read back from that
    prefix_only: bool  # rows cannot be moved, so each turn keeps those of the whole sequence
    model: str  # path of the model's file, for people


class Head(NamedTuple):
    """How far a ledger reaches: the number of its lines, and the checksum of the last one."""

    lines: int
    checksum: str

    def __str__(self) -> str:
        return f"{self.lines} {self.checksum}\n"

    @classmethod
    def read(cls, text: str) -> Head | None:
        """Parse the text that `str` writes; None for anything else."""
        match = HEAD_LINE.fullmatch(text)
        return cls(int(match[1]), match[2]) if match else None


class Ledger(NamedTuple):
    """A parsed ledger: the first line, all lines, the state that they give, how many bytes are whole lines, and
    its head."""

    header: Header
    lines: list[Line]
    state: State
    end: int
    head: Head

    @property
    def kept(self) -> list[str]:
        """The files of rows that are still needed. Of pinned rows the last two files: as far back as one undo."""
        names = [str(line["rows"]) for line in self.state.live if line["rows"]]
        return names[-2:] if self.header.prefix_only else names


class LedgerError(ValueError):
    """Bytes that are not a ledger, and why."""


class CutError(LedgerError):
    """A ledger whose lines are sound, and not those that its head names: some are missing, or it is another one."""


class FormatError(LedgerError):
    """A ledger in a format that this version does not read; the message is that format."""


def read_ledger(data: bytes, head: Head | None = None) -> Ledger:
    """Parse a ledger. Bytes after its last whole line are of an interrupted write, and skipped.

    `head` is what is known of it; without one, lines that are missing at the end are not found.
    Raise LedgerError where it is damaged, CutError where all lines are sound and not those that `head` names.
    """
    end = data.rfind(b"\n") + 1
    whole = data[:end].split(b"\n")[:-1]
    _check_format(data.partition(b"\n")[0])
    lines: list[Line] = []
    checksums: list[str] = []
    for number, written in enumerate(whole, 1):
        content, checksum = _opened(written, checksums[-1] if checksums else "", number)
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
    """Raise FormatError where the first line says another one."""
    try:
        found = json.loads(line)["format"]
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        return  # refused with the reason when it is read
    if type(found) is int and found != FORMAT:
        raise FormatError(str(found))


def _missing(lines: int, torn: bool) -> str:
    """Which line a ledger ends before, or in."""
    return f"it ends within line {lines + 1}" if torn else f"it ends after line {lines}"


def _opened(line: bytes, before: str, number: int) -> tuple[Line, str]:
    """A line without its checksum, and that. Raise LedgerError if it is not the right one, or this is no line."""
    body = line[:-SEAL] + b"}"
    checksum = _checksum(before, body)
    if not line.endswith(_seal(checksum)):
        raise LedgerError(f"line {number} is not as it was written")
    try:
        found = json.loads(body)
    except (ArithmeticError, RecursionError, ValueError) as error:
        raise LedgerError(f"line {number} is not JSON") from error
    if not isinstance(found, dict):
        raise LedgerError(f"line {number} is not a JSON object")
    return found, checksum


def _checksum(before: str, line: bytes) -> str:
    return sha256(before.encode() + line).hexdigest()[:DIGITS]


def _seal(checksum: str) -> bytes:
    """How a line ends."""
    return f', "checksum": "{checksum}"}}'.encode()


def sealed(lines: Iterable[Line], before: str = "") -> bytes:
    """Lines as a ledger has them, after one with the checksum `before`."""
    return chained((json.dumps(line, ensure_ascii=False).encode() for line in lines), before)


def chained(objects: Iterable[bytes], before: str = "") -> bytes:
    """The same of lines that are JSON already."""
    written = []
    for body in objects:
        before = _checksum(before, body)
        written.append(body[:-1] + _seal(before) + b"\n")
    return b"".join(written)


def opening(header: Header) -> Line:
    """The first line of a ledger."""
    return {
        "op": "open",
        "format": FORMAT,
        "identity": header.identity.as_dict(),
        "cache": header.cache,
        "whole": header.prefix_only,
        "model": header.model,
    }


def dated(line: Line) -> Line:
    """A line that is written now."""
    return {**line, "time": datetime.now(timezone.utc).strftime(TIME)}

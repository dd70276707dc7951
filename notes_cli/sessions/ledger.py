"""A ledger's bytes: its first line, the lines after it, and reading them back. Described in docs/format.md.

A line for each turn, edit, compaction, forgetting and undo. Lines are appended, but for a forgetting, after which a
ledger may begin with what was left. It knows neither llama.cpp nor files.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import NamedTuple

from notes_cli.classes import dataclass
from notes_cli.engine.identity import Identity
from notes_cli.sessions.lines import Line, text_of
from notes_cli.sessions.state import State, fold

FORMAT = 4  # changes when an older version would read a newer ledger wrongly
BEGUN = 2  # the format until something is forgotten, which older versions do not know
FORGOTTEN, IMAGES = 3, 4  # the formats from then on, and with an image
TIME = "%Y-%m-%dT%H:%M:%SZ"  # UTC


@dataclass(frozen=True, slots=True)
class Header:
    """What a session was begun with; the rest of its life it must be the same."""

    identity: Identity
    cache: str  # K and V as the cache keeps them, "q8_0/f16": rows are read back from that
    pinned: bool  # rows cannot be moved, so each turn keeps those of the whole notebook
    model: str  # path of the model's file, for people


class Ledger(NamedTuple):
    """What a ledger's file holds: the first line, all lines, what they come to, and how many bytes are whole lines."""

    header: Header
    lines: list[Line]
    state: State
    end: int

    @property
    def kept(self) -> list[str]:
        """The files of rows that are still needed. Of pinned rows the last two files: as far back as one undo."""
        names = [str(line["rows"]) for line in self.state.live if line["rows"]]
        return names[-2:] if self.header.pinned else names


class LedgerError(ValueError):
    """Bytes that are not a ledger."""


class NewerError(LedgerError):
    """A ledger in a format that this version does not know."""


def read_ledger(data: bytes) -> Ledger:
    """Raise LedgerError where it is damaged."""
    end = data.rfind(b"\n") + 1
    try:
        lines = [json.loads(line) for line in data[:end].split(b"\n")[:-1]]
        first = lines[0]
        if first["format"] > FORMAT:
            raise NewerError(str(first["format"]))
        for line in lines:
            datetime.strptime(text_of(line, "time"), TIME)
        identity = Identity.from_dict({key: text_of(first["identity"], key) for key in first["identity"]})
        header = Header(identity, text_of(first, "cache"), first["whole"] is True, text_of(first, "model"))
        return Ledger(header, lines, fold(lines[1:]), end)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise LedgerError from error
    except LedgerError:
        raise
    except ValueError as error:
        raise LedgerError from error


def as_bytes(line: Line, header: Header | None = None) -> bytes:
    """A line as it is appended now; `header` begins the ledger."""
    now = datetime.now(timezone.utc).strftime(TIME)
    lines: list[Line] = [{**line, "time": now}]
    if header is not None:
        lines.insert(
            0, {"op": "open", "format": IMAGES if line.get("images") else BEGUN, **_as_line(header), "time": now}
        )
    return b"".join(map(line_bytes, lines))


def _as_line(header: Header) -> Line:
    return {
        "identity": header.identity.as_dict(),
        "cache": header.cache,
        "whole": header.pinned,
        "model": header.model,
    }


def line_bytes(line: Line) -> bytes:
    """A line as it is."""
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"

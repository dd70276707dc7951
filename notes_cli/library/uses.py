"""How often each segment was used, when last, and what that saved: a file of marks in `.uses/` for each.

A mark has eight bytes, tokens that were spliced and milliseconds of prefill that this saved. It is appended in one
write, which any number of processes can do at once; no mark crosses a block of a disk, so a full one tears none. The
size of the file gives the count, its time is that of the last use. What cannot be written is not counted.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from notes_cli.library import private

FOLDER = ".uses"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_MARK = struct.Struct("<II")  # tokens, milliseconds
_UNKNOWN = 2**32 - 1  # in the place of milliseconds


@dataclass(frozen=True, slots=True)
class Uses:
    """How often, and when last in seconds of the system's clock; None: never."""

    count: int = 0
    last: float | None = None


@dataclass(frozen=True, slots=True)
class Spliced:
    """How often answers got tokens from a segment, how many in all, and how many seconds of prefill that saved, as far
    as it is known."""

    times: int = 0
    tokens: int = 0
    seconds: float = 0.0


def mark(segment: Path, tokens: int = 0, seconds: float | None = None) -> None:
    """Count one more use of a segment file, now, if that can be written: tokens that were spliced, and seconds that
    their prefill would have taken, None if that is not known."""
    saved = _UNKNOWN if seconds is None else min(round(1000 * seconds), _UNKNOWN - 1)
    with contextlib.suppress(OSError):
        record = _record(segment)
        private.make(record.parent)
        handle = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK, 0o600)
        try:
            os.utime(handle) if os.utime in os.supports_fd else os.utime(record)  # also where the disk is full
            os.write(handle, _MARK.pack(tokens, saved))
        finally:
            os.close(handle)


def uses_of(segment: Path) -> Uses:
    """What is known of a segment file."""
    try:
        found = _record(segment).lstat()
    except OSError:
        return Uses()
    return Uses(found.st_size // _MARK.size, found.st_mtime)


def spliced_from(segment: Path) -> Spliced:
    """What answers got from a segment file."""
    try:
        handle = os.open(_record(segment), os.O_RDONLY | _NO_LINK)
        with open(handle, "rb") as file:
            data = file.read()
    except OSError:
        return Spliced()
    marks = list(_MARK.iter_unpack(data[: len(data) // _MARK.size * _MARK.size]))
    times, tokens = sum(count > 0 for count, _ in marks), sum(count for count, _ in marks)
    return Spliced(times, tokens, sum(saved for _, saved in marks if saved != _UNKNOWN) / 1000)


def forget(segment: Path) -> None:
    """The segment file was removed."""
    with contextlib.suppress(OSError):
        _record(segment).unlink()


def orphans(folder: Path) -> list[Path]:
    """Records of segments that are gone from a library's folder."""
    try:
        return sorted(path for path in (folder / FOLDER).iterdir() if not (folder / path.name).exists())
    except OSError:
        return []


def _record(segment: Path) -> Path:
    return segment.parent / FOLDER / segment.name

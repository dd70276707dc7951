"""How often each segment was used, and when last: a file of marks in `.uses/` for each, a byte a use.

A mark is appended, which any number of processes can do at once and which nothing can tear: the size of the file is the
count, its time that of the last use. No segment is written for it. What cannot be written is not counted.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from notes_cli.classes import dataclass
from notes_cli.library import private

FOLDER = ".uses"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class Uses:
    """How often, and when last in seconds of the system's clock; None: never."""

    count: int = 0
    last: float | None = None


def mark(segment: Path) -> None:
    """Count one more use of a segment file, now, if that can be written."""
    with contextlib.suppress(OSError):
        record = _record(segment)
        private.make(record.parent)
        handle = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK, 0o600)
        try:
            os.utime(handle) if os.utime in os.supports_fd else os.utime(record)  # also where the disk is full
            os.write(handle, b".")
        finally:
            os.close(handle)


def uses_of(segment: Path) -> Uses:
    """What is known of a segment file."""
    try:
        found = _record(segment).lstat()
    except OSError:
        return Uses()
    return Uses(found.st_size, found.st_mtime)


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

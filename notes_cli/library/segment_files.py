"""The files of the library's folder that are segments, and how often each was used.

They are called `<name>.<key of the identity>.gguf`. This loads neither numpy nor llama.cpp, so that a shell can
complete names and fields at once. Uses are marks in a file of `.uses/` for each segment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from notes_cli.engine.gguf_file import Cursor, read_counts, read_values
from notes_cli.errors import SegmentError, reason
from notes_cli.library.safe_files import check_private, make_private
from notes_cli.text import names

ERRATA = "errata.jsonl"  # what everybody is told (standing.py)
GLANCE = 1 << 22  # bytes in which the fields are looked for: a text far longer than any model reads precedes them
MOST_KEYS = 1 << 14
FILE = re.compile(r"(?P<name>[^.]+)\.(?P<key>[0-9a-f]{12})\.gguf")


def name_in(path: Path) -> str | None:
    """The name of the skill that a file is of, None if it is not called like a segment."""
    match = FILE.fullmatch(path.name)
    name = names.typed(match["name"]) if match else ""
    return name if names.is_name(name) else None


def skill_named(word: str, known: Collection[str]) -> str | None:
    """The known name that a user's word means: as it is typed, or in lower case (Returns.txt was compiled as returns),
    unless there is a file of that name. None if it means none."""
    typed = names.typed(word)
    if typed in known:
        return typed
    lower = names.typed(word.lower())
    return lower if lower in known and not Path(word).exists() else None


def segment_files(folder: Path) -> list[tuple[str, Path]]:
    """Name and path of each segment in a folder, by the file's name; none if it is not there.

    Raise NotesError if it cannot be read, or may be of another user's making (safe_files.py).
    """
    check_private(folder)
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SegmentError(f"cannot read the library {folder}: {reason(error)}") from error
    return [(name, path) for path in paths if (name := name_in(path))]


def fields_in(path: Path) -> dict[str, str]:
    """The value of each field of a segment, by name, for completion: {} for any other file, and nothing is checked."""
    try:
        with path.open("rb") as file:
            cursor = Cursor(file.read(GLANCE))
        values = read_values(cursor, read_counts(cursor, MOST_KEYS)[2])
        spans = json.loads(str(values["notes.fields"].value))
        return {str(span["name"]): str(span["value"]) for span in spans}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


USES = ".uses"
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


def mark_use(segment: Path, tokens: int = 0, seconds: float | None = None) -> None:
    """Count one more use of a segment file, now, if that can be written: tokens that were spliced, and seconds that
    their prefill would have taken, None if that is not known."""
    saved = _UNKNOWN if seconds is None else min(round(1000 * seconds), _UNKNOWN - 1)
    with contextlib.suppress(OSError):
        record = _uses_file(segment)
        make_private(record.parent)
        handle = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK, 0o600)
        try:
            os.utime(handle) if os.utime in os.supports_fd else os.utime(record)  # also where the disk is full
            os.write(handle, _MARK.pack(tokens, saved))
        finally:
            os.close(handle)


def uses_of(segment: Path) -> Uses:
    """What is known of a segment file."""
    try:
        found = _uses_file(segment).lstat()
    except OSError:
        return Uses()
    return Uses(found.st_size // _MARK.size, found.st_mtime)


def spliced_from(segment: Path) -> Spliced:
    """What answers got from a segment file."""
    try:
        handle = os.open(_uses_file(segment), os.O_RDONLY | _NO_LINK)
        with open(handle, "rb") as file:
            data = file.read()
    except OSError:
        return Spliced()
    marks = list(_MARK.iter_unpack(data[: len(data) // _MARK.size * _MARK.size]))
    times, tokens = sum(count > 0 for count, _ in marks), sum(count for count, _ in marks)
    return Spliced(times, tokens, sum(saved for _, saved in marks if saved != _UNKNOWN) / 1000)


def forget_uses(segment: Path) -> None:
    """The segment file was removed."""
    with contextlib.suppress(OSError):
        _uses_file(segment).unlink()


def orphaned_uses(folder: Path) -> list[Path]:
    """Records of segments that are gone from a library's folder."""
    try:
        return sorted(path for path in (folder / USES).iterdir() if not (folder / path.name).exists())
    except OSError:
        return []


def _uses_file(segment: Path) -> Path:
    return segment.parent / USES / segment.name

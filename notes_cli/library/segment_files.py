"""Lists the segment files of a library's folder, `<name>.<key of the identity>.gguf`, and records their uses.

Loads neither numpy nor llama.cpp, so that shells complete names and fields without delay. Each segment has a file in
`.uses/`, to which each use appends a fixed-size record.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from notes_cli.engine.gguf import Cursor, open_file, read_head
from notes_cli.errors import SegmentError, reason
from notes_cli.library.safe_files import check_private, make_private
from notes_cli.text import names

ERRATA = "errata.jsonl"  # global errata (global_errata.py)
FILE = re.compile(r"(?P<name>[^.]+)\.(?P<key>[0-9a-f]{12})\.gguf")


def name_in(path: Path) -> str | None:
    """Return the name of the skill of a segment file, None for any other file name."""
    match = FILE.fullmatch(path.name)
    name = names.typed(match["name"]) if match else ""
    return name if names.is_name(name) else None


def skill_named(word: str, known: Collection[str]) -> str | None:
    """Return the known name of a user's word: as typed, or in lower case (Returns.txt is compiled as returns) unless a
    file has that name. None without one."""
    typed = names.typed(word)
    if typed in known:
        return typed
    lower = names.typed(word.lower())
    return lower if lower in known and not Path(word).exists() else None


def segment_files(folder: Path) -> list[tuple[str, Path]]:
    """Return name and path of each segment in a folder, by file name; none if the folder does not exist. Raises
    NotesError if it cannot be read, or another user may have made it (safe_files.py)."""
    check_private(folder)
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SegmentError(f"cannot read the library {folder}: {reason(error)}") from error
    return [(name, path) for path in paths if (name := name_in(path))]


def fields_in(path: Path) -> dict[str, str]:
    """Return the value of each field of a segment, by name, unchecked, for completion; {} for any other file."""
    try:
        with open_file(path) as file:
            spans = json.loads(str(read_head(Cursor(file)).values["notes.fields"]))
        return {str(span["name"]): str(span["value"]) for span in spans}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


CHECKPOINTS = ".begun"  # folder of interrupted work: of a compile a segment file with the name of the final one


def checkpoint_path(segment: Path) -> Path:
    """Return the path of a segment file's checkpoint, also if it does not exist."""
    return segment.parent / CHECKPOINTS / segment.name


def remove_checkpoint(segment: Path) -> None:
    """Remove the checkpoint of a segment that is compiled or not wanted any more."""
    with contextlib.suppress(OSError):
        checkpoint_path(segment).unlink(missing_ok=True)


def compile_checkpoints(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints of a library's folder."""
    with contextlib.suppress(OSError):
        yield from sorted(path for path in (folder / CHECKPOINTS).iterdir() if name_in(path))


LOCKS = ".locks"
LEARNED = "learned"  # folder of the texts that servers have learned, a library of its own


def lock_of(path: Path) -> Path:
    """Return the lock file of a segment file, held by compiles and removals."""
    return path.parent / LOCKS / f"{path.name}.lock"


USES = ".uses"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_MARK = struct.Struct("<II")  # tokens, milliseconds
_UNKNOWN = 2**32 - 1  # instead of milliseconds


@dataclass(frozen=True, slots=True)
class Uses:
    """Number of uses, and time of the last one in seconds of the system's clock; None: never used."""

    count: int = 0
    last: float | None = None


@dataclass(frozen=True, slots=True)
class Spliced:
    """Number of splices of a segment, their tokens in all, and the seconds of prefill saved, as far as known."""

    times: int = 0
    tokens: int = 0
    seconds: float = 0.0


def mark_use(segment: Path, tokens: int = 0, seconds: float | None = None) -> None:
    """Record a use of a segment file, if the record can be written: spliced tokens, and the seconds that their prefill
    would have taken, None: not known."""
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
    """Return the uses of a segment file."""
    try:
        status = _uses_file(segment).lstat()
    except OSError:
        return Uses()
    return Uses(status.st_size // _MARK.size, status.st_mtime)


def spliced_from(segment: Path) -> Spliced:
    """Return the splices of a segment file."""
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
    """Remove the record of a segment file that was removed."""
    with contextlib.suppress(OSError):
        _uses_file(segment).unlink()


def _uses_file(segment: Path) -> Path:
    return segment.parent / USES / segment.name

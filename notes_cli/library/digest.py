"""Digests of model files, remembered, because hashing gigabytes takes seconds.

A digest is believed again while path, device, file number, size and both times are the same (the modification time
alone can be set to anything; the change time cannot). The memory is a small JSON file; lost or damaged it costs time,
never correctness. It knows nothing of models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from notes_cli.engine.source import stamp
from notes_cli.errors import ModelError, NotesError, Progress, reason
from notes_cli.library import private
from notes_cli.library.atomic import replacing

CHUNK = 4 << 20
KEPT = 256  # files remembered, the latest
SETTLED = 2.0  # seconds: a file may change again within one tick of a coarse clock and keep its size and time


def file_sha256(path: Path, file: BinaryIO, memory: Path, progress: Progress | None = None) -> str:
    """SHA-256 of an open file as hex, from `memory` (a JSON file) where it is known by its `path`.

    What is read is `file`, whatever the path names by now. `progress` gets bytes done and bytes in all meanwhile.
    Raise ModelError if it cannot be read.
    """
    return remembered(path, file, memory, lambda: _hash(file, progress))


def remembered(path: Path, file: BinaryIO, memory: Path, find: Callable[[], str], *, only: str | None = None) -> str:
    """What `find` finds about an open file, 64 hexadecimal digits, from `memory` (a JSON file) where it is known by its
    `path`; `only`: where this is what is known. Raise ModelError if the file cannot be read, and what `find` raises.
    """
    try:
        path = path.resolve()
        before = list(stamp(file))
        known = _load(memory)
        entry = known.get(str(path))
        if entry is not None and entry[:-1] == before and only in (None, entry[-1]):
            return str(entry[-1])
        found = find()
        after = list(stamp(file))
        settled = time.time() - os.fstat(file.fileno()).st_mtime > SETTLED
    except OSError as error:
        raise ModelError(f"cannot read {path}: {reason(error)}") from error
    if settled and after == before:
        known.pop(str(path), None)
        known[str(path)] = [*before, found]
        _store(memory, dict(list(known.items())[-KEPT:]))
    return found


def known_sha256(path: Path, memory: Path) -> str | None:
    """The digest of a file if it is remembered and the file has not changed; nothing else of it is read."""
    try:
        path = path.resolve()
        entry = _load(memory).get(str(path))
        with path.open("rb") as file:
            return str(entry[-1]) if entry is not None and entry[:-1] == list(stamp(file)) else None
    except (OSError, NotesError):
        return None


def _hash(file: BinaryIO, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    size, done = os.fstat(file.fileno()).st_size, 0
    file.seek(0)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # raw or buffered, both have it
        digest.update(buffer[:count])
        done += count
        if progress is not None:
            progress(done, size)
    return digest.hexdigest()


def _load(memory: Path) -> dict[str, list[int | str]]:
    """What is remembered; only entries of the right shape. Raise NotesError for what others may have written."""
    private.check(memory.parent)
    private.check_file(memory)
    try:
        data = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {path: entry for path, entry in data.items() if _sound(entry)} if isinstance(data, dict) else {}


def _sound(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and [type(part) for part in entry] == [int, int, int, int, int, str]
        and len(entry[-1]) == 64
        and set(entry[-1]) <= set("0123456789abcdef")
    )


def _store(memory: Path, known: dict[str, list[int | str]]) -> None:
    """Two processes may write at once: the last one wins, and the other hashes again some day."""
    with contextlib.suppress(OSError), replacing(memory) as temporary:
        temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")

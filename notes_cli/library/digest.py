"""Digests of model files, remembered, because hashing gigabytes takes seconds.

A digest is believed again while path, device, file number, size and both times are the same (the modification time
alone can be set to anything; the change time cannot). It knows nothing of models.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from notes_cli.engine.source import stamp
from notes_cli.errors import ModelError, NotesError, Progress, reason
from notes_cli.library.memory import Memory

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
        entry = _memory(memory).load().get(str(path))
        if entry is not None and entry[:-1] == before and only in (None, entry[-1]):
            return str(entry[-1])
        found = find()
        after = list(stamp(file))
        settled = time.time() - os.fstat(file.fileno()).st_mtime > SETTLED
    except OSError as error:
        raise ModelError(f"cannot read {path}: {reason(error)}") from error
    if settled and after == before:
        _memory(memory).add({str(path): [*before, found]})
    return found


def known_sha256(path: Path, memory: Path) -> str | None:
    """The digest of a file if it is remembered and the file has not changed; nothing else of it is read."""
    try:
        path = path.resolve()
        entry = _memory(memory).load().get(str(path))
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


def _memory(path: Path) -> Memory[list[int | str]]:
    """The stamp of each file by its path, and the digest."""
    return Memory(path, KEPT, _sound, list)


def _sound(entry: list[int | str]) -> list[int | str]:
    kinds, digest = [type(part) for part in entry], str(entry[-1])
    if kinds != [int, int, int, int, int, str] or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(entry)
    return entry

"""Caches facts about models that are slow to compute as JSON, such as digests of files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from notes_cli.engine.header import stamp
from notes_cli.errors import ModelError, NotesError, Progress, reason
from notes_cli.library.safe_files import check_private, check_private_file, replacing

T = TypeVar("T")
_DAMAGED = (AttributeError, LookupError, TypeError, ValueError, RecursionError)


class Memory(Generic[T]):
    """A JSON file that caches entries by key."""

    def __init__(self, path: Path, capacity: int, read: Callable[[Any], T], write: Callable[[T], object]) -> None:
        """Keep the `capacity` latest entries. `read` converts JSON to an entry, or raises a Python error for another
        shape; `write` does the reverse."""
        self.path = path
        self._capacity = capacity
        self._read, self._write = read, write

    def load(self) -> dict[str, T]:
        """Return the valid entries, the latest last; none if the file is damaged. Raises NotesError if another user may
        have written it."""
        check_private(self.path.parent)
        check_private_file(self.path)
        entries = {}
        with contextlib.suppress(OSError, *_DAMAGED):
            for key, entry in json.loads(self.path.read_text(encoding="utf-8")).items():
                with contextlib.suppress(*_DAMAGED):
                    entries[key] = self._read(entry)
        return entries

    def add(self, new: Mapping[str, T]) -> None:
        """Add entries, if the file can be written. Raises NotesError as `load` does."""
        entries = {key: entry for key, entry in self.load().items() if key not in new} | {**new}
        data = {key: self._write(entry) for key, entry in [*entries.items()][-self._capacity :]}
        with contextlib.suppress(OSError), replacing(self.path) as temporary:
            temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")


CHUNK = 4 << 20
DIGESTS = 256  # capacity of the cache
MIN_AGE = 2.0  # seconds: a file may change again within one tick of a coarse clock and keep its size and time


def file_sha256(path: Path, file: BinaryIO, memory: Path, progress: Progress | None = None) -> str:
    """Return the SHA-256 of an open file as hex, from `memory` (a JSON file) if it is cached under its `path`.

    Reads `file`, whatever the path names by now. `progress` gets bytes done and in all. Raises ModelError if the file
    cannot be read.
    """
    try:
        path = path.resolve()
        before = list(stamp(file))
        entry = _digests(memory).load().get(str(path))
        if entry is not None and entry[:-1] == before:
            return str(entry[-1])
        digest = _hash_file(file, progress)
        after = list(stamp(file))
        old_enough = time.time() - os.fstat(file.fileno()).st_mtime > MIN_AGE
    except OSError as error:
        raise ModelError(f"cannot read {path}: {reason(error)}") from error
    if old_enough and after == before:
        _digests(memory).add({str(path): [*before, digest]})
    return digest


def known_sha256(path: Path, memory: Path) -> str | None:
    """Return the cached digest of a file that has not changed since; its content is not read."""
    try:
        path = path.resolve()
        entry = _digests(memory).load().get(str(path))
        with path.open("rb") as file:
            return str(entry[-1]) if entry is not None and entry[:-1] == list(stamp(file)) else None
    except (OSError, NotesError):
        return None


def _hash_file(file: BinaryIO, progress: Progress | None) -> str:
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


def _digests(path: Path) -> Memory[list[int | str]]:
    return Memory(path, DIGESTS, _check_digest, list)


def _check_digest(entry: list[int | str]) -> list[int | str]:
    kinds, digest = [type(part) for part in entry], str(entry[-1])
    if kinds != [int, int, int, int, int, str] or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(entry)
    return entry

"""Digests of model files, remembered, because hashing gigabytes takes seconds.

A digest is believed again while path, size, file number and both times stand (the modification time alone can be set
to anything; the change time cannot). The memory is a small JSON file;
lost or damaged it costs time, never correctness. It knows nothing of models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from notes_cli.errors import ModelError
from notes_cli.library.atomic import replacing

CHUNK = 4 << 20
KEPT = 256  # files remembered, the latest
SETTLED = 2.0  # seconds: a file may change again within one tick of a coarse clock and keep its size and time

Progress = Callable[[int, int], None]


def file_sha256(path: Path, memory: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file as hex, from `memory` (a JSON file) where it is known.

    `progress` gets bytes done and bytes in all while the file is read. Raise ModelError if it cannot be read.
    """
    try:
        path = path.resolve(strict=True)
        stat = path.stat()
        stamp = _stamp(stat)
        known = _load(memory)
        entry = known.get(str(path))
        if entry is not None and entry[:-1] == stamp:
            return str(entry[-1])
        digest = _hash(path, stat.st_size, progress)
        after = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    settled = time.time() - stat.st_mtime > SETTLED
    if settled and _stamp(after) == stamp:
        known.pop(str(path), None)
        known[str(path)] = [*stamp, digest]
        _store(memory, dict(list(known.items())[-KEPT:]))
    return digest


def _stamp(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _hash(path: Path, size: int, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    done = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            if progress is not None:
                progress(done, size)
    return digest.hexdigest()


def _load(memory: Path) -> dict[str, list[int | str]]:
    """What is remembered; only entries of the right shape."""
    try:
        data = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {path: entry for path, entry in data.items() if _sound(entry)} if isinstance(data, dict) else {}


def _sound(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and [type(part) for part in entry] == [int, int, int, int, str]
        and len(entry[-1]) == 64
        and set(entry[-1]) <= set("0123456789abcdef")
    )


def _store(memory: Path, known: dict[str, list[int | str]]) -> None:
    """Two processes may write at once: the last one wins, and the other hashes again some day."""
    with contextlib.suppress(OSError), replacing(memory) as temporary:
        temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")

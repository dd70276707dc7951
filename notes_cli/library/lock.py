"""Locks between processes: a file each, which stays, and the system frees it with its process.

It knows nothing of what is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from notes_cli.library import private

if TYPE_CHECKING:
    import filelock

NOTICE = 1.0  # seconds of waiting after which it is said


class HeldError(Exception):
    """Another process holds the lock: which, as far as the system tells."""


@contextmanager
def locked(path: Path, wait: float = -1, told: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock of that file, which is created if need be, as is its folder.

    `wait` is how long to wait for another process, in seconds; negative is for ever. `told` gets, once, who it is.
    Raise HeldError after that; OSError if the file cannot be written.
    """
    import filelock  # 12 ms, of which a command that only reads needs none

    private.make(path.parent)
    lock = filelock.FileLock(path, thread_local=False)  # another thread may give it back
    try:
        _acquire(lock, path, wait, told)
    except filelock.Timeout:
        raise HeldError(_holder(path)) from None
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: filelock.BaseFileLock, path: Path, wait: float, told: Callable[[str], None] | None) -> None:
    from filelock import Timeout

    if told is None or 0 <= wait <= NOTICE:
        lock.acquire(timeout=wait)
        return
    try:
        lock.acquire(timeout=NOTICE)
    except Timeout:
        told(_holder(path))
        lock.acquire(timeout=wait - NOTICE if wait > 0 else wait)


def _holder(path: Path) -> str:
    """Who holds the lock, in words."""
    with suppress(OSError, ValueError, IndexError):  # Linux tells
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            parts = line.split()
            if parts[1] == "FLOCK" and parts[5].rpartition(":")[2] == inode and int(parts[4]) > 0:
                state = Path(f"/proc/{parts[4]}/stat").read_text().rpartition(")")[2].split()[0]
                stopped = f" (stopped, goes on with: kill -CONT {parts[4]})" if state == "T" else ""
                return f"process {parts[4]}{stopped}"
    return "another process"

"""Files that a process uses, so that no other one removes them meanwhile: a lock on the open file.

The system frees it with the file, whatever ends the process. It takes no right to write, so it works in a folder that
is read-only. Where a system has no such locks (Windows), it does not remove a file that is open.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

LOCKS = fcntl is not None  # whether this system has them


def hold(file: BinaryIO) -> None:
    """Keep an open file from `remove`, until it is closed; others may hold it, too."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def hold_alone(handle: int) -> None:
    """The same for one process at a time; wait for the others."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)


def free(path: Path) -> bool:
    """Whether nobody holds a file, as far as the system tells. Raise OSError."""
    if fcntl is None:
        return False
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def remove(path: Path, *, sure: bool = False) -> bool:
    """Remove a file that nobody holds; whether it is gone. `sure`: only where locks tell that. Raise OSError."""
    if fcntl is None:
        if sure:
            return False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return True
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: who reads it keeps what it has open
            if sure:
                return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(handle)

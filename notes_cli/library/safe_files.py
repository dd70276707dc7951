"""Safe files: folders of one user, files written all or nothing, and locks between processes.

* Folders are made for this user alone, and checked before each use, as ssh does with its own.
* A file is written beside its place, synced, and renamed over it.
* A lock on an open file keeps others from removing it; a lock file, which stays, lets one process in at a time. The
  system frees both with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from notes_cli.errors import Help, NotesError, Remedy

if TYPE_CHECKING:
    import filelock

OTHERS = stat.S_IRWXG | stat.S_IRWXO
WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for us alone whatever the umask is. Raise OSError."""
    try:
        _make_one_folder(folder)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private(folder.parent)
        _make_one_folder(folder)  # where nothing can be made, as in /proc, no such file is said of the folder itself


def _make_one_folder(folder: Path) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise


def check_private(folder: Path) -> None:
    """Raise NotesError if others can write in the folder, or in the one that it is in, or own one of them. Where others
    can only read, their permission is removed. One that is not there is fine."""
    if not hasattr(os, "geteuid"):
        return
    open_ = []
    for place in (folder.parent, folder):
        try:
            found = place.stat()
        except OSError:
            continue
        _check_owner(place, found, "Name a folder of your own: NOTES_HOME=FOLDER")
        if found.st_mode & WRITE and not (place != folder and found.st_mode & stat.S_ISVTX):  # as /tmp has it
            open_.append(place)
        elif place == folder and found.st_mode & OTHERS and found.st_uid == os.geteuid():
            with suppress(OSError):  # a file system that is read-only
                place.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
    if open_:
        raise NotesError(
            f"others can write in {' and '.join(map(str, open_))}, so what is there may not be yours",
            Help.CLOSE_FOLDERS(folders=open_),
        )


def check_private_file(path: Path) -> None:
    """Raise NotesError if the file is another user's. One that is not there is fine."""
    if hasattr(os, "geteuid"):
        with suppress(OSError):
            _check_owner(path, path.stat(), Help.REMOVE_FILE(path=path))


def _check_owner(path: Path, found: os.stat_result, remedy: Remedy | str) -> None:
    """Root may do anything anyway: what is root's is no danger."""
    if found.st_uid not in (0, os.geteuid()):
        raise NotesError(f"{path} belongs to {_user(found.st_uid)}, not to you, and may be forged", remedy)


def _user(number: int) -> str:
    import pwd  # not on every system, nor is its caller

    try:
        return f"{pwd.getpwuid(number).pw_name} (user {number})"
    except KeyError:
        return f"user {number}"


try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

LOCKS = fcntl is not None  # whether this system has them


def lock_shared(file: BinaryIO) -> None:
    """Keep an open file from `remove`, until it is closed; others may hold it, too."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def lock_exclusive(handle: int) -> None:
    """The same for one process at a time; wait for the others."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)


def is_unused(path: Path) -> bool:
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


def remove_unused(path: Path, *, sure: bool = False) -> bool:
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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file (mode 0600) in the folder of `path`, which is created if
    need be.

    Leaving the block syncs it and renames it to `path`; leaving by any exception, an interrupt too, removes
    it and leaves `path` as it was. A link stays, and what it names is replaced. Raise OSError, also where something
    else than a file is there: a device would be gone.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    make_private(path.parent)
    sweep(path)
    with _temporary(path) as temporary:
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    sync_folder(path.parent)


def sweep(path: Path) -> None:
    """Remove temporary files for `path` that killed processes left. Those that are being written stay."""
    prefix = f".{path.name}."
    with contextlib.suppress(OSError):
        for found in [found for found in path.parent.iterdir() if found.name.startswith(prefix)]:
            if found.suffix == ".tmp" and not found.is_symlink():
                with contextlib.suppress(OSError):  # gone meanwhile
                    remove_unused(found, sure=True)


def sync_folder(folder: Path) -> None:
    """Make a rename itself durable. Not every system can; the file is whole without it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A new file, locked until the block is left."""
    import tempfile  # 5 ms: most commands write nothing

    while True:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            lock_exclusive(handle)
            if os.path.exists(name):  # else another process swept it before it was locked
                yield Path(name)
                return
        finally:
            os.close(handle)


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

    make_private(path.parent)
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


def raise_file_limit() -> None:
    """Let it have as many as the system allows: connections, skills that are in use, locks."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS takes less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

"""Creates private folders, replaces, locks and hashes files, and caches entries in JSON files by key.

* Folders are created for this user only, and checked when a process first opens them, as ssh does.
* A file is written to a temporary file in the same folder, synced, and renamed.
* A shared lock on an open file keeps other processes from removing it; an exclusive lock on a lock file, which is not
  removed, admits one process at a time. The system releases both when the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from notes_cli.engine.header import stamp
from notes_cli.errors import Help, ModelError, NotesError, Progress, Remedy, reason

if TYPE_CHECKING:
    import filelock


OTHERS = stat.S_IRWXG | stat.S_IRWXO
WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700, whatever the umask is. Raises OSError."""
    try:
        folder.mkdir(0o700, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private(folder.parent)
        folder.mkdir(0o700, exist_ok=True)  # where nothing can be created, as in /proc, it raises this again


_checked: set[Path] = set()  # folders that this process has opened


def check_private(folder: Path) -> None:
    """Raise NotesError if others can write to the folder or its parent, or own one of them or a file in it. A
    permission to read is removed. A missing folder passes; one that passed is not looked at again by this process."""
    if folder in _checked or not hasattr(os, "geteuid"):
        return
    writable = []
    for place in (folder.parent, folder):
        try:
            status = place.stat()
        except OSError:
            continue
        if not _owned(status):
            raise _foreign(place, status, "Name a folder of your own: NOTES_HOME=FOLDER")
        if status.st_mode & WRITE and not (place != folder and status.st_mode & stat.S_ISVTX):  # sticky, as /tmp
            writable.append(place)
        elif place == folder and status.st_mode & OTHERS and status.st_uid == os.geteuid():
            with suppress(OSError):  # a read-only file system
                place.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS)
    if writable:
        raise NotesError(
            f"others can write in {' and '.join(map(str, writable))}, so what is there may not be yours",
            Help.CLOSE_FOLDERS(folders=writable),
        )
    with suppress(OSError):  # it is missing, or cannot be read
        for entry in os.scandir(folder):
            with suppress(OSError):  # removed meanwhile, or a dangling link
                if not _owned(status := os.stat(entry)):
                    raise _foreign(Path(entry), status, Help.REMOVE_FILE(path=entry.path))
        _checked.add(folder)


def _owned(status: os.stat_result) -> bool:
    """True for a file of this user, or of root, who may do anything anyway."""
    return status.st_uid in (0, os.geteuid())


def _foreign(path: Path, status: os.stat_result, remedy: Remedy | str) -> NotesError:
    return NotesError(f"{path} belongs to {_user(status.st_uid)}, not to you, and may be forged", remedy)


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

LOCKS = fcntl is not None  # this system has file locks


def lock_shared(file: BinaryIO) -> None:
    """Keep an open file from `remove_unused` until it is closed; other processes may do so too."""
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextmanager
def _locked_alone(path: Path) -> Iterator[bool | None]:
    """Lock a file if no other process has it locked; yield whether that was so, None where the system or the file
    system has no locks. Raises OSError."""
    if fcntl is None:
        yield None
        return
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        alone: bool | None = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            alone = False if isinstance(error, BlockingIOError) else None
        yield alone
    finally:
        os.close(handle)


def is_unused(path: Path) -> bool:
    """Return True if no process has the file locked; False if that is unknown. Raises OSError."""
    with _locked_alone(path) as alone:
        return alone is True


def remove_unused(path: Path, *, sure: bool = False) -> bool:
    """Remove a file that no process has locked; return True if it is gone. `sure`: only if that is known; else readers
    keep the file that they have open. Raises OSError."""
    with suppress(FileNotFoundError), _locked_alone(path) as alone:
        if alone is False or (sure and alone is None):
            return False
        path.unlink(missing_ok=True)
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file (mode 0600) in the folder of `path`, which is created if missing.

    At the end of the block it is synced and renamed to `path`; on any exception, also an interrupt, it is removed and
    `path` is unchanged. A link is kept, and its target replaced. Raises OSError, also if `path` is not a regular file:
    replacing would remove a device.
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
            with suppress(OSError):
                temporary.unlink()
            raise
    sync_folder(path.parent)


def sweep(path: Path) -> None:
    """Remove temporary files for `path` that killed processes left, not those that are being written."""
    prefix = f".{path.name}."
    with suppress(OSError):
        for file in [file for file in path.parent.iterdir() if file.name.startswith(prefix)]:
            if file.suffix == ".tmp" and not file.is_symlink():
                with suppress(OSError):  # gone meanwhile
                    remove_unused(file, sure=True)


def sync_folder(folder: Path) -> None:
    """Make a rename durable, where the system can; the file is complete either way."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a new file, locked until the end of the block."""
    import tempfile  # 5 ms that most commands do not need

    while True:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            if fcntl is not None:
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_EX)
            if os.path.exists(name):  # else another process swept it before it was locked
                yield Path(name)
                return
        finally:
            os.close(handle)


NOTICE = 1.0  # seconds of waiting before a notice


class HeldError(Exception):
    """Another process holds the lock; the message names it, if it is known."""


@contextmanager
def locked(path: Path, wait: float = -1, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the exclusive lock of a lock file, which is created if missing, as is its folder.

    `wait`: seconds to wait for another process, negative: for ever. `on_wait` gets the holder's name once, after
    NOTICE. Raises HeldError if the wait was in vain; OSError if the file cannot be written.
    """
    import filelock  # 12 ms that commands which only read do not need

    make_private(path.parent)
    lock = filelock.FileLock(path, thread_local=False)  # another thread may release it
    try:
        _acquire(lock, path, wait, on_wait)
    except filelock.Timeout:
        raise HeldError(_holder(path)) from None
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: filelock.BaseFileLock, path: Path, wait: float, on_wait: Callable[[str], None] | None) -> None:
    from filelock import Timeout

    if on_wait is None or 0 <= wait <= NOTICE:
        lock.acquire(timeout=wait)
        return
    try:
        lock.acquire(timeout=NOTICE)
    except Timeout:
        on_wait(_holder(path))
        lock.acquire(timeout=wait - NOTICE if wait > 0 else wait)


def _holder(path: Path) -> str:
    with suppress(OSError, ValueError, IndexError):  # Linux has /proc/locks
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            parts = line.split()
            if parts[1] == "FLOCK" and parts[5].rpartition(":")[2] == inode and int(parts[4]) > 0:
                state = Path(f"/proc/{parts[4]}/stat").read_text().rpartition(")")[2].split()[0]
                stopped = f" (stopped, goes on with: kill -CONT {parts[4]})" if state == "T" else ""
                return f"process {parts[4]}{stopped}"
    return "another process"


def raise_file_limit() -> None:
    """Raise the limit of open files (connections, open skills, locks) to the system's maximum."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS may refuse its own maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


T = TypeVar("T")
_DAMAGED = (AttributeError, LookupError, TypeError, ValueError, RecursionError)


def remembered(path: Path, read: Callable[[Any], T]) -> dict[str, T]:
    """Return the valid entries of a JSON file that caches entries by key, the latest last; none if it is damaged.
    `read` converts JSON to an entry, or raises a Python error for another shape. Raises NotesError if another user may
    have written the file."""
    check_private(path.parent)
    entries = {}
    with contextlib.suppress(OSError, *_DAMAGED):
        for key, entry in json.loads(path.read_text(encoding="utf-8")).items():
            with contextlib.suppress(*_DAMAGED):
                entries[key] = read(entry)
    return entries


def remember(path: Path, read: Callable[[Any], T], new: Mapping[str, T]) -> None:
    """Add entries to such a file, if it can be written; the latest are kept. Raises NotesError as `remembered` does."""
    entries = {key: entry for key, entry in remembered(path, read).items() if key not in new} | {**new}
    data = dict([*entries.items()][-REMEMBERED:])
    with contextlib.suppress(OSError), replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")


CHUNK = 4 << 20
REMEMBERED = 256  # entries
MIN_AGE = 2.0  # seconds: a file may change again within one tick of a coarse clock and keep its size and time


def file_sha256(path: Path, file: BinaryIO, memory: Path, progress: Progress | None = None) -> str:
    """Return the SHA-256 of an open file as hex, from `memory` (a JSON file) if it is cached under its `path`.

    Reads `file`, whatever the path names by now. `progress` gets bytes done and in all. Raises ModelError if the file
    cannot be read.
    """
    try:
        path = path.resolve()
        before = list(stamp(file))
        entry = remembered(memory, _check_digest).get(str(path))
        if entry is not None and entry[:-1] == before:
            return str(entry[-1])
        digest = _hash_file(file, progress)
        after = list(stamp(file))
        old_enough = time.time() - os.fstat(file.fileno()).st_mtime > MIN_AGE
    except OSError as error:
        raise ModelError(f"cannot read {path}: {reason(error)}") from error
    if old_enough and after == before:
        entry = [*before, digest]
        remember(memory, _check_digest, {str(path): entry})
    return digest


def known_sha256(path: Path, memory: Path) -> str | None:
    """Return the cached digest of a file that has not changed since; its content is not read."""
    try:
        path = path.resolve()
        entry = remembered(memory, _check_digest).get(str(path))
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


def _check_digest(entry: list[int | str]) -> list[int | str]:
    kinds, digest = [type(part) for part in entry], str(entry[-1])
    if kinds != [int, int, int, int, int, str] or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(entry)
    return entry

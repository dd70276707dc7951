"""Writing a file all or nothing: a temporary file beside it, synced, then renamed over it.

A reader sees the old file or the new one, whatever happens in between. A temporary file is locked for as long as it is
written, so that one without a lock is known to be of a process that was killed. It knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from notes_cli.library import held, private


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
    private.make(path.parent)
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
                    held.remove(found, sure=True)


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
            held.hold_alone(handle)
            if os.path.exists(name):  # else another process swept it before it was locked
                yield Path(name)
                return
        finally:
            os.close(handle)

"""Writing a file all or nothing: a temporary file beside it, synced, then renamed over it.

A reader sees the old file or the new one, whatever happens in between. It knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file (mode 0600) in the folder of `path`, which is created if
    need be.

    Leaving the block syncs it and renames it to `path`; leaving by any exception, an interrupt too, removes
    it and leaves `path` as it was. Raise OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def leftovers(path: Path) -> list[Path]:
    """Temporary files for `path` that a killed process left behind. Only while no other process writes it."""
    prefix = f".{path.name}."
    return [found for found in path.parent.glob(".*.tmp") if found.name.startswith(prefix)]


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable. Not every system can; the file is whole without it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""Count every change that a process makes to files below a folder, and act at the k-th of them.

Installed in a process that has been forked for one command, and never taken back. What Python does to files is seen by
an audit hook (open, rename, mkdir, remove, link, truncate, chmod), by a file class that takes the place of the one
below `open`, and by os.fsync. What C code writes by itself (NumPy's tofile, a mapped file) is not seen as a write; the
events around it are.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = {f"os.{name}": 1 for name in ("mkdir", "remove", "rmdir", "truncate", "chmod")}
CHANGES |= {f"os.{name}": 2 for name in ("rename", "link", "symlink")}  # events of the audit hook: their paths
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FILLS = ("open", "truncated", "write", "os.mkdir", "os.link", "os.rename", "fsync")  # what a full disk refuses


class Events:
    """Counts events below `home` and acts at number `at` (from 0 on).

    count: nothing is done. kill: SIGKILL before it. torn: SIGKILL in the middle of a write. power: SIGKILL, and the
    journal lets `cut` take back what a power cut may take back. full: from this event on the disk is full. once: this
    one fails, and those after it do not.
    """

    def __init__(self, home: Path, journal: Path, mode: str, at: int) -> None:
        self.home, self.mode, self.at = str(home) + os.sep, mode, at
        self.number = 0
        self.journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self.kept = journal.parent / (journal.name + ".kept")
        self.busy = False

    def install(self) -> None:
        real_open, real_fsync = io.open, os.fsync
        events = self

        class Watched(io.FileIO):
            """A file whose writes are events."""

            def write(self, data: Any) -> int:
                events.event("write", str(self.name), torn=lambda: io.FileIO.write(self, bytes(data)[: len(data) // 2]))
                return io.FileIO.write(self, data)

            def truncate(self, size: int | None = None) -> int:
                events.event("os.truncate", str(self.name))
                return io.FileIO.truncate(self, size)

        def watched_open(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
            path = os.fspath(file) if isinstance(file, (str, Path)) else ""
            if not set(mode) & set("wxa+") or not events.mine(path):
                return real_open(file, mode, buffering, *rest, **more)
            raw = Watched(path, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            if "b" in mode:
                return buffered
            named = dict(zip(("encoding", "errors", "newline"), rest, strict=False)) | more
            named["encoding"] = named.get("encoding") or "utf-8"
            return io.TextIOWrapper(buffered, **named)

        def fsync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            events.event("fsync", os.readlink(f"/proc/self/fd/{number}"), after=True)
            real_fsync(handle)
            events.note("synced", os.readlink(f"/proc/self/fd/{number}"))

        io.open = builtins.open = watched_open  # type: ignore[assignment]
        os.fsync = fsync  # type: ignore[assignment]
        sys.addaudithook(self._audit)

    def mine(self, path: str) -> bool:
        return os.path.abspath(path).startswith(self.home)

    def _audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.busy:
            return
        if name == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES and isinstance(path, str | bytes):
                self.event("truncated" if flags & os.O_TRUNC else "open", os.fsdecode(path))
        elif name in CHANGES:
            given = [path for path in arguments[: CHANGES[name]] if isinstance(path, str | bytes | os.PathLike)]
            if paths := list(map(os.fsdecode, given)):
                self.event(name, *paths)

    def event(self, name: str, *paths: str, torn: Callable[[], object] | None = None, after: bool = False) -> None:
        if self.busy or not self.mine(paths[-1]):
            return
        self.busy = True
        try:
            number, self.number = self.number, self.number + 1
            here = number == self.at
            if here and self.mode == "torn" and torn is not None:
                torn()
            if here and self.mode in ("kill", "torn", "power"):
                os.kill(os.getpid(), signal.SIGKILL)
            if name in FILLS and ((self.mode == "full" and number >= self.at) or (self.mode == "once" and here)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), paths[-1])
            self.note(name, *map(os.path.abspath, paths))
        finally:
            self.busy = False

    def note(self, name: str, *paths: str) -> None:
        """Write the event into the journal, and keep the target of a rename."""
        was = self.busy
        self.busy = True
        try:
            entry: list[Any] = [name, *paths]
            if name in ("open", "synced") and os.path.isfile(paths[0]):
                entry.append(os.stat(paths[0]).st_size)
            if self.mode == "power" and name == "os.rename" and os.path.isfile(paths[1]):
                os.makedirs(self.kept, exist_ok=True)
                entry.append(str(self.kept / str(self.number)))
                os.link(paths[1], entry[-1])
            os.write(self.journal, json.dumps(entry).encode() + b"\n")
        finally:
            self.busy = was


def read(journal: Path) -> list[list[Any]]:
    """Read the journal: an event per line."""
    return [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("]")]


def cut(journal: Path) -> None:
    """Simulate a power cut: renames that were not synced with their folder are undone, bytes that were not synced are
    lost. A new file without its folder's fsync is kept, as common file systems do."""
    unsynced: dict[str, int] = {}  # bytes of a file that are surely on the disk
    renames: list[tuple[str, str, str]] = []
    for name, *paths in read(journal):
        if name in ("open", "truncated", "write", "os.truncate"):
            unsynced.setdefault(paths[0], paths[1] if len(paths) > 1 else 0)
        elif name == "synced":
            if len(paths) > 1:
                unsynced.pop(paths[0], None)
            else:
                renames = [entry for entry in renames if os.path.dirname(entry[1]) != paths[0]]
        elif name == "os.rename":
            if paths[0] in unsynced:
                unsynced[paths[1]] = unsynced.pop(paths[0])
            renames.append((paths[0], paths[1], paths[2] if len(paths) > 2 else ""))
    for path, sure in unsynced.items():
        if os.path.isfile(path) and os.path.getsize(path) > sure:
            os.truncate(path, (sure + os.path.getsize(path)) // 2)
    for old, new, kept in reversed(renames):
        if os.path.exists(new):
            os.rename(new, old)
            if kept:
                os.link(kept, new)

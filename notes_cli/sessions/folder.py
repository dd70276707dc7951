"""Stores sessions on disk: a folder each, with the ledger and K/V files, under a lock (docs/format.md)."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from itertools import count
from pathlib import Path

from notes_cli.errors import HeldSessionError, Help, SessionError, reason
from notes_cli.library.safe_files import HeldError, check_private, locked, make_private, replacing
from notes_cli.sessions import HEAD, LEDGER, session_names
from notes_cli.sessions.state import (
    FORMAT,
    ROWS,
    CutError,
    FormatError,
    Head,
    Header,
    Ledger,
    LedgerError,
    Line,
    State,
    first_line,
    read_ledger,
    serialize,
    with_time,
)
from notes_cli.text import names

_NAMES = f"{re.escape(LEDGER)}|{re.escape(HEAD)}|{ROWS.pattern}"
OWN = re.compile(rf"{_NAMES}|\.({_NAMES})\..+\.tmp")
READS = 3  # attempts at a ledger and head that disagree: another process may have written between the two


class SessionFolder:
    """One session's folder. Writing needs its lock (Sessions.locked)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.header: Header | None = None  # None before the first turn
        self.lines: list[Line] = []
        self.state = State()
        self.end = 0  # bytes of the ledger in complete lines
        self.torn = 0  # bytes after them, from an interrupted write
        self.head = Head(0, "")
        self.closed = False  # the lock was released
        self._process = os.getpid()  # a forked process does not hold the lock
        self._read()

    @property
    def ledger(self) -> Path:
        return self.folder / LEDGER

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in _session_files(self.folder))

    @property
    def created(self) -> str:
        return str(self.lines[0]["time"])

    @property
    def changed(self) -> str:
        return str(self.lines[-1]["time"])

    @property
    def next_rows(self) -> Path:
        """Path for the K/V of the next line: named by its number, or the next unused. A file left there by a crash is
        overwritten."""
        taken = {str(line.get("rows")) for line in self.lines}
        names = (f"{number:04d}.gguf" for number in count(max(1, len(self.lines))))
        return self.folder / next(name for name in names if name not in taken)

    def check_held(self) -> None:
        """Raise SessionError if the lock was released, or another process holds it."""
        if self.closed:
            raise SessionError(f"session {self.name} is closed", "Open it again")
        if self._process != os.getpid():
            raise SessionError(f"session {self.name} is held by the process that has opened it", "Fork it there")

    def commit(self, line: Line, header: Header | None = None) -> None:
        """Append a line, which commits its operation. `header` begins the session."""
        with self._writing():
            if header is not None:
                with replacing(self.ledger) as temporary:
                    temporary.write_bytes(serialize([with_time(first_line(header)), with_time(line)]))
            else:
                self._append(serialize([with_time(line)], self.head.checksum))

    def rewrite(self, line: Line) -> None:
        """Replace all lines after the first by this one, atomically."""
        first = {**self.lines[0], "replaces": self.head.checksum}
        with self._writing(), replacing(self.ledger) as temporary:
            temporary.write_bytes(serialize([first, with_time(line)]))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Read the ledger again after the block, and write the head; if the head fails, the next write does it. Raises
        SessionError if the session is not held, and for an OSError of the block."""
        self.check_held()
        try:
            yield
        except OSError as error:
            raise SessionError(f"cannot write {self.ledger}: {reason(error)}. Nothing was changed") from error
        self._read()
        with suppress(OSError):
            self.write_head()
        self.sweep()

    def write_head(self) -> None:
        """Write the head file. Raises OSError."""
        with replacing(self.folder / HEAD) as temporary:
            temporary.write_text(str(self.head), encoding="ascii")

    def _append(self, data: bytes) -> None:
        """Append and sync, or truncate again on failure."""
        with self.ledger.open("r+b", buffering=0) as file:
            file.truncate(self.end)  # drops an incomplete line from a crash
            file.seek(self.end)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(self.end)
                raise

    def trim(self) -> None:
        """Remove an incomplete line at the end of the ledger."""
        self.check_held()
        try:
            os.truncate(self.ledger, self.end)
        except OSError as error:
            raise SessionError(f"cannot write {self.ledger}: {reason(error)}") from error

    def undo(self) -> Line:
        """Undo the last line in effect and return it. Raises SessionError if there is none."""
        if not self.state.live:
            raise SessionError(f"there is nothing to undo in session {self.name}")
        if [line["op"] for line in self.state.live] == ["forget"]:  # the lines before it were dropped
            raise SessionError(
                f"there is nothing to undo in session {self.name}: what was forgotten by suffix is gone, and so is all "
                "that preceded it"
            )
        undone = self.state.live[-1]
        self.commit({"op": "undo"})
        return undone

    def kept(self) -> list[str]:
        """Return the names of the K/V files still needed (Ledger.kept)."""
        return Ledger(self.header, self.lines, self.state, self.end, self.head).kept if self.header else []

    def unneeded(self) -> list[Path]:
        """Return session files that no line needs: K/V that was undone, leftovers of killed processes."""
        needed = {LEDGER, HEAD, *self.kept()}
        return [path for path in _session_files(self.folder) if path.name not in needed]

    def sweep(self) -> None:
        """Remove unneeded files. Failures are ignored: the line is committed, and a later sweep tries again."""
        with suppress(OSError):
            for path in self.unneeded():
                path.unlink(missing_ok=True)

    def _read(self) -> None:
        check_private(self.folder)
        for attempts in reversed(range(READS)):
            try:
                data, head = self._read_bytes()
                if data is None:
                    return
                self.header, self.lines, self.state, self.end, self.head = read_ledger(data, head)
                self.torn = len(data) - self.end
                return
            except FormatError as error:
                version = int(str(error))
                raise SessionError(
                    f"{self.ledger} has format {version}, this version of notes reads {FORMAT}",
                    "Update notes" if version > FORMAT else Help.REMOVE_WHOLE_SESSION(name=self.name),
                ) from error
            except CutError as error:
                if not attempts:
                    remedy = Help.PUT_BACK_OR_GO_ON(path=self.folder / HEAD)
                    raise SessionError(f"the ledger of session {self.name} is damaged: {error}", remedy) from error
            except LedgerError as error:
                remedy = Help.PUT_BACK_OR_REMOVE(name=self.name)
                raise SessionError(f"the ledger of session {self.name} is damaged: {error}", remedy) from error

    def _read_bytes(self) -> tuple[bytes | None, Head | None]:
        """Return the bytes of the ledger (None: no session yet) and the head (None: no such file). The head is read
        first, so that a concurrent write is not taken for damage. Raises SessionError if one is missing, damaged or
        unreadable."""
        path, head = self.folder / HEAD, None
        try:
            with suppress(FileNotFoundError):
                head = Head.read(path.read_text(encoding="ascii", errors="replace"))
                if head is None:
                    message = f"{path} is damaged: it must be a number of lines and a checksum"
                    raise SessionError(message, Help.REMOVE_FILE(path=path))
            path = self.ledger
            return path.read_bytes(), head
        except FileNotFoundError:
            if head is None:
                return None, None
            message = f"the ledger of session {self.name} is missing: {self.ledger}"
            raise SessionError(message, Help.PUT_BACK_OR_REMOVE(name=self.name)) from None
        except OSError as error:
            raise SessionError(f"cannot read {path}: {reason(error)}") from error


class Sessions:
    """The sessions of one user, in a folder created with the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Return all names. Raises NotesError if another user may have created the folder (safe_files.py)."""
        return session_names(self.folder)

    def find(self, name: str) -> SessionFolder:
        """Open a session to read. Raises SessionError, with similar names, if there is none."""
        name, known = names.typed(name), self.names()
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f". Did you mean {' or '.join(near)}?" if near else ""
            raise SessionError(f"there is no session {name!r}{hint}", Help.LIST_SESSIONS())
        return SessionFolder(self.folder / name)

    @contextmanager
    def locked(self, name: str, *, new: bool = False, reading: bool = False) -> Iterator[SessionFolder]:
        """Lock a session for this process. `new`: it need not exist; it is removed again if the first turn is not
        written. `reading`: nothing is written, so a read-only folder will do. Raises SessionError if there is no such
        session, or it is locked."""
        name = names.typed(name)
        if not new:
            self.find(name)  # before anything is written
        with self._lock(name, reading), _remove_if_unused(self.folder / name):
            stored = SessionFolder(self.folder / name) if new else self.find(name)
            try:
                yield stored
            finally:
                stored.closed = True

    @contextmanager
    def _lock(self, name: str, reading: bool = False) -> Iterator[None]:
        if not names.is_name(name):
            such_as = f", such as {names.name_of(name)}" if names.name_of(name) else ""
            raise SessionError(f"{name!r} is not a valid session name: use {names.RULE}{such_as}")
        known = self.names()
        objection = None if name in known else names.objection(name, known)
        if objection:
            raise SessionError(objection, "Choose another name")
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.folder / ".locks" / f"{name}.lock", wait=0))
            except HeldError:
                message = f"session {name} is open already, here or in another process"
                raise HeldSessionError(message, "Wait for it, or close it") from None
            except OSError as error:
                if not (reading and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)):
                    raise SessionError(f"cannot write to {self.folder}: {reason(error)}") from error
            yield

    def fork(self, name: str, new: str) -> Path:
        """Copy a session under a new name. Raises SessionError if that exists."""
        with self.locked(name) as stored, self.forked(stored, new) as fork:
            return fork.folder

    @contextmanager
    def forked(self, stored: SessionFolder, new: str) -> Iterator[SessionFolder]:
        """Fork a locked session, and lock the new one. K/V files are immutable, so hard links share them. Raises
        SessionError, without changing anything, if that name exists or cannot be written."""
        if not stored.header:
            raise SessionError(f"there is nothing to fork in session {stored.name}: it has no turn")
        new = names.typed(new)
        taken = SessionError(f"there is a session {new} already", "Choose another name")
        if new in self.names():  # also if that is locked
            raise taken
        with self.locked(new, new=True) as fork:
            if fork.header:
                raise taken
            try:
                make_private(fork.folder)
                for rows in stored.kept():
                    if (stored.folder / rows).exists():  # a prefix-only model's may be deleted after undos
                        _link(stored.folder / rows, fork.folder / rows)
                with replacing(fork.ledger) as temporary:  # last: a session exists once it has a ledger
                    temporary.write_bytes(stored.ledger.read_bytes()[: stored.end])
                fork._read()
                fork.write_head()
            except OSError as error:
                with suppress(OSError):
                    clear(fork.folder)
                raise SessionError(f"cannot write {fork.folder}: {reason(error)}. Nothing was changed") from error
            yield fork

    def known(self, *requested: str) -> list[str]:
        """Return these names normalized and without duplicates. Raises SessionError if one does not exist."""
        unique, existing = list(dict.fromkeys(map(names.typed, requested))), set(self.names())
        for name in unique:
            if name not in existing:
                self.find(name)
        return unique

    def remove(self, *requested: str) -> list[Path]:
        """Delete sessions, damaged ones too, and return their folders. Raises SessionError, before any is deleted, if
        one does not exist or is locked."""
        known = self.known(*requested)
        removed: list[Path] = []
        with ExitStack() as locks:
            for name in known:
                locks.enter_context(self._lock(name))
            for name in self.known(*known):  # another process may have removed one before it was locked
                folder = self.folder / name
                try:
                    clear(folder)
                except OSError as error:
                    gone = f". Removed before it: {', '.join(path.name for path in removed)}" if removed else ""
                    raise SessionError(f"cannot remove {folder}: {reason(error)}{gone}") from error
                removed.append(folder)
        return removed


def clear(folder: Path) -> None:
    """Remove the files of a session, head and ledger first, then the folder if it is empty. Raises OSError."""
    (folder / HEAD).unlink(missing_ok=True)
    (folder / LEDGER).unlink(missing_ok=True)
    for path in _session_files(folder):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _remove_if_unused(folder: Path) -> Iterator[None]:
    """Remove a folder that was created in the meantime and has no ledger. An older one stays: it may be a session whose
    ledger was lost."""
    existed = folder.exists()
    try:
        yield
    finally:
        with suppress(OSError):
            if not existed and LEDGER not in [path.name for path in folder.iterdir()]:
                clear(folder)


def _session_files(folder: Path) -> list[Path]:
    """Return files with names that sessions write: ledger, head, K/V, and temporary files of these."""
    return [path for path in folder.iterdir() if OWN.fullmatch(path.name) and not path.is_dir()]


def _link(old: Path, new: Path) -> None:
    new.unlink(missing_ok=True)  # from a fork that was killed
    try:
        new.hardlink_to(old)
    except OSError:  # file systems without hard links
        shutil.copy2(old, new)

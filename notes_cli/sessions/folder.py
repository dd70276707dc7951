"""Sessions on disk, a folder each: the ledger, and files of rows beside it. Described in docs/format.md."""

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
from notes_cli.library.safe_files import HeldError, check_private, check_private_file, locked, make_private, replacing
from notes_cli.sessions.ledger import (
    FORMAT,
    CutError,
    FormatError,
    Head,
    Header,
    Ledger,
    LedgerError,
    dated,
    opening,
    read_ledger,
    sealed,
)
from notes_cli.sessions.lines import ROWS, Line
from notes_cli.sessions.listing import HEAD, LEDGER, session_names
from notes_cli.sessions.state import State
from notes_cli.text import names

_NAMES = f"{re.escape(LEDGER)}|{re.escape(HEAD)}|{ROWS.pattern}"
OWN = re.compile(rf"{_NAMES}|\.({_NAMES})\..+\.tmp")
READS = 3  # of a ledger and its head that do not agree: another process may have written between the two


class SessionFolder:
    """One session's folder. Whoever writes holds its lock (Sessions.locked)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.header: Header | None = None  # none: it has not been begun
        self.lines: list[Line] = []
        self.state = State()
        self.end = 0  # bytes of the ledger that are whole lines
        self.torn = 0  # bytes after them, of a write that was interrupted
        self.head = Head(0, "")
        self.closed = False  # its lock was given back
        self._process = os.getpid()  # that may hold it: one that is forked has no lock
        self._read()

    @property
    def ledger(self) -> Path:
        return self.folder / LEDGER

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in _own(self.folder))

    @property
    def created(self) -> str:
        return str(self.lines[0]["time"])

    @property
    def changed(self) -> str:
        return str(self.lines[-1]["time"])

    @property
    def next_rows(self) -> Path:
        """Where the rows of the next line belong: its number, or the next that no line has. A file that a crash left
        there is written over."""
        taken = {str(line.get("rows")) for line in self.lines}
        names = (f"{number:04d}.gguf" for number in count(max(1, len(self.lines))))
        return self.folder / next(name for name in names if name not in taken)

    def check_held(self) -> None:
        """Raise SessionError once its lock was given back, and in another process: somebody else may go on with it."""
        if self.closed:
            raise SessionError(f"session {self.name} is closed", "Open it again")
        if self._process != os.getpid():
            raise SessionError(f"session {self.name} is held by the process that has opened it", "Fork it there")

    def commit(self, line: Line, header: Header | None = None) -> None:
        """Append a line: with it, and not before, it has happened. `header` begins the session."""
        self.check_held()
        try:
            if header is not None:
                with replacing(self.ledger) as temporary:
                    temporary.write_bytes(sealed([dated(opening(header)), dated(line)]))
            else:
                self._append(sealed([dated(line)], self.head.checksum))
        except OSError as error:
            raise SessionError(f"cannot write {self.ledger}: {reason(error)}. Nothing was changed") from error
        self._wrote()

    def rewrite(self, line: Line) -> None:
        """Replace all lines after the first by this one, or nothing."""
        self.check_held()
        first = {**self.lines[0], "replaces": self.head.checksum}
        try:
            with replacing(self.ledger) as temporary:
                temporary.write_bytes(sealed([first, dated(line)]))
        except OSError as error:
            raise SessionError(f"cannot write {self.ledger}: {reason(error)}. Nothing was changed") from error
        self._wrote()

    def _wrote(self) -> None:
        """Read the ledger again after a write, and update the head; if that fails, the next write does it."""
        self._read()
        with suppress(OSError):
            self.write_head()
        self.sweep()

    def write_head(self) -> None:
        """Write down how far the ledger reaches. Raise OSError."""
        with replacing(self.folder / HEAD) as temporary:
            temporary.write_text(str(self.head), encoding="ascii")

    def _append(self, data: bytes) -> None:
        """All of it or nothing: what fails half-way, or cannot be synced, is cut off again."""
        with self.ledger.open("r+b", buffering=0) as file:
            file.truncate(self.end)  # a line that a crash tore
            file.seek(self.end)
            try:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(self.end)
                raise

    def trim(self) -> None:
        """Cut off what a write that was interrupted has left at the end of the ledger."""
        self.check_held()
        try:
            os.truncate(self.ledger, self.end)
        except OSError as error:
            raise SessionError(f"cannot write {self.ledger}: {reason(error)}") from error

    def undo(self) -> Line:
        """Take back the last line that holds and return it. Raise SessionError if there is none."""
        if not self.state.live:
            raise SessionError(f"there is nothing to undo in session {self.name}")
        if self.state.based and len(self.state.live) == 1:
            raise SessionError(
                f"there is nothing to undo in session {self.name}: what was forgotten by suffix is gone, and so is all "
                "that preceded it"
            )
        undone = self.state.live[-1]
        self.commit({"op": "undo"})
        return undone

    def kept(self) -> list[str]:
        """The files of rows that are still needed (Ledger.kept)."""
        return Ledger(self.header, self.lines, self.state, self.end, self.head).kept if self.header else []

    def unneeded(self) -> list[Path]:
        """The files of ours that no line needs: rows that were undone, files of a process that was killed."""
        wanted = {LEDGER, HEAD, *self.kept()}
        return [path for path in _own(self.folder) if path.name not in wanted]

    def sweep(self) -> None:
        """Remove what no line needs. What cannot be removed now will be another time: the line counts already."""
        with suppress(OSError):
            for path in self.unneeded():
                path.unlink(missing_ok=True)

    def _read(self) -> None:
        check_private(self.folder)
        for left in reversed(range(READS)):
            try:
                data, head = self._bytes()
                if data is None:
                    return
                self.header, self.lines, self.state, self.end, self.head = read_ledger(data, head)
                self.torn = len(data) - self.end
                return
            except FormatError as error:
                found = int(str(error))
                raise SessionError(
                    f"{self.ledger} has format {found}, this version of notes reads {FORMAT}",
                    "Update notes" if found > FORMAT else Help.REMOVE_WHOLE_SESSION(name=self.name),
                ) from error
            except CutError as error:
                if not left:
                    remedy = Help.PUT_BACK_OR_GO_ON(path=self.folder / HEAD)
                    raise SessionError(f"the ledger of session {self.name} is damaged: {error}", remedy) from error
            except LedgerError as error:
                remedy = Help.PUT_BACK_OR_REMOVE(name=self.name)
                raise SessionError(f"the ledger of session {self.name} is damaged: {error}", remedy) from error

    def _bytes(self) -> tuple[bytes | None, Head | None]:
        """The bytes of the ledger (None: no session yet) and the head (None: no such file). The head is
        read first, so that what another process writes meanwhile is not taken for damage.

        Raise SessionError for what cannot be read, and where one of the two is lost or no such file.
        """
        path, head = self.folder / HEAD, None
        try:
            for own in _own(self.folder):
                check_private_file(own)
            with suppress(FileNotFoundError):
                head = Head.read(path.read_text(encoding="ascii", errors="replace"))
                if head is None:
                    what = f"{path} is damaged: it must be a number of lines and a checksum"
                    raise SessionError(what, Help.REMOVE_FILE(path=path))
            path = self.ledger
            return path.read_bytes(), head
        except FileNotFoundError:
            if head is None:
                return None, None
            what = f"the ledger of session {self.name} is missing: {self.ledger}"
            raise SessionError(what, Help.PUT_BACK_OR_REMOVE(name=self.name)) from None
        except OSError as error:
            raise SessionError(f"cannot read {path}: {reason(error)}") from error


class Sessions:
    """The sessions of one user. The folder appears with the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Raise NotesError if the folder may be of somebody else's making (safe_files.py)."""
        return session_names(self.folder)

    def find(self, name: str) -> SessionFolder:
        """Raise SessionError, naming what is near, if there is no such session."""
        name, known = names.typed(name), self.names()
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f". Did you mean {' or '.join(near)}?" if near else ""
            raise SessionError(f"there is no session {name!r}{hint}", Help.LIST_SESSIONS())
        return SessionFolder(self.folder / name)

    @contextmanager
    def locked(self, name: str, *, new: bool = False, reading: bool = False) -> Iterator[SessionFolder]:
        """Hold a session for this process; `new`: it may not have been begun yet, and of one that is not begun now
        either, as its first turn could not be written, nothing is left. `reading`: nothing will be written, so that a
        folder that is read-only will do.

        Raise SessionError if there is none of that name, or it is held already.
        """
        name = names.typed(name)
        if not new:
            self.find(name)  # before anything is written
        with self._lock(name, reading), _leaving_nothing(self.folder / name):
            stored = SessionFolder(self.folder / name) if new else self.find(name)
            try:
                yield stored
            finally:
                stored.closed = True

    @contextmanager
    def _lock(self, name: str, reading: bool = False) -> Iterator[None]:
        if not names.is_name(name):
            raise SessionError(f"{name!r} is not a valid session name: use {names.RULE}{_such_as(name)}")
        known = self.names()
        objection = None if name in known else names.objection(name, known)
        if objection:
            raise SessionError(objection, "Choose another name")
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.folder / ".locks" / f"{name}.lock", wait=0))
            except HeldError:
                what = f"session {name} is open already, here or in another process"
                raise HeldSessionError(what, "Wait for it, or close it") from None
            except OSError as error:
                if not (reading and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)):
                    raise SessionError(f"cannot write to {self.folder}: {reason(error)}") from error
            yield

    def fork(self, name: str, new: str) -> Path:
        """A second session that goes on from here. Raise SessionError if there is one of that name."""
        with self.locked(name) as stored, self.forked(stored, new) as fork:
            return fork.folder

    @contextmanager
    def forked(self, stored: SessionFolder, new: str) -> Iterator[SessionFolder]:
        """Fork a session that is held, and hold the new one. Files of rows are shared: nobody changes them.

        Raise SessionError if there is one of that name, or it cannot be written; then nothing is changed.
        """
        if not stored.header:
            raise SessionError(f"there is nothing to fork in session {stored.name}: it has no turn")
        new = names.typed(new)
        taken = SessionError(f"there is a session {new} already", "Choose another name")
        if new in self.names():  # also one that is held
            raise taken
        with self.locked(new, new=True) as fork:
            if fork.header:
                raise taken
            try:
                make_private(fork.folder)
                for rows in stored.kept():
                    if (stored.folder / rows).exists():  # not pinned ones from before an undo
                        _link(stored.folder / rows, fork.folder / rows)
                with replacing(fork.ledger) as temporary:  # last: with it, there is a session
                    temporary.write_bytes(stored.ledger.read_bytes()[: stored.end])
                fork._read()
                fork.write_head()
            except OSError as error:
                with suppress(OSError):
                    clear(fork.folder)
                raise SessionError(f"cannot write {fork.folder}: {reason(error)}. Nothing was changed") from error
            yield fork

    def known(self, *wanted: str) -> list[str]:
        """These names as they are typed here, each once. Raise SessionError if there is no session of one of them."""
        found, there = list(dict.fromkeys(map(names.typed, wanted))), set(self.names())
        for name in found:
            if name not in there:
                self.find(name)
        return found

    def remove(self, *wanted: str) -> list[Path]:
        """Delete sessions, sound or not; return their folders. Raise SessionError, before any is deleted, if there is
        none of one of the names or one is held."""
        found = self.known(*wanted)
        removed: list[Path] = []
        with ExitStack() as held:
            for name in found:
                held.enter_context(self._lock(name))
            for name in self.known(*found):  # another process may have been quicker
                folder = self.folder / name
                try:
                    clear(folder)
                except OSError as error:
                    gone = f". Removed before it: {', '.join(one.name for one in removed)}" if removed else ""
                    raise SessionError(f"cannot remove {folder}: {reason(error)}{gone}") from error
                removed.append(folder)
        return removed


def clear(folder: Path) -> None:
    """Remove the files of a session, head and ledger first: without them, there is no session. Then the folder, unless
    it holds something else. Raise OSError."""
    (folder / HEAD).unlink(missing_ok=True)
    (folder / LEDGER).unlink(missing_ok=True)
    for path in _own(folder):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _leaving_nothing(folder: Path) -> Iterator[None]:
    """A folder that is new after this and has no ledger goes again. One that was there may be what is left of a session
    whose ledger was lost: it stays."""
    there = folder.exists()
    try:
        yield
    finally:
        with suppress(OSError):
            if not there and LEDGER not in [path.name for path in folder.iterdir()]:
                clear(folder)


def _own(folder: Path) -> list[Path]:
    """The files that sessions write, by their names: ledger, rows, and what a killed process left of these."""
    return [path for path in folder.iterdir() if OWN.fullmatch(path.name) and not path.is_dir()]


def _such_as(word: str) -> str:
    name = names.name_of(word)
    return f", such as {name}" if name else ""


def _link(old: Path, new: Path) -> None:
    new.unlink(missing_ok=True)  # of a fork that was killed
    try:
        new.hardlink_to(old)
    except OSError:  # not every file system can
        shutil.copy2(old, new)

"""Stores sessions, each in a locked folder with K/V files and a snapshot for each operation; an undo removes the last.

A snapshot has the whole state, and is written to a temporary file and renamed after the K/V that it names: a crash
leaves the last complete one (docs/format.md).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path

from notes_cli.engine.segment import Segment
from notes_cli.errors import (
    DamagedError,
    HeldSessionError,
    Help,
    NotesError,
    Notice,
    Say,
    SegmentError,
    SessionError,
    reason,
)
from notes_cli.library.container import open_segment
from notes_cli.library.safe_files import (
    HeldError,
    check_private,
    locked,
    make_private,
    replacing,
    sync_folder,
)
from notes_cli.sessions import LEDGER, SNAPSHOT, session_names
from notes_cli.sessions.state import (
    FORMAT,
    ROWS,
    Header,
    Op,
    OtherFormatError,
    SkillText,
    Snapshot,
    SnapshotError,
    State,
    read_snapshot,
    serialize,
)
from notes_cli.text import names

_NAMES = f"{SNAPSHOT.pattern}|{ROWS.pattern}|{re.escape(LEDGER)}"
OWN = re.compile(rf"{_NAMES}|\.({_NAMES})\..+\.tmp")
READS = 3  # attempts at a snapshot that another process may take back meanwhile
TIME = "%Y-%m-%dT%H:%M:%SZ"  # UTC


class SessionFolder:
    """One session's folder. Writing needs its lock (Sessions.locked)."""

    def __init__(self, folder: Path) -> None:
        """Read the last snapshot; a damaged one is reported when its state is needed."""
        self.folder = folder
        self.name = folder.name
        self.closed = False  # the lock was released
        self._snapshot: Snapshot | None = None  # None before the first turn
        self._damage: SessionError | None = None
        self._process = os.getpid()  # a forked process does not hold the lock
        self.read()

    @property
    def snapshot(self) -> Snapshot | None:
        """The last snapshot. Raises SessionError if it is damaged."""
        if self._damage:
            raise self._damage
        return self._snapshot

    @property
    def header(self) -> Header | None:
        return self.snapshot.header if self.snapshot else None

    @property
    def state(self) -> State:
        return self.snapshot.state if self.snapshot else State()

    def add_fields(self, skills: tuple[SkillText, ...]) -> None:
        """Put these skills, which have more fields, into the state. The next operation writes them."""
        if snapshot := self.snapshot:
            self._snapshot = replace(snapshot, state=replace(snapshot.state, skills=skills))

    @property
    def files(self) -> Mapping[str, str]:
        """Checksums of the K/V files of the state, by name."""
        return self.snapshot.files if self.snapshot else {}

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in session_files(self.folder))

    @property
    def created(self) -> str:
        return self.snapshot.created if self.snapshot else ""

    @property
    def changed(self) -> str:
        return self.snapshot.time if self.snapshot else ""

    @property
    def numbers(self) -> list[int]:
        """The numbers of the snapshots."""
        with suppress(FileNotFoundError):
            return sorted(int(path.stem) for path in session_files(self.folder) if SNAPSHOT.fullmatch(path.name))
        return []

    def path(self, number: int) -> Path:
        return self.folder / f"{number:04d}.json"

    @property
    def next_rows(self) -> Path:
        """Path for the K/V of the next snapshot. A file left there by a crash is overwritten."""
        return self.folder / f"{max(self.numbers, default=0) + 1:04d}.gguf"

    def check_held(self) -> None:
        """Raise SessionError if the lock was released, or another process holds it."""
        if self.closed:
            raise SessionError(f"session {self.name} is closed", "Open it again")
        if self._process != os.getpid():
            raise SessionError(f"session {self.name} is held by the process that has opened it", "Fork it there")

    def commit(
        self, op: Op, what: str, state: State, files: Mapping[str, str], header: Header, *, for_good: bool = False
    ) -> None:
        """Write the next snapshot, which commits its operation. `for_good`: nothing before it is kept."""
        now, number = datetime.now(timezone.utc).strftime(TIME), max(self.numbers, default=0) + 1
        snapshot = Snapshot(FORMAT, header, op, what, self.created or now, now, state, files, for_good)
        if self.snapshot is None:
            begun = Snapshot(FORMAT, header, "begin", "", now, now, State(), first=True)
            self._write({0: begun, number: snapshot})
        else:
            self._write({number: snapshot})

    def _write(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Write snapshots, then remove the files that no snapshot needs; a later write retries a removal that fails."""
        self.check_held()
        try:
            for number, snapshot in snapshots.items():
                self._write_number(number, snapshot)
        except OSError as error:
            if self._snapshot is None:  # a session without a turn has not begun
                with suppress(OSError):
                    self.path(min(snapshots)).unlink(missing_ok=True)
            raise SessionError(f"cannot write {self.folder}: {reason(error)}. Nothing was changed") from error
        self._snapshot = snapshots[max(snapshots)]
        self.sweep()

    def _write_number(self, number: int, snapshot: Snapshot) -> None:
        with replacing(self.path(number)) as temporary:
            temporary.write_bytes(serialize(snapshot))

    def undo(self) -> dict[str, str]:
        """Undo the last operation, or remove a damaged snapshot; return the operation and its subject. Raises
        SessionError if there is none."""
        self.check_held()
        last, undone = self.numbers[-1:], self._snapshot
        if len(self.numbers) < 2 or (undone and undone.first):
            if self._damage:
                raise self._damage
            gone = ": what was forgotten by suffix is gone, and so is all that preceded it"
            message = f"there is nothing to undo in session {self.name}"
            raise SessionError(message + gone if undone and undone.op == "forget" else message)
        try:
            if undone and undone.op == "correct":  # global errata: they are not to come back
                before = self.read_number(self.numbers[-2])
                known = {**before.state.read_at, **undone.state.read_at}
                self._write_number(self.numbers[-2], replace(before, state=replace(before.state, read_at=known)))
            self.path(last[0]).unlink()
            sync_folder(self.folder)  # before its K/V is removed
        except OSError as error:
            raise SessionError(f"cannot write {self.folder}: {reason(error)}. Nothing was changed") from error
        self._damage = self._snapshot = None
        self.read()
        self.sweep()
        return {"op": undone.op if undone else "snapshot", "what": undone.what if undone else f"{last[0]:04d}.json"}

    def kept(self) -> list[str]:
        """Return the names of the K/V files still needed."""
        numbers = {f"{number:04d}.gguf" for number in self.in_force}
        return sorted(path.name for path in session_files(self.folder) if path.name in numbers)

    def open_rows(self, name: str, *snapshots: Snapshot) -> Segment:
        """Open a K/V file and read all of it. Raises SegmentError if it cannot be read, DamagedError unless it is the
        file that these snapshots name, with the rows of their tokens."""
        try:
            segment = open_segment(self.folder / name)
        except DamagedError as error:
            raise DamagedError(f"{name} is damaged") from error
        tokens = segment.tokens.tolist()
        for snapshot in snapshots:
            if name not in snapshot.files:
                continue
            header, at = snapshot.header, 0
            if segment.checksum != snapshot.files[name]:
                raise DamagedError(f"{name} is not the file that the session names")
            if segment.prefix_only or segment.identity.differences(header.identity):
                raise DamagedError(f"{name} is of another model")
            for rows in snapshot.state.rows:
                held, ours = tokens[rows.first : rows.first + rows.count], snapshot.state.tokens
                if rows.file == name and held != ours[at : at + rows.count]:
                    raise DamagedError(f"{name} has the rows of other tokens")
                if rows.file == name and segment.states and (rows.first or segment.context.tolist() != ours[:at]):
                    raise DamagedError(f"{name} has the recurrent states of another text")
                at += rows.count
        return segment

    def faults(self) -> Iterator[tuple[Path, NotesError]]:
        """Yield each file that is damaged, foreign or missing, of all that an undo would read, too."""
        snapshots = list[Snapshot]()
        for number in self.in_force:
            path = self.path(number)
            try:
                snapshots.append(read_snapshot(path.read_bytes()))
            except SnapshotError as error:
                yield path, DamagedError(f"{path.name} is damaged: {error}")
                return
            if snapshots[-1].first != (len(snapshots) == 1) or snapshots[-1].header != snapshots[0].header:
                yield path, DamagedError(f"{path.name} is of another session")
        present = [name for name in self.kept() if (self.folder / name).exists()]
        for name in present:
            try:
                self.open_rows(name, *snapshots)
            except SegmentError as error:
                yield self.folder / name, error
        named = {rows.file for snapshot in snapshots for rows in snapshot.state.rows}
        if missing := named.difference(present):
            yield self.folder / min(missing), DamagedError(f"the rows {min(missing)} are missing")

    @property
    def in_force(self) -> list[int]:
        """The snapshots that count: a last one that was written for good may have been left with those before it."""
        snapshot = self.snapshot
        return self.numbers[-1:] if snapshot and snapshot.first else self.numbers

    def unneeded(self) -> list[Path]:
        """Return session files that nothing needs: K/V that was undone, leftovers of killed processes."""
        needed = {*self.kept(), *(self.path(number).name for number in self.in_force)}
        return [path for path in session_files(self.folder) if path.name not in needed]

    def sweep(self) -> None:
        """Remove unneeded files. Failures are ignored: a later sweep tries again."""
        with suppress(OSError, SessionError):
            unneeded = self.unneeded()
            for path in unneeded:
                path.unlink(missing_ok=True)
            if unneeded:
                sync_folder(self.folder)

    def read(self) -> None:
        check_private(self.folder)
        for attempts in reversed(range(READS)):
            try:
                numbers = self.numbers
                if numbers:
                    self._damage, self._snapshot = None, self.read_number(numbers[-1])
                elif (self.folder / LEDGER).exists():
                    message = (
                        f"session {self.name} was kept by an earlier version of notes, which this one does not read"
                    )
                    self._damage = SessionError(message, Help.REMOVE_WHOLE_SESSION(name=self.name))
                return
            except FileNotFoundError:
                if not attempts:
                    raise SessionError(
                        f"session {self.name} is being changed by another process", "Try again"
                    ) from None
            except OtherFormatError as error:
                remedy = "Update notes" if error.version > FORMAT else Help.REMOVE_WHOLE_SESSION(name=self.name)
                self._damage = SessionError(f"session {self.name} cannot be read: {error}", remedy)
                return
            except SnapshotError as error:
                message = (
                    f"the last snapshot of session {self.name}, {self.path(numbers[-1]).name}, is damaged: {error}"
                )
                earlier = len(numbers) > 1
                way_back = Help.UNDO(name=self.name) if earlier else Help.PUT_BACK_OR_REMOVE(name=self.name)
                self._damage = SessionError(message, way_back)
                return

    def read_number(self, number: int) -> Snapshot:
        """Read a snapshot. Raises SnapshotError if it is damaged, SessionError if it cannot be read, FileNotFoundError
        if it is gone."""
        path = self.path(number)
        try:
            return read_snapshot(path.read_bytes())
        except FileNotFoundError:
            raise
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
        name, known = names.typed(name.lower()), self.names()
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f". Did you mean {' or '.join(near)}?" if near else ""
            raise SessionError(f"there is no session {name!r}{hint}", Help.LIST_SESSIONS())
        return SessionFolder(self.folder / name)

    @contextmanager
    def locked(
        self, name: str, *, new: bool = False, reading: bool = False, say: Say | None = None
    ) -> Iterator[SessionFolder]:
        """Lock a session for this process. `new`: it need not exist; it is removed again if the first turn is not
        written. `reading`: nothing is written, so a read-only folder will do. `say`: wait until it is free, with a
        notice of a long wait. Raises SessionError if there is no such session, or it is locked and `say` is None."""
        name = names.typed(name.lower())
        if not new:
            self.find(name)  # before anything is written
        with self._lock(name, reading, say), _remove_if_unused(self.folder / name):
            stored = SessionFolder(self.folder / name) if new else self.find(name)
            if stored.numbers and not reading:
                stored.sweep()  # a process that was killed may have left forgotten text
            try:
                yield stored
            finally:
                stored.closed = True

    @contextmanager
    def _lock(self, name: str, reading: bool = False, say: Say | None = None) -> Iterator[None]:
        if not names.is_name(name):
            such_as = f", such as {names.name_of(name)}" if names.name_of(name) else ""
            raise SessionError(f"{name!r} is not a valid session name: use {names.RULE}{such_as}")
        known = self.names()
        objection = None if name in known else names.objection(name, known)
        if objection:
            raise SessionError(objection, "Choose another name")

        def on_wait(holder: str) -> None:
            if say is not None:
                say(Notice(f"waiting for {holder}, which has session {name} open", Help.END_WAIT()))

        with ExitStack() as held:
            try:
                held.enter_context(locked(self.folder / ".locks" / f"{name}.lock", 0 if say is None else -1, on_wait))
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
            with self.built(fork) as folder:
                for rows in (*stored.kept(), *(stored.path(number).name for number in stored.in_force)):
                    _link(stored.folder / rows, folder / rows)
            yield fork

    @contextmanager
    def built(self, stored: SessionFolder) -> Iterator[Path]:
        """Yield an empty folder, which becomes that of a new session at the end of the block, as a whole. Raises
        SessionError, without changing anything, if it cannot be written."""
        folder = self.folder / f".{stored.name}.import"
        shutil.rmtree(folder, ignore_errors=True)  # from a fork or an import that was killed
        try:
            make_private(folder)
            yield folder
            if stored.folder.exists():  # without a snapshot
                clear(stored.folder)
            folder.rename(stored.folder)
            sync_folder(self.folder)
            stored.read()
        except OSError as error:
            raise SessionError(f"cannot write {stored.folder}: {reason(error)}. Nothing was changed") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

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
    """Remove the files of a session, the snapshots first, then the folder if it is empty. Raises OSError."""
    for path in sorted(session_files(folder), key=lambda path: (path.suffix != ".json", path.name)):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _remove_if_unused(folder: Path) -> Iterator[None]:
    """Remove a folder that was created in the meantime and has no snapshot. An older one stays: it may be a session
    whose snapshots were lost."""
    existed = folder.exists()
    try:
        yield
    finally:
        with suppress(OSError):
            if not existed and not any(SNAPSHOT.fullmatch(path.name) for path in folder.iterdir()):
                clear(folder)


def session_files(folder: Path) -> list[Path]:
    """Return files with names that sessions write: snapshots, K/V, and temporary files of these."""
    return [path for path in folder.iterdir() if OWN.fullmatch(path.name) and not path.is_dir()]


def _link(old: Path, new: Path) -> None:
    new.unlink(missing_ok=True)  # from a fork that was killed
    try:
        new.hardlink_to(old)
    except OSError:  # file systems without hard links
        shutil.copy2(old, new)

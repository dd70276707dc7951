"""Sessions: notebooks on disk, a folder each, described in docs/format.md.

`ledger.jsonl` says what happened, a line for each turn, edit, compaction and undo, and is only ever appended to; the
K/V rows that a line added stand in a file of their own, which is never changed. What the ledger comes to is its State.
It knows no model, and of rows only the names of their files. A ledger may be anybody's (archive.py): nothing in it is
believed before it is checked.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from notes_cli.engine.identity import Identity
from notes_cli.engine.segment import FieldSpan
from notes_cli.errors import SessionError, reason
from notes_cli.library import private
from notes_cli.library.atomic import replacing
from notes_cli.library.lock import HeldError, locked
from notes_cli.text import names
from notes_cli.text.references import Known

FORMAT = 2  # changes when an older notes would read a newer ledger wrongly
LEDGER = "ledger.jsonl"
ROWS = re.compile(r"[0-9]{4,}\.gguf")
OWN = re.compile(rf"{re.escape(LEDGER)}|{ROWS.pattern}|\.({re.escape(LEDGER)}|{ROWS.pattern})\..+\.tmp")
TIME = "%Y-%m-%dT%H:%M:%SZ"  # UTC

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """What a session was begun with; the rest of its life it must be the same."""

    identity: Identity
    cache: str  # K and V as the cache keeps them, "q8_0/f16": rows are read back from that
    pinned: bool  # rows cannot be moved, so each turn keeps those of the whole notebook
    model: str  # path of the model's file, for people


@dataclass(frozen=True, slots=True)
class Entry:
    """A piece of the notebook, or an edit (`how` is its method), as the ledger shows it."""

    kind: str
    name: str  # of a skill; of the field that an erratum or an edit is about
    text: str
    position: int
    tokens: int
    how: str
    why: str


@dataclass(frozen=True, slots=True)
class SkillText:
    """A spliced skill as it stands in the notebook now; spans of fields count from its first token."""

    name: str
    position: int
    text: str
    tokens: int
    fields: tuple[FieldSpan, ...]
    influence: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Line) -> SkillText:
        """Raise KeyError, TypeError or ValueError where the data is no skill."""
        spans = tuple(FieldSpan(**{**span, "name": _text(span, "name")}) for span in data["fields"])
        skill = cls(**{**data, "fields": spans, "name": _text(data, "name"), "text": _text(data, "text")})
        numbers = [skill.position, skill.tokens]
        numbers += [number for span in spans for number in (span.start, span.end, span.first, span.last)]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("skills")
        inside = all(span.first < span.last <= skill.tokens for span in spans)
        if not inside or any(skill.text[span.start : span.end] != span.value for span in spans):
            raise ValueError("fields")
        for row in skill.influence.values():
            if len(row) != skill.tokens or not all(type(value) in (int, float) for value in row):
                raise ValueError("influence")
        return skill


@dataclass(slots=True)
class State:
    """What a ledger comes to: undone lines are gone, edits are applied."""

    live: list[Line] = field(default_factory=list)  # turns, edits and compactions that stand
    tokens: list[int] = field(default_factory=list)
    rows: list[tuple[str, int]] = field(default_factory=list)  # of each position: the file of its row, and which
    entries: list[Entry] = field(default_factory=list)  # in the order in which they came
    skills: list[SkillText] = field(default_factory=list)
    # Fields are called by their keys (text/references.py), as they are among the skills that there are now.
    values: dict[str, str] = field(default_factory=dict)  # of fields, where an erratum or an edit gave another one
    pending: dict[str, str] = field(default_factory=dict)  # errata by field, to be said before the next question
    stated: set[str] = field(default_factory=set)  # fields of which an erratum has been said

    @property
    def known(self) -> Known:
        """The fields of the skills."""
        return Known((skill.name, [span.name for span in skill.fields]) for skill in self.skills)

    @property
    def fields(self) -> dict[str, str]:
        """The value of every field as it holds now."""
        known = self.known
        spans = {known.key(skill.name, span.name): span.value for skill in self.skills for span in skill.fields}
        return spans | self.values

    def count(self, op: str) -> int:
        """How many turns, edits or compactions stand."""
        return sum(line["op"] == op for line in self.live)

    @property
    def turns(self) -> int:
        return self.count("turn")

    @property
    def superseded(self) -> list[Entry]:
        """Errata in the notebook whose field was given another value after them, by an erratum (said or waiting) or in
        the text, as they stand. Free words are never superseded, nor errata from before ledgers named their fields."""
        found: list[Entry] = []
        known, later = self.known, set(self.pending)
        for entry in reversed(self.entries):
            keys = _keys(known, entry.name) if entry.kind in ("erratum", "edit") and entry.name else set()
            if entry.kind == "erratum" and keys and keys <= later:
                found.append(entry)
            later |= keys
        return sorted(found, key=lambda entry: entry.position)

    def apply(self, line: Line) -> None:
        """What the line says happens. Raise KeyError, TypeError or ValueError where it says nothing that can be."""
        {"turn": self._turn, "edit": self._edit, "compact": self._compact}[line["op"]](line)
        if any(skill.position + skill.tokens > len(self.tokens) for skill in self.skills):
            raise ValueError("skills")
        self.live.append(line)

    def _turn(self, line: Line) -> None:
        """Pieces came at the end."""
        start = len(self.tokens)
        _text(line, "question")
        skills = [SkillText.from_dict(skill) for skill in line["skills"]]
        self._join(skills)
        for piece in line["pieces"]:
            known = {key: _text(piece, key) for key in ("kind", "name", "text", "how", "why")}
            self.entries.append(Entry(**known, position=len(self.tokens), tokens=len(piece["tokens"])))
            self.tokens += _ids(piece["tokens"])
        self.rows += [(line["rows"], row) for row in range(len(self.tokens) - start)]
        fields = self.known
        said = {key: _text(line["said"], name) for name in line["said"] for key in _keys(fields, name)}
        self.values |= said
        self.stated |= {*said, *self.pending}
        self.pending = {}

    def _join(self, skills: Sequence[SkillText]) -> None:
        """Skills came: a field that one of them has, too, is called by its skill from now on."""
        before = self.known
        self.skills += skills
        now = self.known

        def renamed(name: str) -> str:
            found = before.find(name)
            return now.key(found[0].skill, found[0].field) if len(found) == 1 else name

        self.values = {renamed(name): value for name, value in self.values.items()}
        self.pending = {renamed(name): said for name, said in self.pending.items()}
        self.stated = set(map(renamed, self.stated))
        self.entries = [
            replace(entry, name=renamed(entry.name)) if entry.kind in ("erratum", "edit") else entry
            for entry in self.entries
        ]

    def _edit(self, line: Line) -> None:
        """A field got another value: in the text, by an erratum that is still to be said, or both."""
        name, value = _text(line, "field"), _text(line, "value")
        place = self._replace(line)
        self.entries.append(Entry("edit", name, f"{name}={value}", place, 0, _text(line, "method"), _text(line, "why")))
        amended = {part["name"]: SkillText.from_dict(part) for part in line["skills"]}
        self.skills = [amended.get(skill.name) or skill for skill in self.skills]
        keys = _keys(self.known, name)
        for key in keys:
            self.values[key] = value
            self.pending.pop(key, None)
        if _text(line, "says"):
            self.pending[min(keys)] = line["says"]

    def _compact(self, line: Line) -> None:
        """Errata were taken out, and what stands behind them was computed again."""
        known = self.known
        taken = [_keys(known, _text({"name": name}, "name")) for name in line["fields"]]
        self._replace(line)
        self.entries = [entry for entry in self.entries if entry.tokens or entry.kind == "edit"]
        left = [_keys(known, entry.name) for entry in self.entries if entry.kind == "erratum" and entry.name]
        self.stated = self.stated.difference(*taken).union(*left)

    def _replace(self, line: Line) -> int:
        """Tokens gave way to others, what stands behind them moved, and some rows were computed again. Return the first
        position of these."""
        parts = [(*span, _ids(part["tokens"])) for span, part in _patches(line, len(self.tokens))]

        def shift(position: int) -> int:
            """Where a position is now; one inside of what gave way stays inside of what took its place."""
            moved = 0
            for first, last, new in parts:
                if last <= position:
                    moved += len(new) - (last - first)
                elif first < position:
                    moved += min(position - first, len(new)) - (position - first)
            return position + moved

        for first, last, new in reversed(parts):
            self.tokens[first:last] = new
        self.rows = [*self.rows, *[("", 0)] * len(self.tokens)][: len(self.tokens)]
        changed = [place for first, last in _spans(line["changed"], len(self.tokens)) for place in range(first, last)]
        for row, place in enumerate(changed):
            self.rows[place] = line["rows"], row
        self.entries = [_shifted(entry, shift) for entry in self.entries]
        self.skills = [replace(skill, position=shift(skill.position)) for skill in self.skills]
        return changed[0] if changed else len(self.tokens)


def _shifted(entry: Entry, shift: Callable[[int], int]) -> Entry:
    start, end = shift(entry.position), shift(entry.position + entry.tokens)
    return replace(entry, position=start, tokens=end - start)


def _keys(known: Known, name: str) -> set[str]:
    """The keys of the fields that a ledger means by a name. Older ledgers name those of several skills by one."""
    return {one.key for one in known.find(name)} or {name}


def _text(data: Line, key: str) -> str:
    text = data[key]
    if not isinstance(text, str):
        raise TypeError(key)
    return text


def _ids(tokens: Iterable[int]) -> list[int]:
    ids = list(tokens)
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ValueError("tokens")
    return ids


def _spans(spans: Iterable[Sequence[int]], length: int) -> list[tuple[int, int]]:
    """Ranges [first, last) that ascend in [0, length), as they must."""
    found: list[tuple[int, int]] = []
    for first, last in spans:
        numbers = type(first) is int and type(last) is int
        if not numbers or not (found[-1][1] if found else 0) <= first <= last <= length:
            raise ValueError("range")
        found.append((first, last))
    return found


def _patches(line: Line, length: int) -> list[tuple[tuple[int, int], Line]]:
    spans = _spans([(part["first"], part["last"]) for part in line["patches"]], length)
    return list(zip(spans, line["patches"], strict=True))


def fold(lines: Sequence[Line]) -> State:
    """What lines come to. Raise an error of Python's, such as KeyError, where they are none."""
    live: list[Line] = []
    for line in lines:
        if line["op"] == "undo":
            live.pop()
        else:
            live.append(line)
    state = State()
    for line in live:
        state.apply(line)
        if _text(line, "rows") and not ROWS.fullmatch(line["rows"]):
            raise ValueError("rows")
    return state


class Ledger(NamedTuple):
    """What a ledger's file holds: the first line, all lines, what they come to, and how many bytes are whole lines."""

    header: Header
    lines: list[Line]
    state: State
    end: int

    @property
    def kept(self) -> list[str]:
        """The files of rows that stand. Of whole ones the last two: as far back as one undo."""
        names = [str(line["rows"]) for line in self.state.live if line["rows"]]
        return names[-2:] if self.header.pinned else names


class LedgerError(ValueError):
    """Bytes that are no ledger."""


class NewerError(LedgerError):
    """A ledger in a format that this version does not know."""


def read_ledger(data: bytes) -> Ledger:
    """Raise LedgerError where it is damaged."""
    end = data.rfind(b"\n") + 1
    try:
        lines = [json.loads(line) for line in data[:end].split(b"\n")[:-1]]
        first = lines[0]
        if first["format"] > FORMAT:
            raise NewerError(str(first["format"]))
        for line in lines:
            datetime.strptime(_text(line, "time"), TIME)
        identity = Identity.from_dict({key: _text(first["identity"], key) for key in first["identity"]})
        header = Header(identity, _text(first, "cache"), first["whole"] is True, _text(first, "model"))
        return Ledger(header, lines, fold(lines[1:]), end)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise LedgerError from error
    except LedgerError:
        raise
    except ValueError as error:
        raise LedgerError from error


def _as_line(header: Header) -> Line:
    return {
        "identity": header.identity.as_dict(),
        "cache": header.cache,
        "whole": header.pinned,
        "model": header.model,
    }


def line_bytes(line: Line) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


class SessionFolder:
    """One session's folder. Whoever writes holds its lock (Sessions.locked)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.header: Header | None = None  # none: it has not been begun
        self.lines: list[Line] = []
        self.state = State()
        self.end = 0  # bytes of the ledger that are whole lines
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
        """Where the rows of the next line belong. A file that a crash left there is written over."""
        return self.folder / f"{max(1, len(self.lines)):04d}.gguf"

    def commit(self, line: Line, header: Header | None = None) -> None:
        """Append a line: with it, and not before, it has happened. `header` begins the session."""
        now = datetime.now(timezone.utc).strftime(TIME)
        lines: list[Line] = [{**line, "time": now}]
        if header is not None:
            lines.insert(0, {"op": "open", "format": FORMAT, **_as_line(header), "time": now})
        data = b"".join(map(line_bytes, lines))
        try:
            if header is not None:
                with replacing(self.ledger) as temporary:
                    temporary.write_bytes(data)
            else:
                self._append(data)
        except OSError as error:
            raise SessionError(f"cannot write {self.ledger}: {reason(error)}. Nothing was changed") from error
        self._read()
        self._sweep()

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

    def undo(self) -> Line:
        """Take back the last turn, edit or compaction and return it. Raise SessionError if there is none."""
        if not self.state.live:
            raise SessionError(f"there is nothing to undo in session {self.name}")
        undone = self.state.live[-1]
        self.commit({"op": "undo"})
        return undone

    def kept(self) -> list[str]:
        """The files of rows that stand (Ledger.kept)."""
        return Ledger(self.header, self.lines, self.state, self.end).kept if self.header else []

    def _sweep(self) -> None:
        """Remove what no line needs: rows that were undone, files of a process that was killed. What is not ours
        stays. The line is there: what cannot be removed now will be another time."""
        wanted = {LEDGER, *self.kept()}
        with suppress(OSError):
            for path in _own(self.folder):
                if path.name not in wanted:
                    path.unlink(missing_ok=True)

    def _read(self) -> None:
        private.check(self.folder)
        try:
            for path in _own(self.folder):
                private.check_file(path)
            data = self.ledger.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise SessionError(f"cannot read {self.ledger}: {reason(error)}") from error
        try:
            self.header, self.lines, self.state, self.end = read_ledger(data)
        except NewerError as error:
            raise SessionError(f"{self.ledger} has format {error}, this notes reads {FORMAT}. Update notes") from error
        except LedgerError as error:
            raise SessionError(
                f"the ledger of session {self.name} is damaged. Mend {self.ledger}, or: notes session rm {self.name}"
            ) from error


class Sessions:
    """The sessions of one user. The folder appears with the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Raise NotesError if the folder may be of somebody else's making (private.py)."""
        private.check(self.folder)
        try:
            found = [(names.typed(path.name), path) for path in self.folder.iterdir()]
            return sorted(name for name, path in found if names.is_name(name) and (path / LEDGER).is_file())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SessionError(f"cannot read {self.folder}: {reason(error)}") from error

    def find(self, name: str) -> SessionFolder:
        """Raise SessionError, naming what is near, if there is no such session."""
        name, known = names.typed(name), self.names()
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise SessionError(f"there is no session {name!r}.{hint} See: notes session ls")
        return SessionFolder(self.folder / name)

    @contextmanager
    def locked(self, name: str, *, new: bool = False, reading: bool = False) -> Iterator[SessionFolder]:
        """Hold a session for this process; `new`: it may not have been begun yet. `reading`: nothing will be written,
        so that a folder that is read-only will do.

        Raise SessionError if there is none of that name, or another process holds it.
        """
        name = names.typed(name)
        if not new:
            self.find(name)  # before anything is written
        with self._lock(name, reading):
            yield SessionFolder(self.folder / name) if new else self.find(name)

    @contextmanager
    def _lock(self, name: str, reading: bool = False) -> Iterator[None]:
        if not names.is_name(name):
            raise SessionError(f"{name!r} is no name of a session: use {names.RULE}{_such_as(name)}")
        known = self.names()
        objection = None if name in known else names.objection(name, known)
        if objection:
            raise SessionError(f"{objection}. Choose another name")
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.folder / ".locks" / f"{name}.lock", wait=0))
            except HeldError:
                raise SessionError(f"another process uses session {name}. Wait for it, or end it") from None
            except OSError as error:
                if not (reading and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)):
                    raise SessionError(f"cannot write to {self.folder}: {reason(error)}") from error
            yield

    def fork(self, name: str, new: str) -> Path:
        """A second session that goes on from here. Files of rows are shared: nobody changes them."""
        name, new = names.typed(name), names.typed(new)
        with self.locked(name) as stored, nullcontext(stored) if new == name else self.locked(new, new=True) as fork:
            if fork.header:
                raise SessionError(f"there is a session {new} already. Choose another name")
            try:
                private.make(fork.folder)
                for rows in stored.kept():
                    if (stored.folder / rows).exists():  # not a whole one from before an undo
                        _link(stored.folder / rows, fork.folder / rows)
                with replacing(fork.ledger) as temporary:  # last: with it, there is a session
                    temporary.write_bytes(stored.ledger.read_bytes()[: stored.end])
            except OSError as error:
                with suppress(OSError):
                    clear(fork.folder)
                raise SessionError(f"cannot write {fork.folder}: {reason(error)}. Nothing was changed") from error
            return fork.folder

    def remove(self, name: str) -> Path:
        """Delete a session, sound or not."""
        name = names.typed(name)
        if name not in self.names():
            self.find(name)
        folder = self.folder / name
        try:
            with self._lock(name):
                clear(folder)
        except OSError as error:
            raise SessionError(f"cannot remove {folder}: {reason(error)}") from error
        return folder


def clear(folder: Path) -> None:
    """Remove the files of a session, the ledger first: without it, there is no session. Then the folder, unless it
    holds something else. Raise OSError."""
    (folder / LEDGER).unlink(missing_ok=True)
    for path in _own(folder):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


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

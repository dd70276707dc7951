"""Sessions: notebooks on disk, a folder each, described in docs/format.md.

`ledger.jsonl` says what happened, a line for each turn, edit and undo, and is only ever appended to; the K/V rows that
a line added stand in a file of their own, which is never changed. What the ledger comes to is its State. It knows no
model, and of rows only the names of their files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import filelock

from notes_cli.engine.identity import Identity
from notes_cli.engine.segment import FieldSpan
from notes_cli.errors import NotesError
from notes_cli.library.atomic import replacing
from notes_cli.library.store import NAME

FORMAT = 1  # changes when an older notes would read a newer ledger wrongly
LEDGER = "ledger.jsonl"
ROWS = re.compile(r"[0-9]{4,}\.gguf")

Line = Mapping[str, Any]


class SessionError(NotesError):
    """A session that is not there, in use, damaged, or of another model."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a session was begun with; the rest of its life it must be the same."""

    identity: Identity
    cache: str  # K and V as the cache keeps them, "q8_0/f16": rows are read back from that
    whole: bool  # rows cannot be moved, so each turn keeps those of the whole notebook
    model: str  # path of the model's file, for people


@dataclass(frozen=True, slots=True)
class Entry:
    """A piece of the notebook, or an edit (`how` is its method), as the ledger shows it."""

    kind: str
    name: str
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
        spans = tuple(FieldSpan(**span) for span in data["fields"])
        return cls(**{**data, "fields": spans})


@dataclass(slots=True)
class State:
    """What a ledger comes to: undone lines are gone, edits are applied."""

    live: list[Line] = field(default_factory=list)  # turns and edits that stand
    tokens: list[int] = field(default_factory=list)
    rows: list[tuple[str, int]] = field(default_factory=list)  # of each position: the file of its row, and which
    entries: list[Entry] = field(default_factory=list)
    skills: list[SkillText] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)  # of fields, where an erratum or an edit gave another one
    pending: dict[str, str] = field(default_factory=dict)  # errata by field, to be said before the next question
    heard: set[str] = field(default_factory=set)  # fields of which an erratum has been said

    @property
    def fields(self) -> dict[str, str]:
        """The value of every field as it holds now."""
        return {span.name: span.value for skill in self.skills for span in skill.fields} | self.values

    @property
    def turns(self) -> int:
        return sum(line["op"] == "turn" for line in self.live)

    def turn(self, line: Line) -> None:
        """Pieces came at the end."""
        self.live.append(line)
        start = len(self.tokens)
        for piece in line["pieces"]:
            known = {key: piece[key] for key in ("kind", "name", "text", "how", "why")}
            self.entries.append(Entry(**known, position=len(self.tokens), tokens=len(piece["tokens"])))
            self.tokens += map(int, piece["tokens"])
        self.rows += [(line["rows"], row) for row in range(len(self.tokens) - start)]
        self.skills += map(SkillText.from_dict, line["skills"])
        self.values |= line["said"]
        self.heard |= {*line["said"], *self.pending}
        self.pending = {}

    def edit(self, line: Line) -> None:
        """Tokens gave way to others, what stands behind them moved, and some rows were computed again."""
        self.live.append(line)
        patches = [(int(part["first"]), int(part["last"]), list(part["tokens"])) for part in line["patches"]]

        def shift(position: int) -> int:
            return position + sum(len(new) - (last - first) for first, last, new in patches if last <= position)

        for first, last, new in reversed(patches):
            self.tokens[first:last] = map(int, new)
        self.rows = [*self.rows, *[("", 0)] * len(self.tokens)][: len(self.tokens)]
        changed = [position for first, last in line["changed"] for position in range(first, last)]
        for row, position in enumerate(changed):
            self.rows[position] = line["rows"], row
        self.entries = [
            replace(
                entry,
                position=shift(entry.position),
                tokens=shift(entry.position + entry.tokens) - shift(entry.position),
            )
            for entry in self.entries
        ]
        place = changed[0] if changed else len(self.tokens)
        said = f"{line['field']}={line['value']}"
        self.entries.append(Entry("edit", line["field"], said, place, 0, line["method"], line["why"]))
        amended = {part["name"]: SkillText.from_dict(part) for part in line["skills"]}
        self.skills = [
            amended.get(skill.name) or replace(skill, position=shift(skill.position)) for skill in self.skills
        ]
        self.values[line["field"]] = line["value"]
        self.pending.pop(line["field"], None)
        if line["says"]:
            self.pending[line["field"]] = line["says"]


def fold(lines: Sequence[Line]) -> State:
    """What turns, edits and undos come to. Raise KeyError, TypeError or ValueError where they are none."""
    live: list[Line] = []
    for line in lines:
        if line["op"] == "undo":
            live.pop()
        else:
            live.append(line)
    state = State()
    for line in live:
        {"turn": state.turn, "edit": state.edit}[line["op"]](line)
        if line["rows"] and not ROWS.fullmatch(line["rows"]):
            raise ValueError("rows")
    return state


class Stored:
    """One session's folder. Whoever writes holds its lock (Sessions.locked)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.header: Header | None = None  # none: it has not been begun
        self.lines: list[Line] = []
        self.state = State()
        self._end = 0  # bytes of the ledger that are whole lines
        self._read()

    @property
    def ledger(self) -> Path:
        return self.folder / LEDGER

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

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
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = [{**line, "time": now}]
        if header is not None:
            lines.insert(0, {"op": "open", "format": FORMAT, **asdict(header), "time": now})
        data = b"".join(json.dumps(part, ensure_ascii=False).encode() + b"\n" for part in lines)
        try:
            if header is not None:
                with replacing(self.ledger) as temporary:
                    temporary.write_bytes(data)
            else:
                with self.ledger.open("r+b") as file:
                    file.seek(self._end)
                    file.truncate()  # a line that a crash tore
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise SessionError(f"cannot write {self.ledger}: {error.strerror}. Nothing was changed") from error
        self._read()
        self._sweep()

    def undo(self) -> Line:
        """Take back the last turn or edit and return it. Raise SessionError if there is none."""
        if not self.state.live:
            raise SessionError(f"there is nothing to undo in session {self.name}")
        undone = self.state.live[-1]
        self.commit({"op": "undo"})
        return undone

    def kept(self) -> list[str]:
        """The files of rows that stand. Of whole ones the last two: as far back as one undo."""
        names = [str(line["rows"]) for line in self.state.live if line["rows"]]
        return names[-2:] if self.header and self.header.whole else names

    def _sweep(self) -> None:
        """Remove what no line needs: rows that were undone, files of a process that was killed."""
        wanted = {LEDGER, *self.kept()}
        for path in self.folder.iterdir():
            if path.name not in wanted:
                path.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            data = self.ledger.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise SessionError(f"cannot read {self.ledger}: {error.strerror}") from error
        self._end = data.rfind(b"\n") + 1
        try:
            self.lines = [json.loads(line) for line in data[: self._end].split(b"\n")[:-1]]
            first = self.lines[0]
            if first["format"] > FORMAT:
                raise SessionError(
                    f"{self.ledger} has format {first['format']}, this notes reads {FORMAT}. Update notes"
                )
            identity = Identity.from_dict(first["identity"])
            self.header = Header(identity, str(first["cache"]), first["whole"] is True, str(first["model"]))
            self.state = fold(self.lines[1:])
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise SessionError(
                f"the ledger of session {self.name} is damaged. Mend {self.ledger}, or: notes session rm {self.name}"
            ) from error


class Sessions:
    """The sessions of one user. The folder appears with the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        try:
            return sorted(
                path.name for path in self.folder.iterdir() if NAME.fullmatch(path.name) and (path / LEDGER).is_file()
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SessionError(f"cannot read {self.folder}: {error.strerror}") from error

    def find(self, name: str) -> Stored:
        """Raise SessionError, naming what is near, if there is no such session."""
        names = self.names()
        if name not in names:
            near = get_close_matches(name, names, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise SessionError(f"there is no session {name!r}.{hint} See: notes session ls")
        return Stored(self.folder / name)

    @contextmanager
    def locked(self, name: str, *, new: bool = False) -> Iterator[Stored]:
        """Hold a session for this process; `new`: it may not have been begun yet.

        Raise SessionError if there is none of that name, or another process holds it.
        """
        if not new:
            self.find(name)  # before anything is written
        with self._lock(name):
            yield Stored(self.folder / name) if new else self.find(name)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        if not NAME.fullmatch(name):
            raise SessionError(f"{name!r} is no name of a session: use a-z, 0-9 and single -")
        lock = filelock.FileLock(self.folder / ".locks" / f"{name}.lock")
        try:
            Path(lock.lock_file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise SessionError(f"another process uses session {name}. Wait for it, or end it") from None
        except OSError as error:
            raise SessionError(f"cannot write to {self.folder}: {error.strerror}") from error
        try:
            yield
        finally:
            lock.release()

    def fork(self, name: str, new: str) -> Path:
        """A second session that goes on from here. Files of rows are shared: nobody changes them."""
        with self.locked(name) as stored, nullcontext(stored) if new == name else self.locked(new, new=True) as fork:
            if fork.header:
                raise SessionError(f"there is a session {new} already. Choose another name")
            try:
                fork.folder.mkdir(mode=0o700, exist_ok=True)
                for rows in stored.kept():
                    if (stored.folder / rows).exists():  # not a whole one from before an undo
                        _link(stored.folder / rows, fork.folder / rows)
                with replacing(fork.ledger) as temporary:  # last: with it, there is a session
                    temporary.write_bytes(stored.ledger.read_bytes()[: stored._end])
            except OSError as error:
                raise SessionError(f"cannot write {fork.folder}: {error.strerror}") from error
            return fork.folder

    def remove(self, name: str) -> Path:
        """Delete a session, sound or not."""
        if name not in self.names():
            self.find(name)
        folder = self.folder / name
        try:
            with self._lock(name):
                (folder / LEDGER).unlink()  # first: without it, there is no session
                shutil.rmtree(folder)
        except OSError as error:
            raise SessionError(f"cannot remove {folder}: {error.strerror}") from error
        return folder


def _link(old: Path, new: Path) -> None:
    new.unlink(missing_ok=True)  # of a fork that was killed
    try:
        new.hardlink_to(old)
    except OSError:  # not every file system can
        shutil.copy2(old, new)

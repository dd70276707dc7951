"""Reads and appends global errata: corrections of skills that apply to all conversations and sessions of a library.

The file, one JSON object per line, is only appended to, so that several processes can use it at once. An erratum
belongs to the skill that had the name when it was added, identified by source file or text (`marks_of`), and is valid
while the text has the value that it corrects: a new value in the text ends it. A line without a value is written by a
compile: with marks, the errata of the field also belong to the skill with these; with none, they have ended.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from notes_cli.errors import NotesError, reason
from notes_cli.library.safe_files import HeldError, check_private, locked
from notes_cli.library.segment_files import ERRATA
from notes_cli.text.erratum import Fielded

PATIENCE = 2  # seconds to wait for another process: a server answers no request meanwhile
ENDED = ""  # a value that no field has


@dataclass(frozen=True, slots=True)
class GlobalErratum:
    """A correction of one field of one skill."""

    skill: str
    field: str
    was: str  # the value in the text; ENDED once a compile has found another
    value: str
    time: str  # UTC
    marks: tuple[str, ...] = ()  # of the skill (marks_of); empty: of any skill with the name

    def is_of(self, marks: Collection[str]) -> bool:
        """Return True if it belongs to the skill with these marks; no marks match any."""
        return not marks or not self.marks or not set(self.marks).isdisjoint(marks)


class GlobalErrata:
    """The global errata of a library, the latest last."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ERRATA
        self._stamp: object = None
        self._errata: list[GlobalErratum] = []

    def all(self) -> Sequence[GlobalErratum]:
        """Return all errata, the latest last. Raises NotesError for a file that cannot be read."""
        try:
            check_private(self.path.parent)
            status = self.path.stat()
            stamp = status.st_ino, status.st_mtime_ns, status.st_size
            if stamp != self._stamp:
                self._errata, self._stamp = _read(self.path.read_bytes()), stamp
        except FileNotFoundError:
            self._errata, self._stamp = [], None
        except OSError as error:
            raise NotesError(f"cannot read {self.path}: {reason(error)}") from error
        except (AttributeError, ValueError, TypeError, KeyError) as error:
            raise NotesError(f"{self.path} is damaged", "Mend or remove it") from error
        return self._errata

    def add(self, errata: Sequence[GlobalErratum]) -> list[GlobalErratum]:
        """Append errata; return them with their time. Raises NotesError if the file cannot be written."""
        new: list[GlobalErratum] = []

        def lines() -> list[Mapping[str, Any]]:
            new.extend(replace(erratum, time=now()) for erratum in errata)  # times are in the order of the lines
            return [asdict(erratum) for erratum in new]

        self._append(lines)
        return new

    def compiled(
        self, skill: str, fields: Mapping[str, str], marks: Sequence[str], *, same: bool = False
    ) -> list[GlobalErratum]:
        """Record that a skill was compiled, which ends errata of another skill of its name, or of another value.
        `same`: it replaces a segment of the same skill. Return the errata that no longer apply."""
        ended: list[GlobalErratum] = []

        def lines() -> list[Mapping[str, Any]]:
            new: list[Mapping[str, Any]] = []
            latest = {
                erratum.field: erratum for erratum in self.all() if erratum.skill == skill and erratum.was != ENDED
            }
            for field, erratum in latest.items():
                valid = fields.get(field) == erratum.was and (same or erratum.is_of(marks))
                if not valid or not set(marks) <= set(erratum.marks):
                    new.append({"skill": skill, "field": field, "marks": list(marks) if valid else []})
                if not valid and erratum.value != erratum.was:
                    ended.append(erratum)
            return new

        if self.path.exists():
            self._append(lines)
        return ended

    def _append(self, lines: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Append the result of `lines`, called with the file locked."""
        try:
            with locked(self.path.parent / ".locks" / f"{ERRATA}.lock", wait=PATIENCE):
                self.all()
                data = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines())
                if not data:
                    return
                with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
                    end = file.read().rfind(b"\n") + 1  # of the complete lines: a crash may have left a part of one
                    file.truncate(end)
                    file.seek(end)
                    file.write(data)
                    os.fsync(file.fileno())
        except HeldError as error:
            raise NotesError(f"another process writes {self.path}: {error}", "Try again") from None
        except OSError as error:
            raise NotesError(f"cannot write {self.path}: {reason(error)}") from error


class Text(Fielded, Protocol):
    """A skill with its source: one that was loaded, or a segment."""

    @property
    def source(self) -> str: ...


def holding(
    errata: Sequence[GlobalErratum], skill: Text, seen: int | None = None, *, any_text: bool = False
) -> dict[str, str]:
    """Return the corrected values of a skill that differ from those in its text, by field. `seen`: so many errata were
    applied to the text before; then all later ones apply, with any value, as they may be of a newer text. `any_text`:
    those of another text of the skill apply, too, where that has the same value."""
    if seen is not None:
        return {erratum.field: erratum.value for erratum in errata[seen:] if erratum.skill == skill.name}
    marks = () if any_text else marks_of(skill.source, skill.text)
    return applying(errata, skill.name, marks, {span.name: span.value for span in skill.fields})


def applying(
    errata: Sequence[GlobalErratum],
    skill: str,
    marks: Collection[str],
    current: Mapping[str, str],
    earlier: Mapping[str, str] = {},
    known: Mapping[str, str] = {},
) -> dict[str, str]:
    """Return the new values of a skill's fields. An erratum applies where the field has the value that it replaces, in
    `current` or `earlier`, unless it is no later than the time in `known`. The last one of a field counts."""
    last = {
        erratum.field: erratum
        for erratum in errata
        if erratum.skill == skill and erratum.is_of(marks) and erratum.field in current
        if erratum.was in (current[erratum.field], earlier.get(erratum.field))
    }
    return {
        name: erratum.value
        for name, erratum in last.items()
        if erratum.value != current[name] and erratum.time > known.get(name, "")
    }


def now() -> str:
    """Return the UTC time with microseconds. (A time without a fraction counts as the end of its second.)"""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def marks_of(source: str, text: str) -> tuple[str, ...]:
    """Return digests that identify a skill among others of its name: of its text, and of its source file, if any."""
    marks = [f"text {text}", *([] if source in ("", "-") else [f"file {source}"])]
    return tuple(hashlib.sha256(mark.encode(errors="replace")).hexdigest()[:16] for mark in marks)


def _read(data: bytes) -> list[GlobalErratum]:
    errata: list[GlobalErratum] = []
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        entry = json.loads(line)
        marks = tuple(entry.pop("marks", ()))
        if not all(isinstance(value, str) for value in (*entry.values(), *marks)):
            raise ValueError(line)
        if "value" in entry:
            errata.append(GlobalErratum(**entry, marks=marks))
            continue
        key = entry["skill"], entry["field"]
        for number, old in enumerate(errata):
            if (old.skill, old.field) == key:
                errata[number] = replace(old, marks=(*old.marks, *marks)) if marks else replace(old, was=ENDED)
    return errata

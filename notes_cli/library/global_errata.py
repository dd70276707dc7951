"""Standing errata: corrections of skills that everybody is told, in a file beside the compiled skills.

A line of JSON each, only ever appended, so that several programs may read and write it at once. An erratum is of the
skill that had the name then: of its file, or of its text. It holds for as long as the text says what it said then:
whoever writes another value into the text has the last word. A line without a value says what a compile found: of which
skill the errata of a field are from now on, too, or of none, as they have ended.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from notes_cli.errors import NotesError, reason
from notes_cli.library.safe_files import HeldError, check_private, check_private_file, locked
from notes_cli.library.segment_files import ERRATA

PATIENCE = 2  # seconds that another process may hold the file: a server answers nobody meanwhile
ENDED = ""  # what no text says of a field


@dataclass(frozen=True, slots=True)
class GlobalErratum:
    """A correction of one field of one skill."""

    skill: str
    field: str
    was: str  # what the text says; ENDED once a compile has found another
    value: str
    time: str  # UTC
    marks: tuple[str, ...] = ()  # of the skill (marks_of); older files have none: of whatever has the name

    def is_of(self, marks: Collection[str]) -> bool:
        """Whether it is about the skill with these marks; one without any is whatever has the name."""
        return not marks or not self.marks or not set(self.marks).isdisjoint(marks)


class GlobalErrata:
    """Those of one library, the latest last."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ERRATA
        self._seen: object = None
        self._found: list[GlobalErratum] = []

    def all(self) -> Sequence[GlobalErratum]:
        """Raise NotesError for a file that cannot be read."""
        try:
            check_private(self.path.parent)
            check_private_file(self.path)
            found = self.path.stat()
            seen = found.st_ino, found.st_mtime_ns, found.st_size
            if seen != self._seen:
                self._found, self._seen = _read(self.path.read_bytes()), seen
        except FileNotFoundError:
            self._found, self._seen = [], None
        except OSError as error:
            raise NotesError(f"cannot read {self.path}: {reason(error)}") from error
        except (AttributeError, ValueError, TypeError, KeyError) as error:
            raise NotesError(f"{self.path} is damaged", "Mend or remove it") from error
        return self._found

    def add(self, errata: Sequence[GlobalErratum]) -> list[GlobalErratum]:
        """Tell these from now on; return them with the time that this is. Raise NotesError where the file cannot be
        written."""
        new: list[GlobalErratum] = []

        def lines() -> list[Mapping[str, Any]]:
            new.extend(replace(one, time=now()) for one in errata)  # times are in the order of the lines
            return [asdict(one) for one in new]

        self._append(lines)
        return new

    def compiled(
        self, skill: str, fields: Mapping[str, str], marks: Sequence[str], *, same: bool = False
    ) -> list[GlobalErratum]:
        """A skill was compiled: what was said of another of its name, or of another value, has ended for good. `same`:
        it took the place of what is known to be the same skill. Return what nobody is told any more."""
        ended: list[GlobalErratum] = []

        def lines() -> list[Mapping[str, Any]]:
            found: list[Mapping[str, Any]] = []
            latest = {one.field: one for one in self.all() if one.skill == skill and one.was != ENDED}
            for field, one in latest.items():
                holds = fields.get(field) == one.was and (same or one.is_of(marks))
                if not holds or not set(marks) <= set(one.marks):
                    found.append({"skill": skill, "field": field, "marks": list(marks) if holds else []})
                if not holds and one.value != one.was:
                    ended.append(one)
            return found

        if self.path.exists():
            self._append(lines)
        return ended

    def _append(self, lines: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Append what `lines` gives while nobody else writes."""
        try:
            with locked(self.path.parent / ".locks" / f"{ERRATA}.lock", wait=PATIENCE):
                self.all()
                data = b"".join(json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in lines())
                if not data:
                    return
                with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
                    whole = file.read().rfind(b"\n") + 1  # a line that a crash tore is written over
                    file.truncate(whole)
                    file.seek(whole)
                    file.write(data)
                    os.fsync(file.fileno())
        except HeldError as error:
            raise NotesError(f"another process writes {self.path}: {error}", "Try again") from None
        except OSError as error:
            raise NotesError(f"cannot write {self.path}: {reason(error)}") from error


def holding(
    errata: Sequence[GlobalErratum], skill: str, fields: Mapping[str, str], marks: Collection[str] = ()
) -> dict[str, str]:
    """What is to be said of a skill whose text has these fields: the value of each that another one was given. `marks`:
    its own; none for the library's."""
    found = {
        one.field: one.value
        for one in errata
        if one.skill == skill and fields.get(one.field) == one.was and one.is_of(marks)
    }
    return {name: value for name, value in found.items() if value != fields[name]}


def new_erratum(skill: str, field: str, was: str, value: str, marks: tuple[str, ...] = ()) -> GlobalErratum:
    """An erratum of now."""
    return GlobalErratum(skill, field, was, value, now(), marks)


def now() -> str:
    """Fine enough to tell what came first of two things in one second. A time without a fraction is its end."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def marks_of(source: str, text: str) -> tuple[str, ...]:
    """What tells a skill from others of its name: what it says, and where its text came from, if that was a file."""
    found = [f"text {text}", *([] if source in ("", "-") else [f"file {source}"])]
    return tuple(hashlib.sha256(one.encode(errors="replace")).hexdigest()[:16] for one in found)


def _read(data: bytes) -> list[GlobalErratum]:
    found: list[GlobalErratum] = []
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        told = json.loads(line)
        marks = tuple(told.pop("marks", ()))
        if not all(isinstance(value, str) for value in (*told.values(), *marks)):
            raise ValueError(line)
        if "value" in told:
            found.append(GlobalErratum(**told, marks=marks))
            continue
        whose = told["skill"], told["field"]
        found = [_from_now_on(one, marks) if (one.skill, one.field) == whose else one for one in found]
    return found


def _from_now_on(one: GlobalErratum, marks: tuple[str, ...]) -> GlobalErratum:
    return replace(one, marks=(*one.marks, *marks)) if marks else replace(one, was=ENDED)

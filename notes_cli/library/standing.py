"""Standing errata: corrections of skills that everybody is told, in a file beside the compiled skills.

A line of JSON each, only ever appended, so that several programs may read and write it at once. An erratum holds for as
long as the skill's text says what it said then: whoever writes another value into the text has the last word.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from notes_cli.classes import dataclass
from notes_cli.errors import NotesError, reason
from notes_cli.library import private
from notes_cli.library.files import ERRATA
from notes_cli.library.lock import HeldError, locked

PATIENCE = 2  # seconds that another process may hold the file: a server answers nobody meanwhile


@dataclass(frozen=True, slots=True)
class Standing:
    """A correction of one field of one skill."""

    skill: str
    field: str
    was: str  # what the text says
    value: str
    time: str  # UTC


class StandingErrata:
    """Those of one library, the latest last."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ERRATA
        self._seen: object = None
        self._found: list[Standing] = []

    def all(self) -> Sequence[Standing]:
        """Raise NotesError for a file that cannot be read."""
        try:
            private.check(self.path.parent)
            private.check_file(self.path)
            found = self.path.stat()
            seen = found.st_ino, found.st_mtime_ns, found.st_size
            if seen != self._seen:
                self._found, self._seen = _read(self.path.read_bytes()), seen
        except FileNotFoundError:
            self._found, self._seen = [], None
        except OSError as error:
            raise NotesError(f"cannot read {self.path}: {reason(error)}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise NotesError(f"{self.path} is damaged", "Mend or remove it") from error
        return self._found

    def add(self, errata: Sequence[Standing]) -> None:
        """Tell these from now on. Raise NotesError where the file cannot be written."""
        data = b"".join(json.dumps(asdict(one), ensure_ascii=False).encode() + b"\n" for one in errata)
        try:
            with locked(self.path.parent / ".locks" / f"{ERRATA}.lock", wait=PATIENCE):
                self.all()
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


def holding(errata: Sequence[Standing], skill: str, fields: Mapping[str, str]) -> dict[str, str]:
    """What is to be said of a skill whose text has these fields: the value of each that another one was given."""
    found = {one.field: one.value for one in errata if one.skill == skill and fields.get(one.field) == one.was}
    return {name: value for name, value in found.items() if value != fields[name]}


def standing(skill: str, field: str, was: str, value: str) -> Standing:
    """An erratum of now."""
    return Standing(skill, field, was, value, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))


def _read(data: bytes) -> list[Standing]:
    found = []
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        one = Standing(**json.loads(line))
        if not all(isinstance(value, str) for value in asdict(one).values()):
            raise ValueError(line)
        found.append(one)
    return found

"""Checkpoints of long work, in `.begun/`: the rows of a compile's first tokens, and the steps of a calibration.

A compile keeps them as a segment under the name that it will have; only the next compile of that looks for it. A
calibration writes a JSON line for each step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from notes_cli.engine.segment import Segment
from notes_cli.errors import SegmentError
from notes_cli.library.container import open_segment
from notes_cli.library.safe_files import check_private, check_private_file, make_private
from notes_cli.library.segment_files import name_in

CHECKPOINTS = ".begun"


def checkpoint_path(segment: Path) -> Path:
    """Where the begun part of a segment file is, whether it exists or not."""
    return segment.parent / CHECKPOINTS / segment.name


def load_checkpoint(segment: Path) -> Segment | None:
    """What is there of it, None where that is nothing that can be used: it would only have saved time."""
    path = checkpoint_path(segment)
    with suppress(OSError, SegmentError):
        return open_segment(path) if path.is_file() and not path.is_symlink() else None
    return None


def remove_checkpoint(segment: Path) -> None:
    """Remove it: the segment is compiled, or not wanted any more."""
    with suppress(OSError):
        checkpoint_path(segment).unlink(missing_ok=True)


def compile_checkpoints(folder: Path) -> Iterator[Path]:
    """All of a library's."""
    with suppress(OSError):
        yield from sorted(path for path in (folder / CHECKPOINTS).iterdir() if name_in(path))


# Takes the name of a step and the function that measures it; returns what was found, as JSON has it.
Keep = Callable[[str, Callable[[], Any]], Any]


def step_name(kind: str, number: int, thing: Any) -> str:
    """The name of what is measured of a case or a pair, with a digest of all of it that is compared."""
    return f"{kind} {number} {hashlib.sha256(repr(_content(thing)).encode()).hexdigest()[:16]}"


def _content(thing: Any) -> Any:
    if is_dataclass(thing):
        return [_content(getattr(thing, each.name)) for each in fields(thing) if each.compare]
    return [*map(_content, thing)] if isinstance(thing, tuple) else thing


def keep_nothing(name: str, measure: Callable[[], Any]) -> Any:
    """A step that is measured now, whatever was kept."""
    return measure()


class CalibrationCheckpoint:
    """The steps that are kept on the way to one profile."""

    def __init__(self, profile: Path, kind: str) -> None:
        """`profile`: where it will be. `kind`: what must be the same for what was kept to be of use. Raise NotesError
        for a file of another user."""
        self._path = profile.parent / CHECKPOINTS / f"{profile.stem}.jsonl"
        self._kind, self.found = kind, dict[str, Any]()
        check_private(self._path.parent)
        check_private_file(self._path)
        with suppress(OSError, ValueError, TypeError, RecursionError):
            first, *lines = self._path.read_text(encoding="utf-8").splitlines()
            if json.loads(first) == kind:
                for line in lines:
                    name, found = json.loads(line)  # the last line may be cut: then those before it are kept
                    self.found[name] = found

    def keep(self, name: str, measure: Callable[[], Any]) -> Any:
        """What a step found: now, unless it was measured before."""
        if name not in self.found:
            found = measure()
            with suppress(OSError):  # saving the profile will fail, too, with the reason
                self._append(name, found)
            self.found[name] = found
        return self.found[name]

    def _append(self, name: str, found: Any) -> None:
        begins = not self.found
        if begins:
            make_private(self._path.parent)
        with self._path.open("w" if begins else "a", encoding="utf-8") as file:
            lines = [*([self._kind] if begins else []), [name, found]]
            file.write("".join(f"{json.dumps(line)}\n" for line in lines))

    def forget(self) -> None:
        """Remove what was kept: the profile is there."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def calibration_checkpoints(profiles: Path) -> Iterator[Path]:
    """What is kept of calibrations that have not been finished."""
    with suppress(OSError):
        yield from sorted((profiles / CHECKPOINTS).glob("*.jsonl"))

"""Saves and loads checkpoints of interrupted work in `.begun/`: a compile's first tokens, a calibration's steps.

A compile's checkpoint is a segment file with the name of the final one. A calibration's has a JSON line for each step.
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
    """Return the path of a segment file's checkpoint, also if it does not exist."""
    return segment.parent / CHECKPOINTS / segment.name


def load_checkpoint(segment: Path) -> Segment | None:
    """Return the checkpoint of a segment file, None if it is missing or unusable."""
    path = checkpoint_path(segment)
    with suppress(OSError, SegmentError):
        return open_segment(path) if path.is_file() and not path.is_symlink() else None
    return None


def remove_checkpoint(segment: Path) -> None:
    """Remove the checkpoint of a segment that is compiled or not wanted any more."""
    with suppress(OSError):
        checkpoint_path(segment).unlink(missing_ok=True)


def compile_checkpoints(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints of a library's folder."""
    with suppress(OSError):
        yield from sorted(path for path in (folder / CHECKPOINTS).iterdir() if name_in(path))


# Takes the name of a step and the function that measures it; returns its result as JSON data.
Keep = Callable[[str, Callable[[], Any]], Any]


def step_name(kind: str, number: int, thing: Any) -> str:
    """Return the name of a step on a case or a pair, with a digest of its compared fields."""
    return f"{kind} {number} {hashlib.sha256(repr(_content(thing)).encode()).hexdigest()[:16]}"


def _content(thing: Any) -> Any:
    if is_dataclass(thing):
        return [_content(getattr(thing, field.name)) for field in fields(thing) if field.compare]
    return [*map(_content, thing)] if isinstance(thing, tuple) else thing


def keep_nothing(name: str, measure: Callable[[], Any]) -> Any:
    """Run a step without a checkpoint."""
    return measure()


class CalibrationCheckpoint:
    """The finished steps of a calibration."""

    def __init__(self, profile: Path, kind: str) -> None:
        """`profile`: its future path. `kind`: the conditions of the calibration; steps of another kind are ignored.
        Raises NotesError for a file of another user."""
        self._path = profile.parent / CHECKPOINTS / f"{profile.stem}.jsonl"
        self._kind, self.found = kind, dict[str, Any]()
        check_private(self._path.parent)
        check_private_file(self._path)
        with suppress(OSError, ValueError, TypeError, RecursionError):
            first, *lines = self._path.read_text(encoding="utf-8").splitlines()
            if json.loads(first) == kind:
                for line in lines:
                    name, result = json.loads(line)  # an incomplete last line ends the loop
                    self.found[name] = result

    def keep(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the result of a step, measuring it unless the checkpoint has it."""
        if name not in self.found:
            result = measure()
            with suppress(OSError):  # saving the profile will fail, too, with the reason
                self._append(name, result)
            self.found[name] = result
        return self.found[name]

    def _append(self, name: str, result: Any) -> None:
        begins = not self.found
        if begins:
            make_private(self._path.parent)
        with self._path.open("w" if begins else "a", encoding="utf-8") as file:
            lines = [*([self._kind] if begins else []), [name, result]]
            file.write("".join(f"{json.dumps(line)}\n" for line in lines))

    def forget(self) -> None:
        """Remove the checkpoint once the profile is saved."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def calibration_checkpoints(profiles: Path) -> Iterator[Path]:
    """Yield the checkpoints of unfinished calibrations."""
    with suppress(OSError):
        yield from sorted((profiles / CHECKPOINTS).glob("*.jsonl"))

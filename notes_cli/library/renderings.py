"""What chat templates have rendered, by template and messages: a small JSON file.

With it most commands start no process that renders (text/rendering.py). No text of a user is in it, as markers stand
for these. Lost or damaged it costs time. It knows no templates.
"""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from functools import cached_property
from pathlib import Path

from notes_cli.errors import NotesError
from notes_cli.library import private
from notes_cli.library.atomic import replacing, sweep
from notes_cli.text.rendering import Rendering

KEPT = 64  # the latest
MAX_TEXT = 1 << 14  # characters of one


class Renderings:
    """A memory in a file, which is read when something is looked for, and written by `save`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new: dict[str, Rendering] = {}

    @cached_property
    def _known(self) -> dict[str, Rendering]:
        return _load(self._path)

    @property
    def empty(self) -> bool:
        return not self._known

    def find(self, key: str) -> Rendering | None:
        """What is known by that key, if the times that it tells are those of now."""
        found = self._known.get(key)
        return (
            found
            if found and all(datetime.now().strftime(form) == told for form, told in found.times.items())
            else None
        )

    def keep(self, key: str, rendering: Rendering) -> None:
        if len(rendering.text) <= MAX_TEXT and len(self._new) < KEPT:
            self._new[key] = self._known[key] = rendering

    def save(self) -> None:
        """Write what is new. Two processes may do so at once: the last one wins, the other renders again some day."""
        sweep(self._path)  # whatever is new: the next command that renders anything may come months later
        if not self._new:
            return
        known = {key: one for key, one in _load(self._path).items() if key not in self._new} | self._new
        data = {key: one._asdict() for key, one in [*known.items()][-KEPT:]}
        with contextlib.suppress(OSError, NotesError), replacing(self._path) as temporary:
            temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")
        self._new = {}


def _load(path: Path) -> dict[str, Rendering]:
    """What is remembered; only entries of the right shape. Nothing that others may have written."""
    try:
        private.check(path.parent)
        private.check_file(path)
        data = json.loads(path.read_text(encoding="utf-8"))
        return {key: _sound(entry) for key, entry in data.items()}
    except (OSError, NotesError, AttributeError, TypeError, ValueError, RecursionError):
        return {}


def _sound(entry: dict[str, object]) -> Rendering:
    found = Rendering(**entry)  # type: ignore[arg-type]
    texts = [found.text, found.error, *found.times, *found.times.values()]
    if found.steady is not True or not all(isinstance(text, str) for text in texts):
        raise ValueError(entry)
    return found

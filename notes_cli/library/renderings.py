"""What chat templates have rendered, by template and messages.

With it most commands start no process that renders (text/rendering.py). No text of a user is in it, as markers stand
for these. It knows no templates.
"""

from __future__ import annotations

import contextlib
from datetime import datetime
from functools import cached_property
from pathlib import Path

from notes_cli.errors import NotesError
from notes_cli.library.atomic import sweep
from notes_cli.library.memory import Memory
from notes_cli.text.rendering import Rendering

KEPT = 64  # the latest
MAX_TEXT = 1 << 14  # characters of one


class Renderings:
    """A memory in a file, which is read when something is looked for, and written by `save`."""

    def __init__(self, path: Path) -> None:
        self._memory = Memory(path, KEPT, _sound, Rendering._asdict)
        self._new: dict[str, Rendering] = {}

    @cached_property
    def _known(self) -> dict[str, Rendering]:
        with contextlib.suppress(NotesError):
            return self._memory.load()
        return {}

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
        """Write what is new."""
        sweep(self._memory.path)  # whatever is new: the next command that renders anything may come months later
        if self._new:
            with contextlib.suppress(NotesError):
                self._memory.add(self._new)
            self._new = {}


def _sound(entry: dict[str, object]) -> Rendering:
    found = Rendering(**entry)  # type: ignore[arg-type]
    texts = [found.text, found.error, *found.times, *found.times.values()]
    if found.steady is not True or not all(isinstance(text, str) for text in texts):
        raise ValueError(entry)
    return found

"""A memory on disk: what was found out, by key, as one JSON object of which the latest entries are kept.

Lost or damaged it costs the time to find that out again. Two processes may write at once: the last one wins, and what
the other one had to add is found out again some day. It does not know what its entries say.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from notes_cli.library import private
from notes_cli.library.atomic import replacing

T = TypeVar("T")
_DAMAGED = (AttributeError, LookupError, TypeError, ValueError, RecursionError)


class Memory(Generic[T]):
    """The entries of one file."""

    def __init__(self, path: Path, most: int, read: Callable[[Any], T], write: Callable[[T], object]) -> None:
        """`most`: how many entries are kept. `read` makes one of what JSON has, or raises an error of Python's for
        another shape; `write` does the reverse."""
        self.path = path
        self._most = most
        self._read, self._write = read, write

    def load(self) -> dict[str, T]:
        """The entries of the right shape, the latest last. Raise NotesError for what others may have written."""
        private.check(self.path.parent)
        private.check_file(self.path)
        found = {}
        with contextlib.suppress(OSError, *_DAMAGED):
            for key, entry in json.loads(self.path.read_text(encoding="utf-8")).items():
                with contextlib.suppress(*_DAMAGED):
                    found[key] = self._read(entry)
        return found

    def add(self, new: Mapping[str, T]) -> None:
        """Remember these, too, if that can be written. Raise NotesError as `load` does."""
        entries = {key: one for key, one in self.load().items() if key not in new} | {**new}
        data = {key: self._write(one) for key, one in [*entries.items()][-self._most :]}
        with contextlib.suppress(OSError), replacing(self.path) as temporary:
            temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")

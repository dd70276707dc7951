"""Facts about models that are found once and remembered as JSON: digests, forms, and texts that templates rendered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from notes_cli.engine import header, ollama_form
from notes_cli.engine.source import parts, stamp
from notes_cli.errors import ModelError, NotesError, Progress, reason
from notes_cli.library.safe_files import check_private, check_private_file, replacing, sweep
from notes_cli.text.rendering import Rendering

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
        check_private(self.path.parent)
        check_private_file(self.path)
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


CHUNK = 4 << 20
DIGESTS = 256  # files remembered, the latest
SETTLED = 2.0  # seconds: a file may change again within one tick of a coarse clock and keep its size and time


def file_sha256(path: Path, file: BinaryIO, memory: Path, progress: Progress | None = None) -> str:
    """SHA-256 of an open file as hex, from `memory` (a JSON file) where it is known by its `path`.

    What is read is `file`, whatever the path names by now. `progress` gets bytes done and bytes in all meanwhile.
    Raise ModelError if it cannot be read.
    """
    return remembered(path, file, memory, lambda: _hash_file(file, progress))


def remembered(path: Path, file: BinaryIO, memory: Path, find: Callable[[], str], *, only: str | None = None) -> str:
    """What `find` finds about an open file, 64 hexadecimal digits, from `memory` (a JSON file) where it is known by its
    `path`; `only`: where this is what is known. Raise ModelError if the file cannot be read, and what `find` raises.
    """
    try:
        path = path.resolve()
        before = list(stamp(file))
        entry = _digests(memory).load().get(str(path))
        if entry is not None and entry[:-1] == before and only in (None, entry[-1]):
            return str(entry[-1])
        found = find()
        after = list(stamp(file))
        settled = time.time() - os.fstat(file.fileno()).st_mtime > SETTLED
    except OSError as error:
        raise ModelError(f"cannot read {path}: {reason(error)}") from error
    if settled and after == before:
        _digests(memory).add({str(path): [*before, found]})
    return found


def known_sha256(path: Path, memory: Path) -> str | None:
    """The digest of a file if it is remembered and the file has not changed; nothing else of it is read."""
    try:
        path = path.resolve()
        entry = _digests(memory).load().get(str(path))
        with path.open("rb") as file:
            return str(entry[-1]) if entry is not None and entry[:-1] == list(stamp(file)) else None
    except (OSError, NotesError):
        return None


def _hash_file(file: BinaryIO, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    size, done = os.fstat(file.fileno()).st_size, 0
    file.seek(0)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # raw or buffered, both have it
        digest.update(buffer[:count])
        done += count
        if progress is not None:
            progress(done, size)
    return digest.hexdigest()


def _digests(path: Path) -> Memory[list[int | str]]:
    """The stamp of each file by its path, and the digest."""
    return Memory(path, DIGESTS, _digest_is_sound, list)


def _digest_is_sound(entry: list[int | str]) -> list[int | str]:
    kinds, digest = [type(part) for part in entry], str(entry[-1])
    if kinds != [int, int, int, int, int, str] or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(entry)
    return entry


class _OtherForm(Exception):
    """What to say of a model in Ollama's form."""


def form_of(path: Path, memory: Path) -> str:
    """What to say of a model in Ollama's form, "" of any other. `memory`: a JSON file; lost or damaged it costs time.

    Raise ModelError for what is no whole GGUF model.
    """
    rules = _form_rules()

    def checked() -> str:
        _check_form(path)
        return rules

    try:
        if not rules or not path.is_file() or parts(path) != [path]:  # of several files one alone would be looked at
            _check_form(path)
        else:
            with path.open("rb") as file:
                remembered(path, file, memory, checked, only=rules)
    except _OtherForm as found:
        return str(found)
    return ""


def _check_form(path: Path) -> None:
    if found := ollama_form.ollama_evidence(header.read_header(path)):
        raise _OtherForm(found)


def _form_rules() -> str:
    """What changes with what tells the forms, 64 hexadecimal digits; "" where that cannot be told."""
    try:
        found = [os.stat(str(module.__file__)) for module in (header, ollama_form)]
    except OSError:  # a package without files
        return ""
    return hashlib.sha256(repr([(one.st_mtime_ns, one.st_size) for one in found]).encode()).hexdigest()


RENDERINGS = 64  # the latest
MAX_TEXT = 1 << 14  # characters of one


class Renderings:
    """A memory in a file, which is read when something is looked for, and written by `save`."""

    def __init__(self, path: Path) -> None:
        self._memory = Memory(path, RENDERINGS, _rendering_is_sound, Rendering._asdict)
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
        if len(rendering.text) <= MAX_TEXT and len(self._new) < RENDERINGS:
            self._new[key] = self._known[key] = rendering

    def save(self) -> None:
        """Write what is new."""
        sweep(self._memory.path)  # whatever is new: the next command that renders anything may come months later
        if self._new:
            with contextlib.suppress(NotesError):
                self._memory.add(self._new)
            self._new = {}


def _rendering_is_sound(entry: dict[str, object]) -> Rendering:
    found = Rendering(**entry)  # type: ignore[arg-type]
    texts = [found.text, found.error, *found.times, *found.times.values()]
    if found.steady is not True or not all(isinstance(text, str) for text in texts):
        raise ValueError(entry)
    return found

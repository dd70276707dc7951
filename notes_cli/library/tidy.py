"""Tidying the library: what its files take, when each was used, and which of them go first.

A file that a process has open, or that is being compiled, is never removed; nor is, of its own accord, a text that is
nowhere else. Images that clients of a server sent go before anything else: who shows one again sends it again. Of
models nothing is known here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from notes_cli.errors import NotesError, SegmentError, UnwritableError, reason
from notes_cli.library.checkpoints import remove_checkpoint
from notes_cli.library.container import peek
from notes_cli.library.info import SegmentInfo
from notes_cli.library.safe_files import HeldError, locked, remove_unused
from notes_cli.library.segment_files import forget_uses, segment_files, uses_of
from notes_cli.text import names
from notes_cli.text.sizes import human_age, human_size

LOCKS = ".locks"
_PATIENCE = 10.0  # seconds that another process may tidy


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A file of the library: what it takes, and when it was used last (or written, if never)."""

    name: str
    path: Path
    nbytes: int
    uses: int
    last: float  # seconds of the system's clock

    @property
    def idle(self) -> float:
        """Seconds since it was used."""
        return max(0.0, time.time() - self.last)

    def __str__(self) -> str:
        ago = f"{human_age(self.idle)} ago"
        when = f"last used {ago}" if self.uses else f"compiled {ago}, never used"
        return f"{self.name} ({human_size(self.nbytes)}, {when})"


@dataclass(frozen=True, slots=True)
class Tidied:
    """What went, what did not although it should have, each with the reason, and what is left in bytes."""

    removed: Sequence[LibraryFile]
    spared: Sequence[tuple[LibraryFile, str]]
    nbytes: int


def library_files(folder: Path) -> list[LibraryFile]:
    """All files of the library, the least recently used first. No file is opened. Raise NotesError."""
    found = []
    for name, path in segment_files(folder):
        try:
            stat = path.stat()
        except OSError:  # removed meanwhile, or a link to nowhere
            continue
        uses = uses_of(path)
        found.append(LibraryFile(name, path, stat.st_size, uses.count, max(stat.st_mtime, uses.last or 0.0)))
    return sorted(found, key=lambda one: (one.last, one.name))


def lock_of(path: Path) -> Path:
    """The lock of a segment file while it is compiled."""
    return path.parent / LOCKS / f"{path.name}.lock"


def remove(path: Path) -> bool:
    """Remove a segment file, and what is known of its use, unless a process uses or compiles it; whether it is gone.

    Raise UnwritableError if the folder does not let us.
    """
    try:
        with locked(lock_of(path), wait=0):
            gone = remove_unused(path)
    except HeldError:
        return False
    except OSError as error:
        raise UnwritableError(f"cannot remove {path}: {reason(error)}") from error
    if gone:
        forget_uses(path)
        remove_checkpoint(path)
    return gone


def is_only_copy(one: LibraryFile, others: Iterable[LibraryFile]) -> bool:
    """Whether its text would be lost with it: a file that it came from is not there, and no other segment has it.

    Also where that cannot be known, because the segment cannot be read now.
    """
    try:
        info = peek(one.path)
    except SegmentError:
        return one.path.exists()
    if _is_sent(info):
        return False
    files = names.files_of(info.source)
    if files and all(map(os.path.isfile, files)):
        return False
    return not any(_text(other) == info.text for other in others if other.name == one.name and other != one)


def select_files(
    there: Sequence[LibraryFile], outdated: Sequence[LibraryFile], older_than: float | None, most: int | None
) -> tuple[list[LibraryFile], list[LibraryFile]]:
    """What is to go, the least recently used first, and what stays of it because its text is nowhere else.

    `outdated` ones go in any case; `older_than`: those that were not used for so many seconds; `most`: bytes that may
    be left.
    """
    going = {one.path for one in outdated}
    left = sum(one.nbytes for one in there if one.path not in going)
    alone: list[LibraryFile] = []
    for one in there:
        old = older_than is not None and one.idle > older_than
        if one.path in going or not (old or (most is not None and left > most)):
            continue
        if is_only_copy(one, [other for other in there if other.path not in going]):
            alone.append(one)
            continue
        going.add(one.path)
        left -= one.nbytes
    return [one for one in there if one.path in going], alone


def remove_files(wanted: Iterable[LibraryFile], folder: Path, outdated: Collection[LibraryFile] = ()) -> Tidied:
    """Remove these as they were seen, but none that is in use. A text that is nowhere else goes only with `outdated`
    ones."""
    return _remove(wanted, folder, None, outdated)


def shrink(folder: Path, most: int, *, new: Path | None = None) -> Tidied:
    """Remove the least recently used files until all take no more than `most` bytes; never `new`, whose lock the caller
    holds. If that one alone takes more, it is the others that may take so much: they need not all go for it."""
    there = library_files(folder)
    large = sum(one.nbytes for one in there if one.path == new)
    most = most + large if large > most else most
    if sum(one.nbytes for one in there) <= most:
        return Tidied([], [], sum(one.nbytes for one in there))
    return _remove(sorted((one for one in there if one.path != new), key=lambda one: not _sent(one)), folder, most)


def _remove(
    wanted: Iterable[LibraryFile], folder: Path, most: int | None, outdated: Collection[LibraryFile] = ()
) -> Tidied:
    """Remove these, with `most` until no more bytes than that are left. One process at a time does, so that two of them
    do not both make the room that one needs. One that cannot be removed does not keep the others."""
    try:
        with locked(folder / LOCKS / "tidy.lock", wait=_PATIENCE):
            left = {one.path: one for one in library_files(folder)}
            total = sum(one.nbytes for one in left.values())
            removed, spared = [], []
            failed: UnwritableError | None = None
            for one in wanted:
                if most is not None and total <= most:
                    break
                if one.path not in left:  # another process has removed it
                    continue
                try:
                    why = _spared(one, left, one in outdated)
                except UnwritableError as error:
                    failed, why = failed or error, error.what
                if why is not None:
                    spared.append((one, why))
                    continue
                removed.append(left.pop(one.path))
                total -= one.nbytes
            if failed and not removed:
                raise failed
            return Tidied(removed, spared, total)
    except HeldError as error:
        raise SegmentError(f"another process tidies the library: {error}", "Try again") from None
    except OSError as error:
        raise UnwritableError(f"cannot write to the library {folder}: {reason(error)}") from error


def _spared(one: LibraryFile, left: Mapping[Path, LibraryFile], outdated: bool) -> str | None:
    """Remove a file, None; or why it stays. Raise UnwritableError if the folder does not let us."""
    if left[one.path] != one:  # since somebody decided that it goes, who may have been asked for minutes
        return "it was used or compiled meanwhile"
    if not outdated and is_only_copy(one, left.values()):
        return "its text is nowhere else"
    return None if remove(one.path) else "it is in use"


def _sent(one: LibraryFile) -> bool:
    """Whether it is an image that a client of a server sent, which is in no file here."""
    if not one.name.startswith(names.SENT):
        return False
    try:
        return _is_sent(peek(one.path))
    except NotesError:
        return False


def _is_sent(info: SegmentInfo) -> bool:
    return not info.source and any(info.name == names.of_sent(media.sha256) for media in info.media)


def _text(one: LibraryFile) -> str | None:
    try:
        return peek(one.path).text
    except NotesError:
        return None

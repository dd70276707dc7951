"""Finds damaged and left files of the library, and evicts the least recently used segments.

A file that a process has open or compiles is never removed, and a text that exists nowhere else only if the caller
names it as outdated. Images that clients of a server sent go first: a client that shows one again sends it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from notes_cli.engine.segment import Segment
from notes_cli.errors import DamagedError, Help, NotesError, Remedy, SegmentError, UnwritableError, reason
from notes_cli.library.container import open_segment, peek
from notes_cli.library.safe_files import HeldError, is_unused, locked, remove_unused
from notes_cli.library.segment_files import (
    CHECKPOINTS,
    LOCKS,
    compile_checkpoints,
    forget_uses,
    lock_of,
    remove_checkpoint,
    segment_files,
    uses_of,
)
from notes_cli.text import names
from notes_cli.text.names import human_age, human_size

OLD = 30 * 86400.0  # seconds after which a checkpoint counts as abandoned


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with a file, and what to do about it."""

    path: Path
    what: str
    remedy: Remedy | None = None


def check_files(folder: Path, on_checked: Callable[[int], object] = lambda size: None) -> Iterator[Finding]:
    """Yield the problems of a library, reading every byte of each segment; `on_checked` gets the bytes of each. Raises
    NotesError if another user may have made the folder, or it cannot be read."""
    for name, path in segment_files(folder):
        with suppress(OSError):
            on_checked(path.stat().st_size)
        if path.exists() and (finding := _check_segment(name, path)):  # else it was removed meanwhile
            yield finding
    for path in sorted([*folder.glob(".*.tmp"), *(folder / CHECKPOINTS).glob(".*.tmp")]):
        with suppress(OSError):  # renamed meanwhile
            if path.is_file() and not path.is_symlink() and is_unused(path):
                yield Finding(path, "a process that was killed left it", Help.REMOVE_FILE(path=path))
    for path in compile_checkpoints(folder):
        with suppress(OSError):  # removed meanwhile
            if time.time() - path.stat().st_mtime > OLD:
                problem = "a compile was interrupted, and was not taken up again"
                yield Finding(path, problem, Help.REMOVE_FILE(path=path))


def _check_segment(name: str, path: Path) -> Finding | None:
    info: Segment | None = None
    try:
        info = peek(path)
        open_segment(path)
    except DamagedError as error:
        return Finding(path, error.what, _compile_again(name, path, info))
    except NotesError as error:
        return Finding(path, error.what, error.remedy)
    if path.name == f"{info.name}.{info.identity.key}.gguf" and info.name == name:
        return None
    what = f"it holds {info.name} for {info.identity.model} {info.identity.quantization}, and is called otherwise"
    return Finding(path, what, Help.TAKE_OVER(path=path))


def _compile_again(name: str, path: Path, info: Segment | None) -> Remedy:
    """Return the command that compiles a damaged segment again: from its source, or from the segment if its head is
    sound."""
    if info is None:
        return Help.COMPILE_TEXT(name=name)
    if info.source not in ("", "-") and os.path.isfile(info.source):
        return Help.COMPILE_FILE(source=info.source, name=name)
    return Help.COMPILE_SEGMENT(path=path)


_PATIENCE = 10.0  # seconds to wait for another process's eviction


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A file of the library, with its size and the time of its last use (or of its compile, if never used)."""

    name: str
    path: Path
    nbytes: int
    uses: int
    last: float  # seconds of the system's clock

    @property
    def idle(self) -> float:
        """Seconds since the last use."""
        return max(0.0, time.time() - self.last)

    def __str__(self) -> str:
        ago = f"{human_age(self.idle)} ago"
        when = f"last used {ago}" if self.uses else f"compiled {ago}, never used"
        return f"{self.name} ({human_size(self.nbytes)}, {when})"


@dataclass(frozen=True, slots=True)
class Tidied:
    """Result of an eviction: removed files, spared ones with the reason, and the bytes of all that are left."""

    removed: Sequence[LibraryFile]
    spared: Sequence[tuple[LibraryFile, str]]
    nbytes: int


def library_files(folder: Path) -> list[LibraryFile]:
    """List the files of the library, the least recently used first, without opening them. Raises NotesError."""
    files = []
    for name, path in segment_files(folder):
        try:
            stat = path.stat()
        except OSError:  # removed meanwhile, or a dangling link
            continue
        uses = uses_of(path)
        files.append(LibraryFile(name, path, stat.st_size, uses.count, max(stat.st_mtime, uses.last or 0.0)))
    return sorted(files, key=lambda file: (file.last, file.name))


def remove(path: Path) -> bool:
    """Remove a segment file and its record of uses, unless a process uses or compiles it; return True if it is gone.
    Raises UnwritableError."""
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


def is_only_copy(file: LibraryFile, others: Iterable[LibraryFile]) -> bool:
    """Return True if the file's text would be lost with it, as its source is gone and no other segment has it; also if
    the file cannot be read now."""
    try:
        info = peek(file.path)
    except SegmentError:
        return file.path.exists()
    if _is_sent(info):
        return False
    sources = names.files_of(info.source)
    if sources and all(map(os.path.isfile, sources)):
        return False
    return not any(_text(other) == info.text for other in others if other.name == file.name and other != file)


def select_files(
    files: Sequence[LibraryFile], outdated: Sequence[LibraryFile], older_than: float | None, most: int | None
) -> tuple[list[LibraryFile], list[LibraryFile]]:
    """Return the files to remove, the least recently used first, and those spared as the only copy of their text.

    `outdated` files are removed in any case, then files idle for more than `older_than` seconds, and others until
    `most` bytes are left.
    """
    removed = {file.path for file in outdated}
    left = sum(file.nbytes for file in files if file.path not in removed)
    spared: list[LibraryFile] = []
    for file in files:
        old = older_than is not None and file.idle > older_than
        if file.path in removed or not (old or (most is not None and left > most)):
            continue
        if is_only_copy(file, [other for other in files if other.path not in removed]):
            spared.append(file)
            continue
        removed.add(file.path)
        left -= file.nbytes
    return [file for file in files if file.path in removed], spared


def shrink(folder: Path, most: int, *, new: Path | None = None) -> Tidied:
    """Remove the least recently used files until all take no more than `most` bytes, but never `new`, whose lock the
    caller holds. If `new` alone takes more, the limit applies to the others, so that they are not all removed for
    it."""
    files = library_files(folder)
    large = sum(file.nbytes for file in files if file.path == new)
    most = most + large if large > most else most
    if sum(file.nbytes for file in files) <= most:
        return Tidied([], [], sum(file.nbytes for file in files))
    candidates = sorted((file for file in files if file.path != new), key=lambda file: not _is_sent_image(file))
    return remove_files(candidates, folder, most=most)


def remove_files(
    files: Iterable[LibraryFile], folder: Path, outdated: Collection[LibraryFile] = (), most: int | None = None
) -> Tidied:
    """Remove unchanged, unused files, skipping those that cannot be removed, until `most` bytes are left if given; the
    only copy of a text only if `outdated`. One process at a time, so that two of them do not remove twice as much."""
    try:
        with locked(folder / LOCKS / "tidy.lock", wait=_PATIENCE):
            left = {file.path: file for file in library_files(folder)}
            total = sum(file.nbytes for file in left.values())
            removed, spared = [], []
            failed: UnwritableError | None = None
            for file in files:
                if most is not None and total <= most:
                    break
                if file.path not in left:  # another process has removed it
                    continue
                try:
                    why = _remove_or_spare(file, left, file in outdated)
                except UnwritableError as error:
                    failed, why = failed or error, error.what
                if why is not None:
                    spared.append((file, why))
                    continue
                removed.append(left.pop(file.path))
                total -= file.nbytes
            if failed and not removed:
                raise failed
            return Tidied(removed, spared, total)
    except HeldError as error:
        raise SegmentError(f"another process tidies the library: {error}", "Try again") from None
    except OSError as error:
        raise UnwritableError(f"cannot write to the library {folder}: {reason(error)}") from error


def _remove_or_spare(file: LibraryFile, left: Mapping[Path, LibraryFile], outdated: bool) -> str | None:
    """Remove a file, or return why it is spared. Raises UnwritableError."""
    if left[file.path] != file:  # since it was selected: a prompt for confirmation may have waited for minutes
        return "it was used or compiled meanwhile"
    if not outdated and is_only_copy(file, left.values()):
        return "its text is nowhere else"
    return None if remove(file.path) else "it is in use"


def _is_sent_image(file: LibraryFile) -> bool:
    if not file.name.startswith(names.SENT):
        return False
    try:
        return _is_sent(peek(file.path))
    except NotesError:
        return False


def _is_sent(info: Segment) -> bool:
    return not info.source and any(info.name == names.of_sent(media.sha256) for media in info.media)


def _text(file: LibraryFile) -> str | None:
    try:
        return peek(file.path).text
    except NotesError:
        return None

"""Looks up, locks, exports and removes compiled skills of the library, the files `<name>.<key>.gguf` in one folder.

A skill may be compiled for many models; the key of the identity (model, rotation, K/V type) selects the file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from notes_cli.engine.segment import Identity, Segment
from notes_cli.errors import (
    CompilingError,
    DamagedError,
    Help,
    NotesError,
    Notice,
    Remedy,
    Say,
    SegmentError,
    UnwritableError,
    reason,
)
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.library.safe_files import HeldError, check_private, locked, sweep
from notes_cli.library.segment_files import (
    ERRATA,
    forget_uses,
    lock_of,
    mark_use,
    name_in,
    remove_checkpoint,
    segment_files,
    skill_named,
)
from notes_cli.text import names
from notes_cli.text.names import human_size


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment file of the library: its info, or why it cannot be read."""

    name: str
    path: Path
    info: Segment | None
    problem: NotesError | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Resolved word of a user: a name of the library, a segment file, or a text to compile."""

    kind: Literal["name", "segment", "text"]
    name: str  # as the user typed it
    path: Path | None  # None for a name, whose file depends on the identity


class Store(Protocol):
    """Storage of compiled skills for a workspace: a library, or a replacement.

    Segments are read and written as local files, which a store may fetch and upload. Every method may raise NotesError.
    """

    def resolve(self, word: str) -> Target:
        """Resolve a user's word."""

    def entries(self, name: str | None = None) -> list[SegmentFile]:
        """List all segments, or those of one name."""

    def path(self, name: str, identity: Identity) -> Path:
        """Return the file of that name for that identity, also if it does not exist."""

    def find(self, name: str, identity: Identity, remedy: Callable[[], Remedy] | None = None) -> Path:
        """Return the existing file. Raises SegmentError, with the differences of the nearest file, and what
        `remedy` makes."""

    def compiling(
        self, name: str, identity: Identity, wait: float = -1, say: Say | None = None
    ) -> AbstractContextManager[Path]:
        """Lock that file for a compile, yield its path, and store the file at the end of the block. `wait`: seconds to
        wait for another process, negative: for ever. `say` gets notices of a long wait and of removed files."""

    def used(self, path: Path, spliced: int = 0, saved: float | None = None) -> None:
        """Record a use of a segment file, of the store or not: `spliced` tokens, and `saved` seconds of prefill (None:
        not known)."""


class Library:
    """The compiled skills of one user: a Store in a folder that is created with the first compile."""

    def __init__(self, folder: Path, max_size: int | None = None, samples: Callable[[], Sequence[str]] = tuple) -> None:
        """`max_size`: limit of all files after a compile, in bytes. `samples`: names of texts that could be compiled,
        for messages."""
        self.folder = folder
        self.max_size = max_size
        self._samples = samples

    def path(self, name: str, identity: Identity) -> Path:
        """Return the path of a segment, also if it does not exist. Raises SegmentError for an invalid name, NotesError
        if another user may have made the folder or the file (safe_files.py)."""
        if not names.is_name(name):
            raise SegmentError(f"{name!r} cannot be the name of a skill", f"Use {names.RULE}")
        check_private(self.folder)
        return self.folder / f"{name}.{identity.key}.gguf"

    def names(self) -> list[str]:
        """Return the names of all compiled skills."""
        return sorted({name for name, _ in segment_files(self.folder)})

    def entries(self, name: str | None = None) -> list[SegmentFile]:
        """List the files of the library, or of one name, by name; an unreadable one with its problem."""
        return [_entry(known, path) for known, path in segment_files(self.folder) if name in (None, known)]

    def find(self, name: str, identity: Identity, remedy: Callable[[], Remedy] | None = None) -> Path:
        """Return the file of that name for that identity. Raises SegmentError, with the differences of the nearest
        file, and what `remedy` makes."""
        path = self.path(name, identity)
        if path.is_file():
            return path
        entries = self.entries(name)
        if not entries:
            raise self.unknown(name, files=False)
        infos = [entry.info for entry in entries if entry.info is not None]
        candidates = [info.identity.differences(identity) for info in infos]
        nearest = min((differences for differences in candidates if differences), key=len, default=None)
        if nearest is None:
            raise entries[0].problem or SegmentError(f"{entries[0].path} was renamed", remedy and remedy())
        raise SegmentError(f"{name} was {'; '.join(nearest)}", remedy and remedy())

    def latest(self, word: str) -> Segment:
        """Return the metadata of a segment file, or of the newest file of a name. Raises NotesError if it is neither,
        or cannot be read."""
        target = self.resolve(word)
        if target.kind == "text" or target.path is not None:
            return peek(Path(word).expanduser())
        return self.newest(target.name)

    def newest(self, name: str) -> Segment:
        """Return the metadata of the newest file of a name. Raises NotesError if there is none that can be read."""
        entries = self.entries(name)
        infos = [entry.info for entry in entries if entry.info is not None]
        if not infos:
            raise next((entry.problem for entry in entries if entry.problem), self.unknown(name, files=False))
        return max(infos, key=lambda info: info.created)

    def remove(self, name: str, identity: Identity | None = None) -> list[Path]:
        """Delete the files of that name, all or the one for the identity; return them. Raises SegmentError without
        any."""
        target = None if identity is None else self.path(name, identity)
        files = [path for known, path in segment_files(self.folder) if known == name and target in (None, path)]
        if not files:
            raise self.unknown(name, files=False)
        for path in files:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise SegmentError(f"cannot remove {path}: {reason(error)}") from error
            forget_uses(path)
            remove_checkpoint(path)
        return files

    def resolve(self, word: str) -> Target:
        """Resolve a user's word: a name of the library first; `./name` is always a file or folder. Raises SegmentError,
        with similar names, for an unknown word."""
        if word == "-":
            return Target("text", word, Path("-"))
        name = skill_named(word, self.names())
        if name is not None:
            return Target("name", name, None)
        path = Path(word).expanduser()
        if path.is_dir() or path.is_fifo():  # peeking at a pipe would consume it
            return Target("text", word, path)
        try:
            with path.open("rb") as file:
                start = file.read(4)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            raise self.unknown(word) from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise self.unknown(word) from None
            raise SegmentError(f"cannot read {word}: {reason(error)}") from error
        return Target("segment" if start == b"GGUF" else "text", word, path)

    @contextmanager
    def compiling(self, name: str, identity: Identity, wait: float = -1, say: Say | None = None) -> Iterator[Path]:
        """Hold the lock of a segment file while it is compiled; yield its path.

        `wait`: seconds to wait for another process, negative: for ever; `say` gets a notice of a long wait. Afterwards
        the least recently used files are removed until all fit into `max_size`, with a notice; without `say` none is.

        Raises CompilingError if the wait was in vain, SegmentError if the name is too similar to another one,
        UnwritableError if the folder cannot be written to.
        """
        path = self.path(name, identity)

        def on_wait(holder: str) -> None:
            if say is not None:
                say(Notice(f"waiting for {holder}, which compiles {name}", Help.END_WAIT()))

        with ExitStack() as stack:
            try:
                stack.enter_context(locked(lock_of(path), wait, on_wait))
            except HeldError as error:
                message = f"another process is compiling {name}"
                raise CompilingError(message, f"Wait for it, or end it: {error}") from None
            except OSError as error:
                raise UnwritableError(f"cannot write to the library {self.folder}: {reason(error)}") from error
            known = self.names()
            objection = None if name in known else names.objection(name, known)
            if objection:
                raise SegmentError(objection, Help.OTHER_NAME())
            sweep(path)
            # A user who replaces a segment (--force) declares the new text to be the same skill.
            same = (self.folder / ERRATA).exists() and _entry(name, path).info is not None
            yield path
            self._end_errata(name, path, same, say)
            if say is not None:  # no file is removed without a notice
                self._make_room(path, say)

    def used(self, path: Path, spliced: int = 0, saved: float | None = None) -> None:
        """Record a use of a segment of this folder, if the record can be written; ignore other files."""
        if path.parent == self.folder:
            mark_use(path, spliced, saved)

    def _end_errata(self, name: str, path: Path, same: bool, say: Say | None) -> None:
        """End the global errata that no longer match a compiled skill. `same`: it replaced a segment of the skill."""
        info = _entry(name, path).info if (self.folder / ERRATA).exists() else None
        if info is None:
            return
        from notes_cli.library.global_errata import GlobalErrata, marks_of

        fields = {span.name: span.value for span in info.fields}
        marks = marks_of(info.source, info.text)
        for erratum in GlobalErrata(self.folder).compiled(info.name, fields, marks, same=same):
            if say is not None:
                text = f"{erratum.skill}.{erratum.field}={erratum.value}"
                say(Notice(f"the correction {text} for all sessions ends: the text that it corrected has changed"))

    def _make_room(self, new: Path, say: Say) -> None:
        """Remove files until all fit into `max_size`, with a notice, but never the new one."""
        if self.max_size is None:
            return
        from notes_cli.library import check

        most = human_size(self.max_size)
        try:
            done = check.shrink(self.folder, self.max_size, new=new)
        except NotesError as error:
            say(Notice(f"the library was not kept within {most}: {error.what}", error.remedy))
            return
        if done.removed:
            say(Notice(f"removed {', '.join(map(str, done.removed))} to keep the library within {most}"))
        if done.nbytes > self.max_size:
            why = "; ".join(dict.fromkeys(f"{file.name}: {why}" for file, why in done.spared))
            more = f" ({why})" if why else ""
            say(Notice(f"the library takes {human_size(done.nbytes)}, more than the {most} it may{more}"))

    def unknown(self, word: str, *, files: bool = True) -> SegmentError:
        """Return the error for an unknown word, with similar names. `files`: a file was possible, too."""
        from difflib import get_close_matches

        known, none = self.names(), f"no compiled skill{' and no file' if files else ''} {word!r}"
        if "," in word and all(name.strip() in known for name in word.split(",")):
            return SegmentError(none, "Name each skill on its own")
        near = get_close_matches(word, known, n=3)
        samples = [] if near else get_close_matches(word, self._samples(), n=1)
        if samples and samples != [word]:
            return SegmentError(f"{none}. Did you mean {samples[0]}?", Help.COMPILE_NAMED(name=samples[0]))
        hint = f". Did you mean {' or '.join(near)}?" if near else ""
        if not near and (os.sep in word or Path(word).suffix):  # no text to compile
            return SegmentError(f"no such file, and no compiled skill: {word}", Help.LIST_SKILLS())
        remedy = Help.LIST_SKILLS() if near else Help.COMPILE_NAMED(name=word)
        return SegmentError(f"{none}{hint}", remedy)


def has_source(info: Segment, source: str) -> bool:
    """Return True if the segment's text came from this source: the same path, or another path of the same file. False
    for standard input and unknown sources."""
    if info.source in ("", "-"):
        return False
    try:
        return info.source == source or (source != "-" and os.path.samefile(info.source, source))
    except (OSError, ValueError):
        return False


def modified_ns(source: str) -> int:
    """Return the last time that one of a source's files was written, in nanoseconds; 0 if one is missing."""
    try:
        return max(max(file.st_mtime_ns, file.st_ctime_ns) for file in map(os.stat, names.files_of(source)))
    except (OSError, ValueError):  # ValueError: the source is no file
        return 0


def is_unmodified(source: str, stamp: Sequence[int], path: Path) -> bool:
    """Return True if a source's files have the size and times of the stamp, which was taken when they were read for the
    segment `path`; also if one is missing. Comparing with the segment's own time would not do: a link may name an older
    file now, and a compile takes a while; it is used where the stamp is unreliable."""
    try:
        files = [os.stat(name) for name in names.files_of(source)]
        if stamp and tuple(stamp[:3]) != (files[-1].st_size, files[-1].st_mtime_ns, files[-1].st_ctime_ns):
            return False
        return len(stamp) == 3 or modified_ns(source) <= path.stat().st_mtime_ns
    except (OSError, ValueError, IndexError):
        return True


def source_text(source: str) -> str:
    """Return a source as text for messages."""
    known = {"": "an unknown place (it was imported)", "-": "standard input"}
    return known.get(source, " and ".join(source.split(names.BETWEEN)))


def check_name(segment: Segment, path: Path, name: str) -> None:
    """Raise SegmentError for a file of the library with another skill's name."""
    if segment.name != name:
        raise SegmentError(f"{path} holds {segment.name}, and is not {name}", Help.REMOVE_FILE(path=path))


def _entry(name: str, path: Path) -> SegmentFile:
    try:
        info = peek(path)
        check_name(info, path, name)
        return SegmentFile(name, path, info)
    except NotesError as error:
        return SegmentFile(name, path, None, error)


READ = stat.S_IRGRP | stat.S_IROTH


def export(path: Path, target: Path, *, force: bool = False, shared: bool = False) -> bool:
    """Check a segment and write it to a file; return False if the file is this segment already.

    Its source, the cost of compiling and the backend are left out. `shared`: users who can read the folder can read the
    file. Raises SegmentError for another existing file unless `force`.
    """
    segment, info = open_segment(path), peek(path)
    if target.exists() and not force:
        if target.is_file():
            with suppress(DamagedError):
                old = open_segment(target)
                same = (old.text, old.identity) == (info.text, info.identity)
                if same and peek(target).created == info.created:
                    return False
        raise SegmentError(f"{target} is there already, and is another file", Help.OTHER_FILE_OR_FORCE())
    bare = replace(segment, source="", stamp=(), prefill=None, backend="")
    write_segment(target, bare, writer=info.writer, created=info.created)
    if shared:
        try:
            target.chmod(0o600 | (stat.S_IMODE(target.parent.stat().st_mode) & READ))
        except OSError as error:
            raise UnwritableError(f"cannot let others read {target}: {reason(error)}") from error
    return True


def shared_segments(folder: Path) -> dict[str, list[Path]]:
    """Return the segment files of another user's folder, by skill. Raises SegmentError."""
    paths: dict[str, list[Path]] = {}
    try:
        for path in sorted(folder.iterdir()):
            name = name_in(path)
            if name:
                paths.setdefault(name, []).append(path)
    except OSError as error:
        raise SegmentError(f"cannot read {folder}: {reason(error)}") from error
    return paths

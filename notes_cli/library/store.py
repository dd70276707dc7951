"""The library: names of compiled skills and their files, `<name>.<key of the identity>.gguf` in one folder.

One skill may be compiled for many models; which file fits is decided by identity. Skills leave it by `export`, and are
found in others' folders by `shared_segments`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from notes_cli.engine.identity import Identity
from notes_cli.engine.segment import Segment, Tokens
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
from notes_cli.library.container import SegmentInfo, open_segment, peek, write_segment
from notes_cli.library.safe_files import HeldError, check_private, check_private_file, locked, sweep
from notes_cli.library.segment_files import ERRATA, forget_uses, mark_use, name_in, segment_files, skill_named
from notes_cli.text import names
from notes_cli.text.sizes import human_size


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment file of the library: its info, or why it cannot be read."""

    name: str
    path: Path
    info: SegmentInfo | None
    problem: NotesError | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What a user's word means: a name of the library, a segment file, or a text yet to be compiled."""

    kind: Literal["name", "segment", "text"]
    name: str  # as the user gave it
    path: Path | None  # none for a name: only an identity decides the file


class Store(Protocol):
    """Where a workspace finds compiled skills, and keeps them: a library, or what takes its place.

    Segments are read and written as local files; where these come from and go to is up to the store. Every method may
    raise NotesError.
    """

    def resolve(self, word: str) -> Target:
        """What a user's word means."""

    def entries(self, name: str | None = None) -> list[SegmentFile]:
        """What is known of all segments, or of those of one name."""

    def path(self, name: str, identity: Identity) -> Path:
        """The file of that name for that identity, whether it exists or not."""

    def find(self, name: str, identity: Identity, remedy: Remedy | None = None) -> Path:
        """The same, if it exists. Raise SegmentError that says what differs, with `remedy`."""

    def compiling(
        self, name: str, identity: Identity, wait: float = -1, say: Say | None = None
    ) -> AbstractContextManager[Path]:
        """Lock that file, yield its path, and keep what it holds when the block is left. `wait`: seconds for another
        process, negative for ever; `say` is told when that takes a while, and of what had to make room."""

    def used(self, path: Path, spliced: int = 0, saved: float | None = None) -> None:
        """A segment that was handed out, or any other file, is being used: so many tokens of it are spliced, and so
        many seconds of prefill saved; None: it is not known how many."""


class Library:
    """The compiled skills of one user, a Store in a folder, which appears with the first compile."""

    def __init__(self, folder: Path, max_size: int | None = None, samples: Callable[[], Sequence[str]] = tuple) -> None:
        """`max_size`: bytes that all files may take after a compile; None: any number. `samples`: the names of texts
        that could be compiled, for messages."""
        self.folder = folder
        self.max_size = max_size
        self._samples = samples

    def path(self, name: str, identity: Identity) -> Path:
        """Where the segment of that name for that identity belongs, whether it exists or not.

        Raise SegmentError for what cannot be a name, NotesError if another user may have made the folder or the file
        (safe_files.py).
        """
        if not names.is_name(name):
            raise SegmentError(f"{name!r} cannot be the name of a skill", f"Use {names.RULE}")
        check_private(self.folder)
        path = self.folder / f"{name}.{identity.key}.gguf"
        check_private_file(path)
        return path

    def names(self) -> list[str]:
        """Names of all compiled skills."""
        return sorted({name for name, _ in self._files()})

    def entries(self, name: str | None = None) -> list[SegmentFile]:
        """Every file of the library (of one name), by name. A file that cannot be read is listed with its problem."""
        return [_entry(found, path) for found, path in self._files() if name in (None, found)]

    def find(self, name: str, identity: Identity, remedy: Remedy | None = None) -> Path:
        """The file of that name for that identity. Raise SegmentError that says what differs, with `remedy`."""
        path = self.path(name, identity)
        if path.is_file():
            return path
        others = self.entries(name)
        if not others:
            raise self.unknown(name, files=False)
        infos = [entry.info for entry in others if entry.info is not None]
        # The nearest file first: the one with the fewest differences.
        found = [info.identity.differences(identity) for info in infos]
        nearest = min((differences for differences in found if differences), key=len, default=None)
        if nearest is None:
            raise others[0].problem or SegmentError(f"{others[0].path} was renamed", remedy)
        raise SegmentError(f"{name} was {'; '.join(nearest)}", remedy)

    def latest(self, word: str) -> SegmentInfo:
        """What a user's word means, a name (then of its files the one compiled last) or a segment file.

        Raise NotesError if it is neither, or cannot be read.
        """
        target = self.resolve(word)
        if target.kind == "text" or target.path is not None:
            return peek(Path(word).expanduser())
        entries = self.entries(target.name)
        infos = [entry.info for entry in entries if entry.info is not None]
        if not infos:
            raise entries[0].problem or self.unknown(word)
        return max(infos, key=lambda info: info.created)

    def remove(self, name: str, identity: Identity | None = None) -> list[Path]:
        """Delete the files of that name, all or the one for the identity; return them.

        Raise SegmentError if there are none.
        """
        from notes_cli.library.checkpoints import remove_checkpoint

        wanted = None if identity is None else self.path(name, identity)
        files = [path for found, path in self._files() if found == name and wanted in (None, path)]
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
        """What `word` means: a name of the library first; `./name` is always a file or folder.

        Raise SegmentError, naming what is near, if it is nothing.
        """
        if word == "-":
            return Target("text", word, Path("-"))
        name = skill_named(word, self.names())
        if name is not None:
            return Target("name", name, None)
        path = Path(word).expanduser()
        if path.is_dir() or path.is_fifo():  # what is read of a pipe to see what it holds would be gone
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
        """Hold the lock of one segment file while it is compiled; yield its path.

        `wait` is how long to wait for another process, in seconds; negative is for ever. `say` is told when that takes
        a while. Afterwards what was not used for longest goes until all is within `max_size`, which `say` is told:
        without it nothing goes.

        Raise SegmentError after that, or if the name is too like another one; UnwritableError if the folder cannot be
        written to.
        """
        from notes_cli.library import tidy

        path = self.path(name, identity)

        def told(holder: str) -> None:
            if say is not None:
                say(Notice(f"waiting for {holder}, which compiles {name}", Help.INTERRUPT()))

        with ExitStack() as held:
            try:
                held.enter_context(locked(tidy.lock_of(path), wait, told))
            except HeldError as error:
                what = f"another process is compiling {name}"
                raise CompilingError(what, f"Wait for it, or end it: {error}") from None
            except OSError as error:
                raise UnwritableError(f"cannot write to the library {self.folder}: {reason(error)}") from error
            known = self.names()
            objection = None if name in known else names.objection(name, known)
            if objection:
                raise SegmentError(objection, Help.OTHER_NAME())
            sweep(path)
            # Whoever puts another text in the place of one (--force) says that it is this skill.
            same = (self.folder / ERRATA).exists() and _entry(name, path).info is not None
            yield path
            self._end_errata(name, path, same, say)
            if say is not None:  # nothing goes that nobody is told of
                self._make_room(path, say)

    def used(self, path: Path, spliced: int = 0, saved: float | None = None) -> None:
        """Remember that a segment of this folder is used, if that can be written; other files are nobody's concern."""
        if path.parent == self.folder:
            mark_use(path, spliced, saved)

    def _end_errata(self, name: str, path: Path, same: bool, say: Say | None) -> None:
        """What everybody is told of a skill ends with a compile of another text of its name, or of another value.
        `same`: the text has taken the place of one that the skill had."""
        info = _entry(name, path).info if (self.folder / ERRATA).exists() else None
        if info is None:
            return
        from notes_cli.library.global_errata import GlobalErrata, marks_of

        fields = {span.name: span.value for span in info.fields}
        marks = marks_of(info.source, info.text)
        for one in GlobalErrata(self.folder).compiled(info.name, fields, marks, same=same):
            if say is not None:
                said = f"{one.skill}.{one.field}={one.value}"
                say(Notice(f"the correction {said} for all sessions ends: the text that it corrected has changed"))

    def _make_room(self, new: Path, say: Say) -> None:
        """Keep within `max_size`, and say what went. What was compiled is kept whatever happens here."""
        if self.max_size is None:
            return
        from notes_cli.library import tidy

        most = human_size(self.max_size)
        try:
            done = tidy.shrink(self.folder, self.max_size, new=new)
        except NotesError as error:
            say(Notice(f"the library was not kept within {most}: {error.what}", error.remedy))
            return
        if done.removed:
            say(Notice(f"removed {', '.join(map(str, done.removed))} to keep the library within {most}"))
        if done.nbytes > self.max_size:
            why = "; ".join(dict.fromkeys(f"{one.name}: {why}" for one, why in done.spared))
            more = f" ({why})" if why else ""
            say(Notice(f"the library takes {human_size(done.nbytes)}, more than the {most} it may{more}"))

    def _files(self) -> list[tuple[str, Path]]:
        """Name and path of each file, by the file's name."""
        return segment_files(self.folder)

    def unknown(self, word: str, *, files: bool = True) -> SegmentError:
        """What to raise for a word that is nothing, with names that are near. `files`: it might have been one."""
        from difflib import get_close_matches

        known, none = self.names(), f"no compiled skill{' and no file' if files else ''} {word!r}"
        if "," in word and all(one.strip() in known for one in word.split(",")):
            return SegmentError(none, "Name each skill on its own")
        near = get_close_matches(word, known, n=3)
        samples = [] if near else get_close_matches(word, self._samples(), n=1)
        if samples and samples != [word]:
            return SegmentError(f"{none}. Did you mean {samples[0]}?", Help.COMPILE_NAMED(name=samples[0]))
        hint = f". Did you mean {' or '.join(near)}?" if near else ""
        if not near and (os.sep in word or Path(word).suffix):  # there is nothing that could be compiled
            return SegmentError(f"no such file, and no compiled skill: {word}", Help.LIST_SKILLS())
        remedy = Help.LIST_SKILLS() if near else Help.COMPILE_NAMED(name=word)
        return SegmentError(f"{none}{hint}", remedy)


def has_source(info: SegmentInfo, source: str) -> bool:
    """Whether the segment's text came from this source: the same path, or another one of the same file. False for
    standard input, and for segments that do not say."""
    if info.source in ("", "-"):
        return False
    try:
        return info.source == source or (source != "-" and os.path.samefile(info.source, source))
    except (OSError, ValueError):
        return False


def modified_ns(source: str) -> int:
    """When one of the files that a text came from was written last, in nanoseconds; 0 where one of them is gone."""
    try:
        return max(max(one.st_mtime_ns, one.st_ctime_ns) for one in map(os.stat, names.files_of(source)))
    except (OSError, ValueError):  # or there is none
        return 0


def is_unmodified(source: str, stamp: Sequence[int], path: Path) -> bool:
    """Whether the files that a text came from have the size and times that they had when it was read to be compiled
    into `path`, as far as its stamp is sure of them; also where one is gone. What is newer is no measure of it: a link
    may name an older file now, and a compile takes a while."""
    try:
        found = [os.stat(one) for one in names.files_of(source)]
        if stamp and tuple(stamp[:3]) != (found[-1].st_size, found[-1].st_mtime_ns, found[-1].st_ctime_ns):
            return False
        return len(stamp) == 3 or modified_ns(source) <= path.stat().st_mtime_ns
    except (OSError, ValueError, IndexError):
        return True


def source_text(source: str) -> str:
    """A source for people."""
    known = {"": "an unknown place (it was imported)", "-": "standard input"}
    return known.get(source, " and ".join(source.split(names.BETWEEN)))


def check_name(held: SegmentInfo | Segment, path: Path, name: str) -> None:
    """Raise SegmentError for a file of the library that was put there under another skill's name."""
    if held.name != name:
        raise SegmentError(f"{path} holds {held.name}, and is not {name}", Help.REMOVE_FILE(path=path))


def _entry(name: str, path: Path) -> SegmentFile:
    try:
        check_private_file(path)
        info = peek(path)
        check_name(info, path, name)
        return SegmentFile(name, path, info)
    except NotesError as error:
        return SegmentFile(name, path, None, error)


def changes(
    info: SegmentInfo,
    *,
    text: str,
    tokens: Tokens | Sequence[int],
    description: str,
    fields: Sequence[tuple[str, str, int, int]],
    identity: Identity,
    context: Tokens | Sequence[int],
    prefix_only: bool,
    influence: bool = False,
    blocks: tuple[int, ...] | None = None,
    kv: str | None = None,
) -> list[str]:
    """What has changed since the segment was compiled, in words; empty if it is up to date.

    `tokens` are those of `text`, `fields` (name, value, start, end) of each occurrence (as Skill.fields), `context`
    the tokens that would precede it now, `pinned` whether their rows would be kept, too, `influence` whether that of
    the fields is wanted, `blocks` where they would begin, `kv` what its rows would be kept as; None if any will do.
    """
    found = list(info.identity.differences(identity))
    if info.text != text:
        found.append("the text has changed")
    elif [(span.name, span.value, span.start, span.end) for span in info.fields] != list(fields):
        found.append("the fields have changed")
    if info.text == text and not np.array_equal(info.tokens, np.asarray(tokens, np.int32)):
        found.append("its text gives different tokens now")
    if info.description != description:
        found.append("the description has changed")
    if not np.array_equal(info.context, np.asarray(context, np.int32)):
        found.append("it was compiled after a different left context")
    if info.prefix_only != prefix_only:
        found.append("its rows can be moved now" if info.prefix_only else "its rows cannot be moved any more")
    if blocks is not None and info.blocks != blocks and info.text == text:
        found.append(f"it was compiled in {len(info.blocks)} blocks" if info.blocks else "it was compiled in one block")
    if kv not in (None, info.kv):
        found.append(f"its rows are kept as {info.kv}, not as {kv}")
    if influence and info.fields and not info.influence:
        found.append("the influence of its fields has not been measured")
    return found


READ = stat.S_IRGRP | stat.S_IROTH


def export(path: Path, target: Path, *, force: bool = False, shared: bool = False) -> bool:
    """Write a segment to a file, every byte checked on the way; whether that was needed: not if it is there already.

    Where its text came from is left out, how long this machine took, and how it rounds. `shared`: who can read the
    folder can read the file. Raise SegmentError if there is another file, unless `force` says to write over it.
    """
    segment, info = open_segment(path), peek(path)
    if target.exists() and not force:
        if target.is_file() and _same(info, target):
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
    """The segment files in a folder that others share, by the name of their skill. Raise SegmentError."""
    found: dict[str, list[Path]] = {}
    try:
        for path in sorted(folder.iterdir()):
            name = name_in(path)
            if name:
                found.setdefault(name, []).append(path)
    except OSError as error:
        raise SegmentError(f"cannot read {folder}: {reason(error)}") from error
    return found


def _same(info: SegmentInfo, target: Path) -> bool:
    """Whether the file there is that segment, exported before."""
    try:
        there = open_segment(target)
        return (there.text, there.identity) == (info.text, info.identity) and peek(target).created == info.created
    except DamagedError:
        return False

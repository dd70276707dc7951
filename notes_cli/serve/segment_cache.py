"""Open segments by name, shared by all requests, and matching of texts in messages against compiled ones.

Texts are looked up in what the files say of themselves, so only what is placed is open. A skill that is compiled again
is another segment from then on; whoever has the old one keeps it, and its file.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from notes_cli import output
from notes_cli.engine.segment import Segment
from notes_cli.errors import (
    CompilingError,
    Help,
    NotesError,
    SegmentError,
    TakenError,
    UnsupportedError,
    UnwritableError,
)
from notes_cli.images import Picture
from notes_cli.library.container import peek
from notes_cli.library.info import SegmentInfo
from notes_cli.library.store import modified_ns
from notes_cli.runtime.compile import compile_skill, plan
from notes_cli.runtime.open_skills import warn_edited
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.workspace import Workspace
from notes_cli.text import names
from notes_cli.text.messages import BETWEEN, Part, SkillPart, TextPart
from notes_cli.text.skill import image_skill

SHORTEST = 64  # characters of a text without fields that is looked for in messages: others cost less than looking
PAUSE = 0.1  # seconds between two tries to compile what another process compiles
OPEN = 32  # segments that are kept open beside those that somebody has: each takes a file descriptor

Text = Segment | SegmentInfo  # of a skill, open or not
T = TypeVar("T")
_Stamp = tuple[int, int, int]  # of a file: the same for as long as nobody writes another


class Compute(Protocol):
    """Call a function in the thread that has the context, and wait for its result."""

    def __call__(self, function: Callable[[], T]) -> T: ...


class SegmentCache:
    """The library of a workspace, for requests that come by the hundred. Any thread may use it but for `image`, which
    waits for the decode thread."""

    def __init__(self, workspace: Workspace, compute: Compute) -> None:
        self._workspace, self._compute = workspace, compute
        self._lock = threading.RLock()  # of what follows; no segment is opened under it
        self._open: OrderedDict[tuple[Path, _Stamp], Segment] = OrderedDict()  # the one used last is the last
        self._had: WeakValueDictionary[tuple[Path, _Stamp], Segment] = WeakValueDictionary()  # by anybody
        self._infos: dict[Path, tuple[_Stamp, SegmentInfo]] = {}
        self._listed: list[Path] = []  # of skills for this model
        self._folder: object = None  # what the library's folder was like when it was listed
        self._looked: dict[Path, int] = {}  # when the text of a skill had been written last, as it was looked at

    def segment(self, name: str) -> Segment:
        """A compiled skill. Raise SegmentError where there is none, or none for this model."""
        store, workspace = self._workspace.library, self._workspace
        named = called(name)
        if not names.is_name(named):  # a client names skills: what may be a file is not even looked for
            raise SegmentError(f"no compiled skill {name[:80]!r}", Help.LIST_SKILLS())
        path = store.find(named, workspace.identity, workspace.compile_again(named))
        return self._at(path, named)

    def known(self) -> list[SegmentInfo]:
        """What the skills that are compiled for this model say of themselves. None is kept open for that."""
        with self._lock:
            self._list()
            found = []
            for path in self._listed:
                try:
                    stamp = _stamp(path)
                    info = self._infos.get(path)
                    if info is None or info[0] != stamp:
                        info = self._infos[path] = stamp, peek(path)
                    found.append(info[1])
                except (NotesError, OSError):  # damaged, or removed since: an error where a request names it
                    self._infos.pop(path, None)
            return found

    def open(self, info: SegmentInfo) -> Segment | None:
        """The skill that this was said of; None where it cannot be opened, or is another one now."""
        try:
            segment = self._at(info.path, info.name)
        except (NotesError, OSError):
            return None
        return segment if segment.text == info.text and np.array_equal(segment.tokens, info.tokens) else None

    def image(self, picture: Picture, *, private: bool = False, dry: bool = False) -> Segment:
        """A compiled image with these very bytes, whatever it is called; compiled now, and kept, where there is none.
        `private`: it is neither looked for nor kept. `dry`: it is not compiled, and has no rows then. Raise ModelError
        without a projector, ImageError for one that cannot be decoded."""
        workspace = self._workspace
        if not private:
            for info in self.known():
                same = info.pictures and info.text == picture.text and self._projector in (None, info.projector)
                if same and (segment := self.open(info)) is not None:
                    return segment
        name = names.of_sent(picture.sha256)
        skill = image_skill(picture, name)
        if dry:
            return self._compute(lambda: plan(workspace, skill))
        while not private:
            try:
                made = self._compute(lambda: compile_to_library(workspace, skill, say=_say, wait=0))
                return self._at(made.path, name)
            except CompilingError:  # another process compiles it: then it need not be done again
                time.sleep(PAUSE)
            except (UnwritableError, TakenError):
                break
        return self._compute(lambda: compile_skill(workspace, skill))

    @cached_property
    def _projector(self) -> str | None:
        """The digest and settings of the projector, which is loaded for that; None without one."""
        return self._compute(lambda: self._workspace.image_encoding.projector) if self._workspace.has_vision else None

    def _at(self, path: Path, name: str) -> Segment:
        """The skill in a file; whoever places it checks again that it fits."""
        key = path, _stamp(path)
        segment = self._had.get(key)
        if segment is None:
            opened = self._workspace.open(path, name)
            with self._lock:
                segment = self._had.setdefault(key, opened)  # another thread may have opened it meanwhile
        now = modified_ns(segment.source)
        if self._looked.get(path) != now:  # once for each time that it is written
            self._looked[path] = now
            warn_edited(self._workspace, segment, _say)
        with self._lock:
            self._open[key] = segment
            self._open.move_to_end(key)
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
        return segment

    def _list(self) -> None:
        """See what there is, if that may have changed."""
        store, folder = self._workspace.library, getattr(self._workspace.library, "folder", None)
        try:
            now: object = os.stat(folder).st_mtime_ns if folder is not None else None
        except FileNotFoundError:
            now = 0
        if now is not None and now == self._folder:
            return
        try:
            key = self._workspace.identity
        except UnsupportedError:
            self._listed = []
            return
        self._listed = [one.path for one in store.entries() if one.info and one.info.identity == key]
        self._folder = now
        listed = set(self._listed)
        self._infos = {path: one for path, one in self._infos.items() if path in listed}
        self._open = OrderedDict((key, one) for key, one in self._open.items() if key[0] in listed)


def _say(notice: object) -> None:
    output.say(str(notice))


def called(word: str) -> str:
    """The name of the skill that a client's word means, as for commands: what is no name is one in lower case."""
    typed = names.typed(word)
    return typed if names.is_name(typed) else names.typed(word.lower())


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def matched(
    parts: tuple[Part, ...],
    skills: dict[str, Segment],
    known: Sequence[Text],
    open_: Callable[[SegmentInfo], Segment | None],
) -> tuple[Part, ...]:
    """The parts of a message, with texts that are those of known skills as such, each of which `skills` has then, too.

    A text is one if it is a whole part, or whole paragraphs of it: what the model reads is the same text, as often as
    it is there. Of several skills the longest counts, and of those of one name the first, or the one that `skills` has.
    `open_` gives one that is not open yet.
    """
    first: dict[str, Text] = dict(skills)
    for one in known:
        first.setdefault(one.name, one)
    for one in _longest_first(first.values()):
        spliced = _spliced(parts, one.text, one.name)
        if spliced is None:
            continue
        segment = one if isinstance(one, Segment) else open_(one)
        if segment is None:
            continue
        skills[segment.name] = segment
        parts = spliced
    return parts


def read_last(messages: Sequence[tuple[Part, ...]], texts: Sequence[Text]) -> str | None:
    """Which of these texts is in messages last, as `matched` finds them; None if none is."""
    for parts in reversed(messages):
        for one in _longest_first(texts):
            parts = _spliced(parts, one.text, one.text) or parts
        for part in reversed(parts):
            if isinstance(part, SkillPart):
                return part.name
    return None


def _longest_first(texts: Iterable[Text]) -> list[Text]:
    """Those texts that are looked for in messages, in that order."""
    found = [one for one in texts if not (one.tools or one.media) and (len(one.text) >= SHORTEST or one.fields)]
    return sorted(found, key=lambda one: -len(one.text))


def _spliced(parts: tuple[Part, ...], text: str, name: str) -> tuple[Part, ...] | None:
    """The parts with a skill of this name wherever its text is; None where that is nowhere."""
    cut = [_cut(part.text, text) if isinstance(part, TextPart) else [] for part in parts]
    if not any(cut):
        return None
    return tuple(
        found
        for part, pieces in zip(parts, cut, strict=True)
        for found in (_between(pieces, SkillPart(name)) if pieces else [part])
    )


def _between(texts: Sequence[str], skill: SkillPart) -> list[Part]:
    """Texts with a skill between each two, without those that are blank."""
    found: list[Part] = []
    for number, text in enumerate(texts):
        found += [skill] if number else []
        found += [TextPart(text)] if text.strip() else []
    return found


def _cut(text: str, wanted: str) -> list[str]:
    """What is before, between and after the places in which a text is whole paragraphs of another; none where it is not
    in there so. Put together with it and empty lines between, they are the text again."""
    place = text.find(wanted) if wanted == wanted.strip() else -1
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    found, begin = [], 0
    while place >= 0:  # looked at in its place: a text may repeat it thousands of times
        end = place + len(wanted)
        above, below = place - len(BETWEEN), end + len(BETWEEN)
        opens = place <= max(first, begin) or (
            text.endswith(BETWEEN, 0, place) and not text[above - 1 : above].isspace()
        )
        closes = end >= last or (text.startswith(BETWEEN, end) and not text[below : below + 1].isspace())
        if opens and closes:
            found.append(text[begin:place].removesuffix(BETWEEN))
            begin = end if end >= last else below
            place = text.find(wanted, begin)
        else:
            place = text.find(wanted, place + 1)
    return [*found, text[begin:]] if found else []

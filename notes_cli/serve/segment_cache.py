"""Caches open segments by name for all requests, and matches texts in messages against compiled skills.

Texts are matched by the files' metadata, so only segments that are spliced are opened. A skill that is compiled again
is a new segment; requests and conversations that have the old one keep it, with its open file.
"""

from __future__ import annotations

import operator
import os
import re
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from notes_cli import output
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import (
    CompilingError,
    Help,
    NotesError,
    Notice,
    SegmentError,
    TakenError,
    UnsupportedError,
    UnwritableError,
)
from notes_cli.images import Picture
from notes_cli.library.container import peek
from notes_cli.library.store import modified_ns
from notes_cli.runtime.compile import compile_skill, plan
from notes_cli.runtime.open_skills import warn_edited
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.token_runs import TextIndex, Texts
from notes_cli.runtime.workspace import Workspace
from notes_cli.text import names
from notes_cli.text.messages import BETWEEN, Part, SkillPart, TextPart
from notes_cli.text.skill import image_skill, load_skill

SHORTEST = 64  # characters of a text without fields that is matched in messages: shorter ones are not worth it
LOGGED = 256  # near matches: texts in messages that differ from a skill
PAUSE = 0.1  # seconds between attempts while another process compiles the same image
OPEN = 32  # unused segments that are kept open, with a file descriptor each

_BLANKS = re.compile(r"(?<![ \t\r])[ \t\r]+(?=\n|\Z)")  # at the ends of lines
_MARGIN = re.compile(r"^\s*(?:\d+\s*[:|.)\u2192\t])?\s*")  # indentation, and a number as in listings

T = TypeVar("T")
_Stamp = tuple[int, int, int]  # of a file's contents


class Compute(Protocol):
    """Calls a function in the decode thread, and waits for its result."""

    def __call__(self, function: Callable[[], T]) -> T: ...


class SegmentCache:
    """The skills and images of a workspace's library. Any thread may use it; `image` waits for the decode thread."""

    def __init__(self, workspace: Workspace, compute: Compute) -> None:
        self._workspace, self._compute = workspace, compute
        self._lock = threading.RLock()  # guards the attributes below; no segment is opened under it
        self._open: OrderedDict[tuple[Path, _Stamp], Segment] = OrderedDict()  # last: most recently used
        self._in_use: WeakValueDictionary[tuple[Path, _Stamp], Segment] = WeakValueDictionary()
        self._infos: dict[Path, tuple[_Stamp, Segment]] = {}
        self._paths: list[Path] = []  # of skills for this model
        self._index: tuple[list[Segment], TextIndex | None] = [], None  # of the skills whose K/V can be moved
        self._listed_at: object = None  # the library folder's time of change when `_paths` was listed
        self._warned: dict[Path, int] = {}  # time of change of a skill's source when it was last checked for edits
        self._logged: set[str] = set()  # near matches

    def segment(self, name: str) -> Segment:
        """Return a compiled skill. Raises SegmentError for an unknown one, or one of another model."""
        store, workspace = self._workspace.library, self._workspace
        skill = skill_name(name)
        if not names.is_name(skill):  # clients must not probe for files
            raise SegmentError(f"no compiled skill {name[:80]!r}", Help.LIST_SKILLS())
        path = store.find(skill, workspace.identity, partial(workspace.compile_again, skill))
        return self._at(path, skill)

    def compiled(self, word: str) -> str:
        """Return the name of a compiled skill, or of a text, which is compiled now if it is not yet. For the server's
        own options, in the decode thread. Raises NotesError."""
        target = self._workspace.library.resolve(word)
        if target.kind == "name":
            return self.segment(target.name).name
        if target.kind == "segment" or word == "-":
            raise SegmentError(f"{word} is no text and no skill of the library, which a server needs", Help.COMPILE())
        skill = load_skill(word)
        compiled = compile_to_library(self._workspace, skill, say=_say)
        if compiled.reasons:
            output.say(f"compiled {word} as {skill.name} ({compiled.tokens} tokens): {'; '.join(compiled.reasons)}")
        return skill.name

    def known(self) -> list[Segment]:
        """Return the metadata of the skills of this model, without opening segments."""
        with self._lock:
            self._list()
            infos = []
            for path in self._paths:
                try:
                    stamp = _stamp(path)
                    info = self._infos.get(path)
                    if info is None or info[0] != stamp:
                        info = self._infos[path] = stamp, peek(path)
                    infos.append(info[1])
                except (NotesError, OSError):  # damaged or removed: an error only for requests that name it
                    self._infos.pop(path, None)
            return infos

    def open(self, info: Segment) -> Segment | None:
        """Open a known skill; None if it cannot be opened or has changed."""
        try:
            segment = self._at(info.path, info.name)
        except (NotesError, OSError):
            return None
        return segment if segment.text == info.text and np.array_equal(segment.tokens, info.tokens) else None

    def near_matches(self, messages: Iterable[Sequence[Part]], skills: Iterable[Segment]) -> list[Notice]:
        """Describe the skills of whose texts the messages have a different version, and log each difference once."""
        parts = [part.text for message in messages for part in message if isinstance(part, TextPart)]
        lines = {line for text in parts for line in _lines(text)}
        found = [(skill.name, difference(skill.text, lines)) for skill in _longest_first(skills)]
        notices = [
            f"the text of {name} is in a message, but not as it was compiled: {how}" for name, how in found if how
        ]
        for notice in notices:
            if notice not in self._logged and len(self._logged) < LOGGED:
                self._logged.add(notice)
                output.say(notice)
        return list(map(Notice, notices))

    def with_runs(self, tokens: Tokens, texts: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
        """Open the skills and tool sets that share runs of tokens with these. `texts`: the ranges [first, last) of
        tokens that are compared."""
        infos = [info for info in self.known() if not (info.prefix_only or info.media)]
        with self._lock:
            index = self._index[1]
            if index is None or len(infos) != len(self._index[0]) or any(map(operator.is_not, infos, self._index[0])):
                index = TextIndex(self._workspace.model, [Texts(info.tokens, info.blocks or (0,)) for info in infos])
                self._index = infos, index
        found = {run.source: infos[run.source] for run in index.runs(tokens, texts)}
        return tuple(segment for info in found.values() if (segment := self.open(info)) is not None)

    def image(self, picture: Picture, *, private: bool = False, dry: bool = False) -> Segment:
        """Return a compiled image with the same bytes, under any name; else compile and store it. `private`: without
        the library. `dry`: do not compile it, and return a segment without K/V. Raises ModelError without a projector,
        ImageError for an image that cannot be decoded."""
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
                compiled = self._compute(lambda: compile_to_library(workspace, skill, say=_say, wait=0))
                return self._at(compiled.path, name)
            except CompilingError:  # another process compiles it: wait for its result
                time.sleep(PAUSE)
            except (UnwritableError, TakenError):
                break
        return self._compute(lambda: compile_skill(workspace, skill))

    @cached_property
    def _projector(self) -> str | None:
        """The digest and settings of the projector, which this loads; None without one."""
        return self._compute(lambda: self._workspace.image_encoding.projector) if self._workspace.has_vision else None

    def _at(self, path: Path, name: str) -> Segment:
        """Return the segment in a file. `splice` checks again that it matches the model."""
        key = path, _stamp(path)
        segment = self._in_use.get(key)
        if segment is None:
            opened = self._workspace.open(path, name)
            with self._lock:
                segment = self._in_use.setdefault(key, opened)  # another thread may have opened it meanwhile
        now = modified_ns(segment.source)
        if self._warned.get(path) != now:  # once for each change
            self._warned[path] = now
            warn_edited(self._workspace, segment, _say)
        with self._lock:
            self._open[key] = segment
            self._open.move_to_end(key)
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
        return segment

    def _list(self) -> None:
        """List the library again if its folder may have changed."""
        store, folder = self._workspace.library, getattr(self._workspace.library, "folder", None)
        try:
            now: object = os.stat(folder).st_mtime_ns if folder is not None else None
        except FileNotFoundError:
            now = 0
        if now is not None and now == self._listed_at:
            return
        try:
            identity = self._workspace.identity
        except UnsupportedError:
            self._paths = []
            return
        self._paths = [entry.path for entry in store.entries() if entry.info and entry.info.identity == identity]
        self._listed_at = now
        paths = set(self._paths)
        self._infos = {path: info for path, info in self._infos.items() if path in paths}
        self._open = OrderedDict((key, segment) for key, segment in self._open.items() if key[0] in paths)


def _say(notice: object) -> None:
    output.say(str(notice))


def skill_name(word: str) -> str:
    """Return the skill's name for a client's word, as for commands; a word that is not a name is lower-cased."""
    typed = names.typed(word)
    return typed if names.is_name(typed) else names.typed(word.lower())


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def match_skills(
    parts: tuple[Part, ...],
    skills: dict[str, Segment],
    known: Sequence[Segment],
    open_: Callable[[Segment], Segment | None],
) -> tuple[Part, ...]:
    """Replace the texts of known skills in a message by the skills, which are added to `skills`.

    A text matches if it is a whole part or whole paragraphs of one, any number of times; so the model's input stays the
    same text. Longer texts match first; of several texts with one name that in `skills`, else the first. `open_` opens
    a skill.
    """
    first: dict[str, Segment] = dict(skills)
    for text in known:
        first.setdefault(text.name, text)
    for text in _longest_first(first.values()):
        spliced = _splice_text(parts, text.text, text.name)
        if spliced is None:
            continue
        segment = text if text is skills.get(text.name) else open_(text)
        if segment is None:
            continue
        skills[segment.name] = segment
        parts = spliced
    return parts


def last_text(messages: Sequence[tuple[Part, ...]], texts: Sequence[Segment]) -> str | None:
    """Return the text with the last match in the messages; None without any match."""
    for parts in reversed(messages):
        for text in _longest_first(texts):
            parts = _splice_text(parts, text.text, text.text) or parts
        for part in reversed(parts):
            if isinstance(part, SkillPart):
                return part.name
    return None


def _longest_first(texts: Iterable[Segment]) -> list[Segment]:
    candidates = [text for text in texts if not (text.tools or text.media)]
    matchable = [text for text in candidates if len(text.text) >= SHORTEST or text.fields]
    return sorted(matchable, key=lambda text: -len(text.text))


def _splice_text(parts: tuple[Part, ...], text: str, name: str) -> tuple[Part, ...] | None:
    """Replace a skill's text in parts by the skill; None without a match."""
    cut = [_cut(part.text, text) if isinstance(part, TextPart) else [] for part in parts]
    if not any(cut):
        return None
    spliced: list[Part] = []
    for part, texts in zip(parts, cut, strict=True):
        spliced += [] if texts else [part]
        for number, piece in enumerate(texts):
            spliced += [SkillPart(name)] if number else []
            spliced += [TextPart(piece)] if piece.strip() else []
    return tuple(spliced)


def _cut(text: str, wanted: str) -> list[str]:
    """Split a text at another one that is whole paragraphs of it; [] without a match. Joined by the other text and
    empty lines, the pieces are the text again, but for blanks at the ends of lines."""
    if wanted != wanted.strip() or wanted.partition("\n")[0].rstrip() not in text:
        return []
    wanted, spans = _BLANKS.sub("", wanted), [match.span() for match in _BLANKS.finditer(text)]
    lengths = list(accumulate((end - start for start, end in spans), initial=0))
    starts = [start - before for (start, _), before in zip(spans, lengths, strict=False)]
    given, text = text, _BLANKS.sub("", text)

    def piece(begin: int, end: int) -> str:
        first, last = (at + lengths[bisect_left(starts, at)] for at in (begin, end))
        return given[first:last]

    place = text.find(wanted)
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    pieces, begin = [], 0
    while place >= 0:  # compares in place: a text may repeat the other thousands of times
        end = place + len(wanted)
        above, below = place - len(BETWEEN), end + len(BETWEEN)
        opens = place <= max(first, begin) or (
            text.endswith(BETWEEN, 0, place) and not text[above - 1 : above].isspace()
        )
        closes = end >= last or (text.startswith(BETWEEN, end) and not text[below : below + 1].isspace())
        if opens and closes:
            pieces.append(piece(begin, above if text.endswith(BETWEEN, begin, place) else place))
            begin = end if end >= last else below
            place = text.find(wanted, begin)
        else:
            place = text.find(wanted, place + 1)
    return [*pieces, given[len(piece(0, begin)) :]] if pieces else []


def _lines(text: str) -> list[str]:
    """Return the lines of a text without indentation and line numbers."""
    return [_MARGIN.sub("", line).strip() for line in text.split("\n")]


def difference(text: str, lines: Collection[str]) -> str | None:
    """Describe where a text departs from these lines of messages, if they have at least half of it."""
    own = [(number, line) for number, line in enumerate(_lines(text), 1) if line]
    missing = [(number, line) for number, line in own if line not in lines]
    if 2 * sum(len(line) for _, line in missing) > sum(len(line) for _, line in own):
        return None
    if not missing:
        return "its lines are indented, numbered or next to others"
    return f"line {missing[0][0]} is another than {missing[0][1][:60]!r}"

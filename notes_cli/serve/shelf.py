"""The skills at hand: segments by name, opened once for all, and texts that are those of skills.

A skill that is compiled again is another segment from then on; whoever has the old one keeps it, and its file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, SegmentError, UnsupportedError
from notes_cli.runtime.workspace import Workspace
from notes_cli.text import names
from notes_cli.text.messages import BETWEEN, Part, SkillPart, TextPart

SHORTEST = 64  # characters of a text that is looked for in messages: others cost less than looking


@dataclass(frozen=True, slots=True)
class _Opened:
    stamp: tuple[int, int, int]  # of the file
    segment: Segment


class Shelf:
    """The library of a workspace, for requests that come by the hundred. Use it where the context is used."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._opened: dict[Path, _Opened] = {}
        self._listed: dict[str, Path] = {}  # skills for this model, by name
        self._folder: object = None  # what the library's folder was like when it was listed

    def segment(self, name: str) -> Segment:
        """A compiled skill. Raise SegmentError where there is none, or none for this model."""
        store, workspace = self._workspace.library, self._workspace
        named = names.typed(name)
        if not names.is_name(named):  # a client names skills: what may be a file is not even looked for
            raise SegmentError(f"no compiled skill {name[:80]!r}", Help.LIST_SKILLS())
        path = store.find(named, workspace.identity, workspace.compile_again(named))
        return self._open(path, named)

    def _open(self, path: Path, name: str) -> Segment:
        found = path.stat()
        stamp = found.st_ino, found.st_mtime_ns, found.st_size
        known = self._opened.get(path)
        if known is None or known.stamp != stamp:
            known = self._opened[path] = _Opened(stamp, self._workspace.open(path, name))
        return known.segment  # whoever places it checks again that it fits

    def all(self) -> list[Segment]:
        """The skills that are compiled for this model."""
        self._list()
        found = []
        for name, path in list(self._listed.items()):
            try:
                found.append(self._open(path, name))
            except (NotesError, OSError):  # damaged, or removed since: whoever names it is told
                self._opened.pop(path, None)
        return found

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
            self._listed = {}
            return
        paths = {entry.name: entry.path for entry in store.entries() if entry.info and entry.info.identity == key}
        self._listed, self._folder = paths, now
        kept = set(paths.values())
        self._opened = {path: one for path, one in self._opened.items() if path in kept}


def matched(parts: tuple[Part, ...], skills: dict[str, Segment], known: Sequence[Segment]) -> tuple[Part, ...]:
    """The parts of a message, with texts that are those of known skills as such, each of which `skills` has then, too.

    A text is one if it is a whole part, or whole paragraphs of it: what the model reads is the same text. Of several
    skills the longest counts, and of those of one name the first.
    """
    for segment in sorted(known, key=lambda one: -len(one.text)):
        if segment.name in skills or segment.tools or len(segment.text) < SHORTEST:
            continue
        for number, part in enumerate(parts):
            if isinstance(part, TextPart) and (cut := _cut(part.text, segment.text)):
                before, after = cut
                middle = [*_texts(before), SkillPart(segment.name), *_texts(after)]
                parts = (*parts[:number], *middle, *parts[number + 1 :])
                skills[segment.name] = segment
                break
    return parts


def _cut(text: str, wanted: str) -> tuple[str, str] | None:
    """What is before and after a text that is whole paragraphs of another; None where it is not in there so. Put
    together with empty lines between, the three are the text again."""
    place = text.find(wanted) if wanted == wanted.strip() else -1
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    while place >= 0:  # looked at in its place: a text may repeat it thousands of times
        end = place + len(wanted)
        above, below = place - len(BETWEEN), end + len(BETWEEN)
        opens = place <= first or (text.endswith(BETWEEN, 0, place) and not text[above - 1 : above].isspace())
        closes = end >= last or (text.startswith(BETWEEN, end) and not text[below : below + 1].isspace())
        if opens and closes:
            return text[:place].removesuffix(BETWEEN), text[end:].removeprefix(BETWEEN)
        place = text.find(wanted, place + 1)
    return None


def _texts(text: str) -> list[Part]:
    return [TextPart(text)] if text.strip() else []

"""Finds the source of a skill, and detects outdated segments in the library, without loading a model.

A source is a file or a folder; else a compiled skill, whose file is read again; else an Agent Skill; else a sample of
notes. A file with the size and times of the compile counts as unchanged; else its text is compared with the segment's.
Only a compile detects changed tokens or RoPE of the same model.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from difflib import get_close_matches
from enum import Enum
from typing import BinaryIO

from notes_cli import config
from notes_cli.engine.segment import Identity, ImageFile, Segment
from notes_cli.errors import DamagedError, Help, NewerError, NotesError, SkillError, reason
from notes_cli.images import read_picture
from notes_cli.library.container import open_stored
from notes_cli.library.store import Library, SegmentFile, has_source, source_text
from notes_cli.text import names
from notes_cli.text.fields import Blocks, Field
from notes_cli.text.keys import listed
from notes_cli.text.names import files_of
from notes_cli.text.pictures import Shown
from notes_cli.text.skill import Found, Skill, find_skills, load_skill, load_source, with_images
from notes_cli.text.tools import SUFFIX, ToolSet, load_tools


class Stale(str, Enum):
    """Reasons for an outdated segment, as in JSON documents."""

    TEXT = "text"  # the file has another text now
    GONE = "gone"  # the file is gone: only the segment has the text
    MODEL = "model"  # no segment of this name is for the model in use
    FORMAT = "format"  # written by a newer version of notes
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason, as a kind and a text."""

    kind: Stale
    what: str


def stale_reasons(entry: SegmentFile, entries: Sequence[SegmentFile], weights: str | None = None) -> list[Reason]:
    """Return why a file of the library is outdated; empty if it is not. `entries`: all of its name. `weights`: digest
    of the model in use, None if unknown."""
    info = entry.info
    if info is None:
        return [_unusable(entry.problem)]
    result = []
    changed = text_changed(info)
    if changed is not None:
        result.append(changed)
    all_weights = {candidate.info.identity.weights for candidate in entries if candidate.info}
    if weights is not None and weights not in all_weights:
        compiled_for = f"{info.identity.model} {info.identity.quantization}"
        result.append(Reason(Stale.MODEL, f"it was compiled for {compiled_for}, not for the model in use"))
    return result


def text_changed(info: Segment) -> Reason | None:
    """Return a reason if the segment's source has changed or is gone; None if not, or if unknown (standard input, no
    source)."""
    source, files = info.source, files_of(info.source)
    if not files or "\\x" in source:  # escaped: its path has a line break or is not UTF-8
        return None
    for file in files:
        try:
            status = os.stat(file)
        except (FileNotFoundError, NotADirectoryError):
            return Reason(Stale.GONE, f"its file is gone: {file}")
        except (OSError, ValueError) as error:
            return Reason(
                Stale.UNREADABLE, f"cannot read {file}: {reason(error) if isinstance(error, OSError) else error}"
            )
        if not stat.S_ISREG(status.st_mode):  # never wait for a pipe
            return Reason(Stale.UNREADABLE, f"{file} is no regular file")
    source = source_text(source)
    current = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if info.stamp == current:
        return None
    if info.tools:  # their text depends on a model's template
        later = (bool(info.stamp) and info.stamp[:3] != current) or _written_after(status, info.created)
        return Reason(Stale.TEXT, f"the file has changed: {source}") if later else None
    try:
        skill = load_source(info.source, info.name)
        skill = with_images(skill) if info.media else skill
    except SkillError as error:
        return Reason(Stale.TEXT, f"its file cannot be compiled any more: {error.what}")
    if skill.text != info.text or [(picture.start, picture.end) for picture in info.pictures] != [
        (picture.start, picture.end) for picture in skill.pictures
    ]:
        text = "the text, or an image in it," if info.media else "the text"
        return Reason(Stale.TEXT, f"{text} has changed: {source}")
    if [(span.name, span.value, span.start, span.end) for span in info.fields] != list(skill.fields):
        return Reason(Stale.TEXT, f"the fields have changed: {source}")
    if skill.description != info.description:
        return Reason(Stale.TEXT, f"the description has changed: {source}")
    return None


def _written_after(status: os.stat_result, created: str) -> bool:
    """True if a file was written after the second in which a segment was made from it."""
    try:
        compiled_at = datetime.fromisoformat(created.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return False
    return max(status.st_mtime, status.st_ctime) >= compiled_at + 1


def skill_from_segment(info: Segment, name: str | None = None) -> Skill:
    """Return the skill that a segment was compiled from, by its stored text and fields. Raises SkillError for tools,
    whose text depends on the model's template."""
    if info.tools:
        text = f"{info.name} holds tools in the form of one model's chat template"
        raise SkillError(text, "Compile their file again")
    skill = as_skill(info, open_stored(info.path).pictures if info.media else (), source_text(info.source))
    return replace(skill, name=name or info.name, source=info.source, stamp=info.stamp)


def as_skill(segment: Segment, images: Sequence[ImageFile], label: str) -> Skill:
    """Return text, fields and images of a segment as a skill without a source. `label` names the images in errors."""
    pictures = tuple(Shown(image.start, image.end, read_picture(image.data, label)) for image in images)
    fields = tuple(Field(span.name, span.value, span.start, span.end) for span in segment.fields)
    return Skill(segment.name, segment.description, segment.text, fields, "", pictures=pictures)


def from_library(library: Library, name: str, new_name: str | None = None) -> tuple[Skill | ToolSet, Segment, str]:
    """Read a skill of the library for compiling, to be named `other`: from its file, else from its latest segment.
    Returns it with that segment and a description of the source. Raises NotesError if it cannot be read."""
    info = library.newest(name)
    files = files_of(info.source)
    if files and all(map(os.path.isfile, files)):
        skill = load_tools(info.source, new_name or name) if info.tools else load_source(info.source, new_name or name)
        return skill, info, source_text(info.source)
    why = f"{source_text(info.source)} is gone" if files else "it came from no file"
    return skill_from_segment(info, new_name or name), info, f"the segment: {why}"


def _unusable(problem: NotesError | None) -> Reason:
    text = problem.what if problem else "it cannot be read"
    if isinstance(problem, NewerError):
        return Reason(Stale.FORMAT, text)
    return Reason(Stale.DAMAGED if isinstance(problem, DamagedError) else Stale.UNREADABLE, text)


Note = Callable[[str], object]  # called with a text about where a skill was found


@dataclass(frozen=True, slots=True)
class Source:
    """A skill found by a word. `latest`: its newest segment in the library, if the word is a name there."""

    word: str
    skill: Skill | ToolSet
    latest: Segment | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about its text."""
        return self.skill.warnings if isinstance(self.skill, Skill) else ()


@dataclass(frozen=True, slots=True)
class Shape:
    """Options of a compile. None for `blocks` and `kv` keeps the present ones."""

    blocks: Blocks | None = 1
    kv: str | None = "f16"


class Sources:
    """Finds skills by words; folders are read once."""

    def __init__(self, library: Library, note: Note = lambda text: None) -> None:
        self.library = library
        self._note = note
        self._found: dict[str, Found] | None = None

    def read(self, word: str, *, name: str | None = None, stdin: BinaryIO | None = None) -> Source:
        """Read the skill that a word refers to. Raises NotesError if there is none, or it cannot be read."""
        if word.lower().endswith(SUFFIX) and os.path.lexists(word):
            return Source(word, load_tools(word, name))
        if word == "-" or os.path.lexists(word):
            return Source(word, load_skill(word, name=name, stdin=stdin))
        for typed in (names.typed(word), names.typed(word.lower())):
            if typed in self.library.names():
                return self.library_skill(typed, name)
            if typed in self.agent_skills():
                if not self.agent_skills()[typed].hides:
                    self._note(f"{typed} is {self.agent_skills()[typed].path}")
                return self.agent_skill(self.agent_skills()[typed], name)
        sample = config.sample_skill(typed)
        if sample is not None:
            self._note(f"{typed} is a sample that came with notes: {sample}")
            return Source(typed, load_skill(sample, name=name))
        if names.is_name(typed):
            raise self._nothing(word)
        return Source(word, load_skill(word, name=name))  # raises: no such file

    def library_skill(self, name: str, new_name: str | None = None) -> Source:
        """Read a skill of the library, from its file if that exists, else from its segment; named `other`."""
        skill, latest, where = from_library(self.library, name, new_name)
        self._note(f"{name}: its text is read from {where}")
        return Source(name, skill, latest)

    def agent_skill(self, found: Found, name: str | None = None) -> Source:
        """Read an Agent Skill. Raises SkillError for an ambiguous or unreadable one."""
        if found.problem is not None:
            raise found.problem
        if found.hides:
            self._note(f"{found.name} is {found.path}, which hides {listed(list(map(str, found.hides)))}")
        return Source(str(found.path), load_skill(found.path, name=name))

    def agent_skills(self) -> dict[str, Found]:
        """Return the Agent Skills of the project and the user, by name."""
        if self._found is None:
            self._found = {found.name: found for found in find_skills(config.skill_folders())}
        return self._found

    def _nothing(self, word: str) -> SkillError:
        candidates = {*self.library.names(), *self.agent_skills(), *config.sample_names()}
        similar = get_close_matches(word, candidates, n=3)
        hint = f". Did you mean {' or '.join(similar)}?" if similar else ""
        text = f"no file, no compiled skill and no Agent Skill {word!r}{hint}"
        return SkillError(text, Help.LOOKED_FOR_SKILLS(places=listed(places())))


def places() -> list[str]:
    """Return the folders that are searched for Agent Skills."""
    return [str(folder) for level in config.skill_folders() for folder in level]


def shape(source: Source, library: Library, identity: Identity) -> Shape:
    """Return how a skill of the library was compiled, for this model if it was; the default for one that is new there
    or comes from elsewhere."""
    name, origin = source.skill.name, source.skill.source
    infos = [entry.info for entry in library.entries(source.latest.name if source.latest else name) if entry.info]
    if source.latest is None:
        infos = [info for info in infos if info.source == origin or has_source(info, origin)]
    if any(info.identity == identity for info in infos):
        return Shape(None, None)
    latest = source.latest or max(infos, key=lambda info: info.created, default=None)
    return Shape(len(latest.blocks) or 1, latest.kv) if latest else Shape()

"""Finds the source of a skill to compile by a user's word and how it is to be compiled, and watches files for changes.

A word is a file or a folder; else a compiled skill, whose file is read again; else an Agent Skill; else a sample of
notes. Files are polled. Several writes by an editor, or a rename, count as one change: the file must be the same in two
polls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from notes_cli import config
from notes_cli.engine.segment import Identity
from notes_cli.errors import Help, SkillError
from notes_cli.library.container import SegmentInfo
from notes_cli.library.profiles import Profiles
from notes_cli.library.store import Library
from notes_cli.runtime.freshness import from_library, skill_from_segment, wants_influence
from notes_cli.text import names
from notes_cli.text.blocks import Blocks
from notes_cli.text.keys import listed
from notes_cli.text.skill import Found, Skill, find_skills, load_skill
from notes_cli.text.tools import SUFFIX, ToolSet, load_tools

Note = Callable[[str], object]  # called with a text about where a skill was found


@dataclass(frozen=True, slots=True)
class Source:
    """A skill found by a word. `latest`: its newest segment in the library, if the word is a name there."""

    word: str
    skill: Skill | ToolSet
    latest: SegmentInfo | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about its text."""
        return self.skill.warnings if isinstance(self.skill, Skill) else ()


@dataclass(frozen=True, slots=True)
class Shape:
    """Options of a compile. None for `blocks` and `kv` keeps the present ones."""

    blocks: Blocks | None = 1
    influence: bool = False
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

    def readable_skill(self, name: str) -> Source | None:
        """Return a skill of the library; None if it is unreadable or a tool set."""
        infos = [entry.info for entry in self.library.entries(name) if entry.info is not None]
        latest = max(infos, key=lambda info: info.created, default=None)
        return Source(name, skill_from_segment(latest), latest) if latest and not latest.tools else None

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


def shape(source: Source, library: Library, identity: Identity, profiles: Profiles) -> Shape:
    """Return how a skill of the library was compiled, for this model if it was, plus its profile's needs."""
    if source.latest is None:
        return Shape()
    path = library.path(source.latest.name, identity)
    present = next((entry.info for entry in library.entries(source.word) if entry.info and entry.path == path), None)
    info = present or source.latest
    influence = info.influence or wants_influence(profiles, identity)
    fields = source.skill.fields if isinstance(source.skill, Skill) else ()
    return Shape(
        None if present else len(info.blocks) or 1,
        bool(influence and fields and not info.media),
        None if present else info.kv,
    )


FileStamp = tuple[int, ...] | None  # attributes that change with the content; None if the file is missing


class Watched:
    """File attributes, as last handled and as last polled."""

    def __init__(self) -> None:
        self._handled: dict[Path, FileStamp] = {}
        self._latest: dict[Path, FileStamp] = {}

    def mark_handled(self, path: Path, look: FileStamp) -> None:
        """Record that the file with these attributes was processed."""
        self._handled[path] = self._latest[path] = look

    def changed(self, paths: Iterable[Path]) -> list[tuple[Path, FileStamp]]:
        """Return the files that differ from their handled attributes and were equal in two consecutive polls. A new
        file counts as changed, unless it is missing."""
        result = []
        for path in dict.fromkeys(paths):
            now = file_stamp(path)
            stable = path in self._latest and self._latest[path] == now
            self._latest[path] = now
            if stable and now != self._handled.get(path):
                result.append((path, now))
        return result


class Files:
    """Maps files to the skills that depend on them: the files of their texts, and images in those."""

    def __init__(self) -> None:
        self._own: dict[Path, Sequence[str]] = {}
        self._shown: dict[Path, Collection[Path]] = {}

    def add(self, own: Mapping[Path, Sequence[str]]) -> None:
        """Add the files that skills are read from."""
        self._own.update(own)

    def set_images(self, path: Path, images: Collection[Path]) -> None:
        """Set the images that a text file shows."""
        self._shown[path] = images

    @property
    def paths(self) -> list[Path]:
        return list(dict.fromkeys([*self._own, *(image for images in self._shown.values() for image in images)]))

    def skills(self, path: Path) -> list[str]:
        """Return the skills that depend on a file."""
        texts = [path, *(text for text, images in self._shown.items() if path in images)]
        return list(dict.fromkeys(word for text in texts for word in self._own.get(text, ())))


def file_stamp(path: Path) -> FileStamp:
    """Return the attributes that change with a file's content; None if it is missing or inaccessible."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

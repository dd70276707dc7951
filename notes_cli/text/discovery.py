"""Finds Agent Skills: folders with a SKILL.md, where agents look for them (agentskills.io).

A nearer skill hides a farther one of its name, as agents do. Only front matter is read here.
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from notes_cli.errors import SkillError, reason
from notes_cli.text import names
from notes_cli.text.keys import listed
from notes_cli.text.skill import read_card

MAX_SKILLS = 2000  # in one folder


@dataclass(frozen=True, slots=True)
class Found:
    """A skill found in a folder, with its problem if it is unusable, and the skills of its name that it hides."""

    name: str
    description: str
    path: Path  # folder
    problem: SkillError | None = None
    hides: tuple[Path, ...] = ()


def find_skills(folders: Iterable[Sequence[Path]]) -> list[Found]:
    """Return all skills in these folders, sorted by name. Different skills of one name that are equally near have a
    problem.

    `folders`: nearest first, equally near ones in one list. Raises SkillError for a folder that cannot be read.
    """
    skills: dict[str, Found] = {}
    hidden: dict[str, list[Path]] = {}
    seen: set[Path] = set()  # resolved: folders of skills often link to each other
    for level in folders:
        near: dict[str, list[Found]] = {}
        for path in (path for folder in level for path in _inside(folder)):
            real = path.resolve()
            if real not in seen:
                seen.add(real)
                found = _read(path)
                near.setdefault(found.name, []).append(found)
        for name, several in near.items():
            if name in skills:
                hidden.setdefault(name, []).extend(found.path for found in several)
            else:
                skills[name] = several[0] if _are_copies(several) else _ambiguous(several)
    return [
        Found(found.name, found.description, found.path, found.problem, tuple(hidden.get(name, ())))
        for name, found in sorted(skills.items())
    ]


def _inside(folder: Path) -> list[Path]:
    """Return the folders with a SKILL.md in a folder, which may be missing."""
    try:
        paths = sorted(path for path in folder.iterdir() if (path / "SKILL.md").is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SkillError(f"cannot read {folder}: {reason(error)}") from error
    if len(paths) > MAX_SKILLS:
        raise SkillError(f"{folder} has more than {MAX_SKILLS:,} skills", "Name those that you mean")
    return paths


def _read(path: Path) -> Found:
    try:
        name, description = read_card(path)
    except SkillError as error:
        return Found(names.name_of(path.name) or path.name, "", path, error)
    return Found(name, description, path)


def _are_copies(several: Sequence[Found]) -> bool:
    """Return True if these are copies of one skill."""
    first, *others = (found.path / "SKILL.md" for found in several)
    try:
        return all(filecmp.cmp(first, other, shallow=False) for other in others)
    except OSError:
        return False


def _ambiguous(several: Sequence[Found]) -> Found:
    paths = [str(found.path) for found in several]
    problem = SkillError(f"{len(paths)} skills are called {several[0].name}: {listed(paths)}", "Name the folder")
    return Found(several[0].name, several[0].description, several[0].path, problem)

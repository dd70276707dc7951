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
        by_name: dict[str, list[Found]] = {}
        for path in (path for folder in level for path in _skill_folders(folder)):
            real = path.resolve()
            if real not in seen:
                seen.add(real)
                skill = _read(path)
                by_name.setdefault(skill.name, []).append(skill)
        for name, same_name in by_name.items():
            if name in skills:
                hidden.setdefault(name, []).extend(skill.path for skill in same_name)
            else:
                skills[name] = same_name[0] if _are_copies(same_name) else _ambiguous(same_name)
    return [
        Found(skill.name, skill.description, skill.path, skill.problem, tuple(hidden.get(name, ())))
        for name, skill in sorted(skills.items())
    ]


def _skill_folders(folder: Path) -> list[Path]:
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


def _are_copies(skills: Sequence[Found]) -> bool:
    """Return True if these are copies of one skill."""
    first, *copies = (skill.path / "SKILL.md" for skill in skills)
    try:
        return all(filecmp.cmp(first, copy, shallow=False) for copy in copies)
    except OSError:
        return False


def _ambiguous(skills: Sequence[Found]) -> Found:
    paths = [str(skill.path) for skill in skills]
    problem = SkillError(f"{len(paths)} skills are called {skills[0].name}: {listed(paths)}", "Name the folder")
    return Found(skills[0].name, skills[0].description, skills[0].path, problem)

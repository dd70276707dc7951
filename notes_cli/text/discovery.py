"""Finding Agent Skills: folders with a SKILL.md, in the folders where agents look for them (agentskills.io).

A nearer skill hides one of the same name that is farther away, as agents have it. Only front matter is read here.
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

MAX_SKILLS = 2000  # in one folder: more is no folder of skills


@dataclass(frozen=True, slots=True)
class Found:
    """A skill, or why it is none, and those of its name that it hides."""

    name: str
    description: str
    path: Path  # its folder
    problem: SkillError | None = None
    hides: tuple[Path, ...] = ()


def find_skills(folders: Iterable[Sequence[Path]]) -> list[Found]:
    """All skills in these folders, by name; of several that are equally near, and not the same, each has a problem.

    `folders`: nearer ones first, those that are equally near in one list. Raise SkillError for a folder that cannot be
    read.
    """
    skills: dict[str, Found] = {}
    hidden: dict[str, list[Path]] = {}
    seen: set[Path] = set()  # by one way or another: links from one folder of skills to another are usual
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
                skills[name] = several[0] if _alike(several) else _ambiguous(several)
    return [
        Found(found.name, found.description, found.path, found.problem, tuple(hidden.get(name, ())))
        for name, found in sorted(skills.items())
    ]


def _inside(folder: Path) -> list[Path]:
    """The folders with a SKILL.md in a folder, which need not be there."""
    try:
        found = sorted(path for path in folder.iterdir() if (path / "SKILL.md").is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SkillError(f"cannot read {folder}: {reason(error)}") from error
    if len(found) > MAX_SKILLS:
        raise SkillError(f"{folder} has more than {MAX_SKILLS:,} skills", "Name those that you mean")
    return found


def _read(path: Path) -> Found:
    try:
        name, description = read_card(path)
    except SkillError as error:
        return Found(names.name_of(path.name) or path.name, "", path, error)
    return Found(name, description, path)


def _alike(several: Sequence[Found]) -> bool:
    """Whether these are copies of one skill."""
    first, *others = (found.path / "SKILL.md" for found in several)
    try:
        return all(filecmp.cmp(first, other, shallow=False) for other in others)
    except OSError:
        return False


def _ambiguous(several: Sequence[Found]) -> Found:
    paths = [str(found.path) for found in several]
    problem = SkillError(f"{len(paths)} skills are called {several[0].name}: {listed(paths)}", "Name the folder")
    return Found(several[0].name, several[0].description, several[0].path, problem)

"""Tests finding Agent Skills: the nearest of a name, each once, and no guess between equally near ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from notes_cli.config import skill_folders
from notes_cli.errors import SkillError
from notes_cli.text import skill
from notes_cli.text.skill import find_skills

from ..refused import refused


def put(folder: Path, name: str, text: str = "A rule.", description: str = "What it does.") -> Path:
    """Write a skill by the specification; return its folder."""
    (folder / name).mkdir(parents=True)
    (folder / name / "SKILL.md").write_text(f"---\nname: {name}\ndescription: {description}\n---\n{text}\n")
    return folder / name


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a repository with a package; return its root."""
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "project" / "package" / "source").mkdir(parents=True)
    return tmp_path / "project"


def test_the_folders_go_up_to_the_root_of_the_repository_and_no_further(project: Path) -> None:
    """Folders above the repository belong to others; the user's own come last."""
    shown = [str(level[0].parent.parent) for level in skill_folders(project / "package" / "source")]
    assert shown == [str(project / "package" / "source"), str(project / "package"), str(project), str(Path.home())]
    assert [folder.parent.name for folder in skill_folders(project)[0]] == [".agents", ".claude"]


def test_without_a_repository_only_the_working_folder(tmp_path: Path) -> None:
    """Folders up to the root of the system are not searched, and at home none twice."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert [level[0].parent.parent for level in skill_folders(tmp_path / "a" / "b")] == [
        tmp_path / "a" / "b",
        Path.home(),
    ]
    assert len(skill_folders(Path.home())) == 1


def test_the_nearer_skill_hides_the_farther_one(project: Path) -> None:
    """Project hides user, package hides repository; hidden ones are reported."""
    here = put(project / "package" / ".claude" / "skills", "pdf")
    root = put(project / ".agents" / "skills", "pdf", "Another.")
    mine = put(Path.home() / ".agents" / "skills", "pdf", "Mine.")
    put(Path.home() / ".claude" / "skills", "mail")
    found = {one.name: one for one in find_skills(skill_folders(project / "package"))}
    assert list(found) == ["mail", "pdf"]
    assert (found["pdf"].path, found["pdf"].hides) == (here, (root, mine)) and found["pdf"].problem is None
    assert found["mail"].description == "What it does." and not found["mail"].hides


def test_two_skills_that_are_equally_near(project: Path) -> None:
    """The problem names both instead of choosing. Copies and links of one skill are one."""
    agents, claude = project / ".agents" / "skills", project / ".claude" / "skills"
    put(agents, "pdf")
    put(claude, "pdf", "Another.")
    put(agents, "copied")
    put(claude, "copied")
    put(agents, "linked")
    (claude / "linked").symlink_to(agents / "linked")
    found = {one.name: one for one in find_skills(skill_folders(project))}
    assert found["copied"].problem is None and found["linked"].problem is None
    problem = found["pdf"].problem
    assert problem and str(agents / "pdf") in str(problem) and str(claude / "pdf") in str(problem)


def test_what_is_no_skill_is_left_out_and_what_is_broken_has_a_problem(project: Path) -> None:
    """Files and folders without SKILL.md are ignored; unclosed front matter is reported."""
    folder = project / ".agents" / "skills"
    put(folder, "good")
    (folder / "README.md").write_text("none")
    (folder / "empty").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "SKILL.md").write_text("---\nname: x\n")
    (folder / "plain").mkdir()
    (folder / "plain" / "SKILL.md").write_text("No front matter.")
    found = {one.name: one for one in find_skills(skill_folders(project))}
    assert list(found) == ["broken", "good", "plain"]
    assert "not closed" in str(found["broken"].problem) and found["plain"].problem is None


def test_a_folder_with_too_much_in_it_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a huge folder is refused instead of searched."""
    monkeypatch.setattr(skill, "MAX_SKILLS", 1)
    put(project / ".agents" / "skills", "a")
    put(project / ".agents" / "skills", "b")
    with refused(SkillError, "more than 1 skills"):
        find_skills(skill_folders(project))

"""Project files: the search for them, permission, their keys, and the sources of settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from .conftest import Notes, run_here

PROJECT = "model: notes-tiny\nsplice: [docs/handbook.md, returns]\nerrata: {date: 2026-07-01}\nmax-tokens: 9\n"
TEXT = "# Shop\n\ndate: 2026-06-01\n\nParcels go by ship.\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project file in the working folder, which has a text, too."""
    folder = tmp_path / "user" / "shop"
    (folder / "docs" / "deep").mkdir(parents=True)
    (folder / "docs" / "handbook.md").write_text(TEXT)
    monkeypatch.chdir(folder)
    return write(folder, PROJECT)


def write(folder: Path, text: str) -> Path:
    file = folder / ".notes" / "config.yaml"
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text(text)
    return file


def shown(command: str = "ask") -> dict[str, tuple[object, str]]:
    """Value and source of each setting of a command, but the threads of all tests."""
    rows = run_here("config", "show", command, "--json").json["settings"]
    return {row["setting"]: (row["value"], row["from"]) for row in rows if row["setting"] != "threads"}


def test_no_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable for scripts, which does not keep one from allowing the file."""
    monkeypatch.setenv("NOTES_NO_PROJECT", "1")
    assert run_here("config", "allow").code == 0 and list(shown()) == ["model"]
    monkeypatch.delenv("NOTES_NO_PROJECT")
    assert "splice" in shown()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders of Windows have no such modes")
def test_a_record_that_others_could_write_is_refused(project: Path, home: Path) -> None:
    """Else another user could allow a file for this one. It is private, and gone with `disallow`."""
    assert run_here("config", "allow").code == 0
    assert (home / "allowed").stat().st_mode & 0o777 == 0o700
    assert run_here("config", "disallow").code == 0 and not [*(home / "allowed").iterdir()]
    assert run_here("config", "allow").code == 0
    (home / "allowed").chmod(0o777)
    outcome = run_here("config", "show")
    assert outcome.code == 1 and "others can write in" in outcome.err


def test_the_nearest_file_up_to_the_root_of_the_repository(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root is searched, folders above it and the home folder are not; files further up are not merged."""
    assert run_here("config", "allow").code == 0
    deep = project.parents[1] / "docs" / "deep"
    monkeypatch.chdir(deep)
    assert shown()["max-tokens"][0] == "9"
    (deep / ".git").touch()  # of a worktree or submodule
    assert list(shown()) == ["model"]
    inner = write(deep, "temp: 0.5\n")
    assert run_here("config", "allow", ".").out == f"{inner}\n"
    assert {*shown()} == {"model", "temp"}
    home = write(tmp_path / "user", PROJECT)
    assert run_here("config", "allow", tmp_path / "user").code == 1, home
    removed = deep / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert run_here("paths").code == 0


def test_the_file_of_the_user_is_no_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NOTES_HOME=.notes it is in the same place."""
    monkeypatch.setenv("NOTES_HOME", str(project.parent))
    project.write_text("temp: 0.5\n")
    assert run_here("config", "show").err == "" and shown()["temp"] == ("0.5", str(project))


def test_a_text_is_never_looked_for_in_the_working_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing one is an error with its path in the project, also where a subfolder has a file of that name."""
    project.write_text("splice: [handbook.md]\n")
    assert run_here("config", "allow").code == 0
    monkeypatch.chdir(project.parents[1] / "docs")
    assert shown()["splice"][0] == [str(project.parents[1] / "handbook.md")]


def test_precedence(project: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables before the project, the project before the user's file, also by another flag of the same option."""
    assert run_here("config", "allow").code == 0
    home.mkdir(exist_ok=True)
    (home / "config.yaml").write_text("predict: 5\ntemp: 0.5\nserve: {splice: mine}\n")
    monkeypatch.setenv("NOTES_ASK_ERRATUM", "date=2026-08-01")
    handbook = str(project.parents[1] / "docs" / "handbook.md")
    assert shown() == {
        "splice": ([handbook, "returns"], str(project)),
        "erratum": (["date=2026-08-01"], "NOTES_ASK_ERRATUM"),
        "max-tokens": ("9", str(project)),
        "temp": ("0.5", str(home / "config.yaml")),
        "model": ("notes-tiny", str(project)),
    }
    serve = shown("serve")
    assert serve["splice"] == ([handbook, "returns"], str(project)) and serve["erratum"][0] == ["date=2026-07-01"]
    assert "max-tokens" not in serve and {*shown("verify")} == {"model"}
    [row] = [row for row in run_here("models", "--json").json if row["default"]]
    assert row["name"] == "notes-tiny"


def test_errata_belong_to_skills(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them if others are named, which may have no such fields. A file without skills corrects any."""
    for command in ("ask", "chat", "serve"):
        project.write_text(PROJECT)
        assert run_here("config", "allow").code == 0
        assert shown(command)["erratum"][0] == ["date=2026-07-01"]
        monkeypatch.setenv(f"NOTES_{command.upper()}_SPLICE", "support")
        assert "erratum" not in shown(command)
        project.write_text("errata: {date: 2026-07-01}\n")
        assert run_here("config", "allow").code == 0
        assert shown(command)["erratum"][0] == ["date=2026-07-01"]


UNUSABLE = (
    ("host: 0.0.0.0", "a project cannot set 'host' ({}). It can: model, ctx-size, splice,"),
    ("library: x", "a project cannot set 'library' ({})"),
    ("ask: {server: auto}", "a project cannot set 'ask' ({})"),
    ("- a", "{} must hold `setting: value` lines"),
    ("a: [", "{} is not valid YAML"),
    ("splice: [[a]]", "splice in {} must be a list of values"),
    ("splice:", "splice in {} must be a list of values"),
    ("errata: {date: [x]}", "errata in {} must be a list of values"),
    ("splice: ../other.md", "splice in {}: ../other.md is outside of"),
    ("splice: /etc/hosts", "splice in {}: /etc/hosts is outside of"),
    ("splice: link.md", "splice in {}: link.md is outside of"),
    ('splice: "a\\0b"', "splice in {} has a zero character"),
    ("ctx-size: 512\nctx_size: 1024", "{} has both ctx-size and ctx_size, which are one setting. Leave one out"),
    ("ctx-size: many", "ctx-size in {}: 'many' is not a whole number"),
    ("model: [a, b]", "model in {} must be one value"),
)


def test_what_a_project_cannot_set(project: Path) -> None:
    """One line with the key and the file, when it is to be allowed."""
    (project.parents[1] / "link.md").symlink_to("/etc/hosts")
    for text, message in UNUSABLE:
        project.write_text(text)
        assert message.format(project) in run_here("config", "allow").refusal()


@pytest.mark.model
def test_an_answer_has_the_skills_of_the_project(notes: Notes, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any folder of it, unless an option replaces them; a session and a chat that have begun keep theirs."""
    handbook = project.parents[1] / "docs" / "handbook.md"
    options = ("--splice", handbook, "--erratum", "date=2026-07-01")
    given = notes("ask", "Why?", "--json", "-n", 2, *options).json
    project.write_text("splice: docs/handbook.md\nerrata: [date=2026-07-01]\nsystem: Be brief.\nmax-tokens: 2\n")
    assert run_here("config", "allow").code == 0
    monkeypatch.chdir(handbook.parent / "deep")
    found = notes("ask", "Why?", "--json", "--system", "").json
    assert [piece["kind"] for piece in given["pieces"]].count("erratum") == 1
    assert (found["answer"], found["pieces"], found["tokens"]) == (given["answer"], given["pieces"], given["tokens"])
    memory = notes("ask", "Why?", "--json", "--memory", "../handbook.md").json  # it is there once
    assert [piece["how"] for piece in memory["pieces"]].count("spliced") == 1
    assert notes("chat", "kept", "--memory", "../handbook.md", stdin="Why?").code == 0
    batch = notes("ask", "--batch", "-", stdin='{"question": "Why?", "splice": []}\n"Why?"\n')
    answers = [json.loads(line) for line in batch.out.splitlines()]
    assert [[piece["kind"] for piece in one["pieces"]].count("erratum") for one in answers] == [0, 1]
    for _ in range(2):
        assert notes("chat", "mine", stdin="Why?").code == 0
    session = notes("ask", "Why?", "--session", "mine", "--json").json
    assert [piece["kind"] for piece in session["pieces"]].count("erratum") == 1

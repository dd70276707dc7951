"""The library: compile, Agent Skills, ls, inspect, rm, export, import and doctor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows
from notes_cli.library.container import open_segment, peek, write_segment

from ..limits import as_a_new_process
from ..text.test_skill import put
from . import conftest
from .conftest import TEXT, Notes
from .test_messages import kept


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the Agent Skills `pdf` and `mail`, the user's own `pdf`, and the working folder deep in it."""
    root = tmp_path / "project"
    (root / ".git").mkdir(parents=True)
    (root / "deep").mkdir()
    put(root / ".agents" / "skills", "pdf", "version: 3\n\nSee references/FORMS.md.")
    (root / ".agents" / "skills" / "pdf" / "references").mkdir()
    (root / ".agents" / "skills" / "pdf" / "references" / "FORMS.md").write_text("Forms.")
    put(root / ".claude" / "skills", "mail")
    put(Path.home() / ".agents" / "skills", "pdf", "Another.")
    monkeypatch.chdir(root / "deep")
    return root


def test_an_agent_skill_by_its_name(notes: Notes, project: Path) -> None:
    """Found from a subfolder of the repository; a line names its file and the one that it hides."""
    outcome = notes("compile", "pdf")
    assert outcome.code == 0 and peek(Path(outcome.out.strip())).text.startswith("version: 3")
    assert f"which hides {Path.home()}/.agents/skills/pdf" in outcome.err
    assert "linked files are not compiled" in outcome.err
    shown = notes("inspect", "pdf")
    assert "left out     front matter, references/FORMS.md" in shown.out


def test_the_order_in_which_a_word_is_looked_up(notes: Notes, project: Path, home: Path) -> None:
    """A file or folder, then a compiled skill by its file, then an Agent Skill."""
    (project / "deep" / "mine.txt").write_text("Mine.")
    assert notes("compile", "mine.txt", "--name", "mail").code == 0
    outcome = notes("compile", "mail")
    assert "(up to date)" in outcome.err and f"its text is read from {project}/deep/mine.txt" in outcome.err
    put(project / "deep", "mail", "A folder here.")
    assert "already, from" in notes("compile", "mail").err  # another text of that name
    notes("rm", "mail")
    assert peek(Path(notes("compile", "mail").out.strip())).text == "A folder here."


def test_a_word_that_is_nothing(notes: Notes, project: Path) -> None:
    """One line with similar names and the folders searched; a path is reported as a missing file."""
    refusal = notes("compile", "pdff").refusal()
    assert "Did you mean pdf?" in refusal and f"{project}/.claude/skills" in refusal
    assert "no such file: no.txt" in notes("compile", "no.txt").err
    for arguments in (("ask", "x", "--image", "no.png"), ("ask", "x", "--splice", "./no"), ("inspect", "no.gguf")):
        outcome = notes(*arguments)
        assert outcome.code == 1 and "no such file" in outcome.err and "Compile it" not in outcome.err, outcome.err


def test_every_agent_skill(notes: Notes, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--all: each name once; one that is broken stops no other, status 1. Without any, a line."""
    outcome = notes("compile", "--all", "--json")
    assert outcome.code == 0
    assert sorted(one["name"] for one in outcome.json["compiled"]) == ["mail", "pdf"]
    (project / ".claude" / "skills" / "bad").mkdir()
    (project / ".claude" / "skills" / "bad" / "SKILL.md").write_text("---\nname: bad\n")
    outcome = notes("compile", "--all")
    assert outcome.code == 1 and outcome.out.count("\n") == 2 and "not closed" in outcome.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NOTES_HOME", str(tmp_path / "empty"))
    for flag, message in (("--all", "no Agent Skills in"), ("--stale", "no compiled skills yet")):
        outcome = notes("compile", flag)
        assert (outcome.code, outcome.out) == (0, "") and message in outcome.err
        assert notes("compile", flag, "--json").json == {"version": 1, "compiled": [], "failed": {}, "warnings": []}


def test_a_recompile_keeps_the_options(notes: Notes, skill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file, of a skill by its name and from standard input, unless they are named."""
    monkeypatch.setenv("NOTES_MODEL", "notes-tiny")

    def compiled(*arguments: object, stdin: str = "") -> tuple[str, int]:
        (found,) = notes("compile", *arguments, "--json", stdin=stdin).json["compiled"]
        assert not found["up_to_date"]
        return found["kv"], found["blocks"]

    assert compiled(skill, "--kv", "q8_0", "--blocks", 2) == ("q8_0", 2)
    for source in (skill, "returns"):
        skill.write_text(skill.read_text() + "Others pay.\n")
        assert compiled(source) == ("q8_0", 2)
    assert compiled(skill, "--kv", "f16", "--blocks", 1) == ("f16", 1)
    for stdin, options in (("fee: 12", ["--kv", "q8_0"]), ("fee: 13", ["--force"])):
        assert compiled("-", "--name", "fees", *options, stdin=stdin) == ("q8_0", 1)


def test_rm_keeps_what_it_may_not_read(
    notes: Notes, compiled: Path, unprivileged: Notes, skill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that this user may not read may be up to date; it is not damaged."""
    skill.write_text(f"{TEXT} And more.")
    compiled.chmod(0o000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, _: path != compiled)  # access(2) asks of the real user, root
        outcome = unprivileged("rm", "--stale", "-y")
    assert outcome.code == 1 and "cannot be read, so it is not known to be stale" in outcome.err
    compiled.chmod(0o600)
    assert notes("rm", "--stale", "-y").out == f"{compiled}\n"


def test_rm_on_a_terminal(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists files and size before asking; "no" and "yes" both work."""
    monkeypatch.setattr(conftest._Pipe, "isatty", lambda self: self is sys.stdin)
    outcome = notes("rm", "--older-than", "0s", stdin="n\n")
    assert outcome.code == 1 and "returns (" in outcome.err and "Remove 1 file, " in outcome.err
    assert "nothing was removed" in outcome.err and compiled.exists()
    assert notes("rm", "--older-than", "0s", stdin="y\n").code == 0 and not compiled.exists()


def test_doctor_names_damage_and_the_command_that_mends_it(
    notes: Notes, skill: Path, compiled: Path, home: Path
) -> None:
    """Each file in a line, of which the commands work; nothing is changed. Sound files are no problem."""
    assert notes("doctor").code == 0 and notes("doctor", "--json").json["problems"] == []
    data = bytearray(compiled.read_bytes())
    data[-40] ^= 1
    compiled.write_bytes(data)
    left = compiled.parent / ".x.gguf.1.tmp"
    left.touch()
    before = kept(home)
    outcome = notes("doctor")
    damaged, leftover = (line.removeprefix("PROBLEM").strip() for line in outcome.out.splitlines()[-2:])
    assert outcome.code == 1 and str(compiled) in damaged and kept(home) == before
    assert leftover.endswith(f"Remove it: rm -f {left}") and "PROBLEM" not in "".join(outcome.out.splitlines()[:-2])
    left.unlink()
    assert notes(*damaged.split("Run: notes ")[1].split()).out == f"{compiled}\n" and notes("doctor").code == 0


@pytest.fixture
def other_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Switch to another user's empty library."""
    yield lambda: monkeypatch.setenv("NOTES_HOME", str(tmp_path / "other home"))


def test_exports_and_imports_that_cannot_be(
    notes: Notes, compiled: Path, skill: Path, tmp_path: Path, other_home: Callable[[], None]
) -> None:
    """Several files into one, and a text. Of a folder the sound files are imported, a forged one is refused."""
    notes("compile", "-", "--name", "piped", stdin="fee: 12 and some more words")
    for names, message in ((("returns", "piped"), "these are 2 files"), ((skill,), "is a text")):
        assert message in notes("export", *names, tmp_path / "a.gguf").refusal()
    assert not (tmp_path / "a.gguf").exists()
    share = tmp_path / "share"
    assert notes("export", "returns", "piped", f"{share}/").code == 0
    segment = open_segment(share / compiled.name)
    layers = [LayerRows(one.layer, one.k[::-1].copy(), one.v, one.part) for one in segment.layers]
    write_segment(share / compiled.name, replace(segment, layers=tuple(layers)))
    other_home()
    outcome = notes("import", share)
    assert outcome.code == 1 and outcome.out.count("\n") == 1
    assert "does not hold what this model computes" in outcome.err and notes("ls", "-q").out == "piped\n"
    assert notes("import", tmp_path / "empty").code == 1 and notes("import", share, "--name", "x").code == 2


def test_rm_removes_all_files_of_a_name(
    notes: Notes, skill: Path, compiled: Path, make_model: Callable[..., Path]
) -> None:
    """For all models, without asking; with an unknown name among several nothing is removed."""
    other = notes("compile", skill, "-m", make_model("qwen2")).out.strip()
    kept = Path(notes("compile", skill, "--name", "kept").out.strip())
    wrong = notes("rm", "-y", "returns", "retruns")
    assert wrong.code == 1 and "'retruns'" in wrong.err and compiled.exists() and Path(other).exists()
    outcome = notes("rm", "-y", "returns")
    assert outcome.code == 0
    assert set(outcome.out.splitlines()) == {str(compiled), other}
    assert not compiled.exists() and not Path(other).exists() and kept.exists() and skill.exists()


def test_inspect_text_and_tokens(notes: Notes, compiled: Path, model: Path) -> None:
    """--text is the text as compiled, --tokens its ids one a line; both alone on stdout, by name or by path."""
    with Model(model) as loaded:
        ids = [int(token) for token in loaded.tokenize(TEXT.strip())]
    for word in ("returns", compiled):
        assert notes("inspect", word, "--text").out == TEXT.strip() + "\n"
        assert [int(line) for line in notes("inspect", word, "--tokens").out.splitlines()] == ids


def test_doctor_says_who_can_write(notes: Notes, compiled: Path) -> None:
    """A folder that is not ours alone is a problem, with the command that mends it."""
    compiled.parent.chmod(0o777)
    as_a_new_process()
    outcome = notes("doctor")
    assert outcome.code == 1 and f"chmod 700 {compiled.parent}" in outcome.out.splitlines()[-1]
    for arguments in (
        ("ls",),
        ("ask", "x", "--splice", "returns", "-q"),
        ("compile", "-", "--name", "x"),
        ("rm", "returns"),
    ):
        assert "chmod 700" in notes(*arguments, stdin="x").refusal()
    compiled.parent.chmod(0o700)
    assert notes("doctor").code == 0


def test_a_folder_of_texts(notes: Notes, tmp_path: Path) -> None:
    """Without a SKILL.md each text in the folder is a skill, with a line that counts them; subfolders are ignored."""
    folder = tmp_path / "docs"
    (folder / "more").mkdir(parents=True)
    for name in ("b.md", "a.txt", "more/c.md", ".d.md", "data.csv"):
        (folder / name).write_text(f"The rule of {name}.")
    outcome = notes("compile", f"{folder}/")
    assert outcome.code == 0 and [Path(line).name.partition(".")[0] for line in outcome.out.split()] == ["a", "b"]
    assert f"{folder}/ has 2 texts, each of which is a skill. Folders below it are left out\n" in outcome.err
    assert "texts" not in notes("compile", folder, "-q").err and "texts" not in notes("compile", folder / "b.md").err
    assert [one["up_to_date"] for one in notes("compile", folder, "--json").json["compiled"]] == [True, True]
    (folder / "more" / "SKILL.md").write_text("date: 2026-06-01")
    assert [one["name"] for one in notes("compile", folder, "--json").json["compiled"]] == ["more"]

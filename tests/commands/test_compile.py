"""`notes compile`: sources, when it compiles again, and no partial files."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from notes_cli import output
from notes_cli.library import container
from notes_cli.library.container import open_segment

from .conftest import TEXT, Notes, snapshot


def test_prints_the_path_on_stdout_and_the_rest_on_stderr(notes: Notes, skill: Path, home: Path) -> None:
    """The path alone is on stdout, tokens and fields on stderr; the file holds the text and is private."""
    outcome = notes("compile", skill)
    assert outcome.code == 0
    path = Path(outcome.out.rstrip("\n"))
    assert path.parent == home / "library" and path.name.startswith("returns.")
    number = r"[\d,.]+"
    told = rf"returns: 103 tokens in {number} s \({number} tokens/s\), {number} kB, fields date, tier\n"
    assert re.fullmatch(told, outcome.err)
    assert open_segment(path).text == TEXT.strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_gives_its_skill_its_name(notes: Notes, tmp_path: Path) -> None:
    """A folder with SKILL.md is a skill; front matter gives name and description and is not compiled."""
    folder = tmp_path / "refunds"
    folder.mkdir()
    (folder / "SKILL.md").write_text("---\nname: refunds\ndescription: About refunds.\n---\ndate: 2026-06-01\n")
    outcome = notes("compile", folder)
    assert outcome.code == 0 and "warning" not in outcome.err
    segment = open_segment(Path(outcome.out.strip()))
    assert (segment.name, segment.description, segment.text) == ("refunds", "About refunds.", "date: 2026-06-01")


def test_standard_input_with_a_name(notes: Notes) -> None:
    """`-` reads the text from standard input; --name names it."""
    outcome = notes("compile", "-", "--name", "policy", stdin=TEXT)
    assert outcome.code == 0
    assert open_segment(Path(outcome.out.strip())).name == "policy"


def test_another_text_of_the_same_name(notes: Notes, skill: Path, compiled: Path, tmp_path: Path) -> None:
    """Refused in one line with both files and advice; --name makes it another skill."""
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / "policy.md"
    other.write_text("---\nname: returns\ndescription: x\n---\nfee: 12\n")
    before = compiled.read_bytes()
    for arguments in ((other,), ("-", "--name", "returns")):
        outcome = notes("compile", *arguments, stdin="fee: 12")
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1), outcome.err
        assert str(skill) in outcome.err and "--name NAME" in outcome.err and "--force" in outcome.err
        assert (str(other) if other in arguments else "this one is from standard input") in outcome.err
    assert compiled.read_bytes() == before
    assert notes("ask", "x", "-n", 1, "--splice", other).code == 0 and compiled.read_bytes() == before
    capital = tmp_path / "Returns.txt"
    capital.write_text("fee: 13")
    assert notes("compile", capital).code == 1 and compiled.read_bytes() == before
    assert notes("compile", other, "--name", "fees").code == 0 and compiled.read_bytes() == before
    assert notes("compile", other, "--force").out == f"{compiled}\n"
    (entry,) = notes("inspect", "returns", "--json").json
    assert (entry["text"], entry["source"]) == ("fee: 12", str(other))
    assert f"source       {other}\n" in notes("inspect", "returns").out
    assert [entry["source"] for entry in notes("ls", "--json").json] == [str(other)] * 2


def test_output_goes_to_a_file_and_not_into_the_library(notes: Notes, skill: Path, tmp_path: Path, home: Path) -> None:
    """-o writes the segment there; the library stays empty."""
    target = tmp_path / "here" / "returns.gguf"
    outcome = notes("compile", skill, "-o", target)
    assert (outcome.code, outcome.out) == (0, f"{target}\n")
    assert open_segment(target).name == "returns"
    assert not (home / "library").exists()


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (TEXT + "More.\n", "the text has changed"),
        (TEXT.replace("date: 2026-06-01", "date: 2026-07-01"), "the text has changed"),
        (f"---\ndescription: New.\n---\n{TEXT}", "the description has changed"),
        (f"---\nfields: {{limit: 2026-06-15}}\n---\n{TEXT}", "the fields have changed"),
    ],
)
def test_a_change_is_compiled_and_said(notes: Notes, skill: Path, compiled: Path, new: str, reason: str) -> None:
    """Text, field value, field set and description: each change compiles again into the same file and is named."""
    skill.write_text(new)
    outcome = notes("compile", skill)
    assert outcome.code == 0 and reason in outcome.err
    assert Path(outcome.out.strip()) == compiled
    assert notes("compile", skill).err.strip().endswith("(up to date)")


def test_in_blocks(notes: Notes, skill: Path) -> None:
    """A number or headings; unchanged blocks are reused; references to another block cause a warning."""
    skill.write_text("# One\n\ndate: 2026-06-01\n\n# Two\n\nBefore the date.\n\n# Three\n\nElse not.\n")
    first = notes("compile", skill, "--blocks", "headings")
    assert first.code == 0 and "(3 of 3 blocks compiled)" in first.err
    assert "whose value is in block 1" in first.err
    assert open_segment(Path(first.out.strip())).blocks == (0, 25, 50)
    assert "blocks       3, from tokens 0, 25, 50 on" in notes("inspect", "returns").out
    assert "(up to date; in blocks)" in notes("compile", skill, "--blocks", "headings").err
    skill.write_text(skill.read_text().replace("Else", "Or else"))
    again = notes("compile", skill, "--blocks", "headings")
    assert "(the text has changed; 1 of 3 blocks compiled)" in again.err and again.out == first.out
    assert "blocks, not 3" not in notes("compile", skill, "--blocks", "3").err
    assert "blocks, not 60: there is no other line" in notes("compile", skill, "--blocks", "60").err
    assert "blocks)" in notes("compile", skill).err and open_segment(Path(first.out.strip())).blocks == ()


def test_interrupted_compile_leaves_nothing(
    notes: Notes, skill: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the skill is prefilled: exit 130, no file, and the next compile goes through."""

    @contextlib.contextmanager
    def interrupting(*_: object, **__: object) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(output, "progress", interrupting)
        outcome = notes("compile", skill)
    assert (outcome.code, outcome.out) == (130, "") and "interrupted" in outcome.err
    assert [name for name in snapshot(home / "library") if not name.endswith(".lock")] == []
    assert notes("compile", skill).code == 0


def test_interrupted_writing_keeps_the_old_file(
    notes: Notes, skill: Path, compiled: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the new segment is written: the old one stays, no temporary file is left."""
    before = snapshot(home / "library")
    skill.write_text(TEXT + "More.\n")

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(container, "_seal", interrupted)
    assert notes("compile", skill).code == 130
    assert snapshot(home / "library") == before


def test_several_sources_and_folders_of_skills(notes: Notes, tmp_path: Path) -> None:
    """A line and a path each; a failure does not stop the rest, and makes the status 1."""
    for name, text in (("a", "date: 1"), ("b", ""), ("c", "date: 2")):
        (tmp_path / "skills" / name).mkdir(parents=True)
        (tmp_path / "skills" / name / "SKILL.md").write_text(text)
    other = tmp_path / "other.txt"
    other.write_text("plan: solo")
    outcome = notes("compile", tmp_path / "skills", other, other)
    assert outcome.code == 1 and len(outcome.out.splitlines()) == 3
    assert [Path(line).name.partition(".")[0] for line in outcome.out.splitlines()] == ["a", "c", "other"]
    lines = outcome.err.splitlines()
    assert [line for line in lines if "has no text" in line] == [
        next(line for line in lines if line.startswith("notes: "))
    ]
    assert [line.partition(":")[0] for line in lines if " tokens in " in line] == ["a", "c", "other"]
    again = notes("compile", tmp_path / "skills" / "a", tmp_path / "nowhere.txt", other, "--json")
    assert again.code == 1 and [one["name"] for one in again.json["compiled"]] == ["a", "other"]
    assert list(again.json["failed"]) == [str(tmp_path / "nowhere.txt")]
    assert all(one["up_to_date"] for one in again.json["compiled"])


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

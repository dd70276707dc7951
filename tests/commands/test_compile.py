"""`notes compile`: sources, when it compiles again, and no partial files."""

from __future__ import annotations

from pathlib import Path

from notes_cli.library.container import open_segment

from .conftest import Notes


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

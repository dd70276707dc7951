"""`notes compile`: sources, when it compiles again, and no partial files."""

from __future__ import annotations

from pathlib import Path

from .conftest import Notes


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

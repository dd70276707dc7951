"""The count of a folder of skills."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import skills


def test_a_folder_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is read, read with a warning, or refused by name; where it lies is not counted."""
    texts = {
        "a": "---\nname: x\ndescription: d\n---\nfee: 12",
        "b": "---\nname: b\ndescription: d: e\n---\nx",
        "deep/c": "---\nname: c\ndescription: f: g\n---\nx",
        "d": "---\nname: d\n---\n",
        "e": "---\nname: e\n",
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "SKILL.md").write_text(text)
    monkeypatch.setattr("sys.argv", ["skills", str(tmp_path)])
    skills.main()
    said = capsys.readouterr().out
    assert "5 files: 1 read, 2 read with a warning, 2 refused" in said
    assert f"1  has no text\n         {tmp_path / 'd' / 'SKILL.md'}" in said
    assert "1  the front matter that line _ opens is not closed" in said
    assert "2  the front matter is not valid YAML: _. It is read line by line instead" in said
    assert "fields: 2 files with 0, 1 files with 1 or more" in said

"""First steps: samples, explained settings, and advice after each mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from notes_cli import config
from notes_cli.commands.setup import SETTINGS
from notes_cli.text.skill import load_skill

from .conftest import run_here


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder that a newcomer is in."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_sample_by_its_name(empty: Path, home: Path) -> None:
    """In an empty folder: compile and ask, with a line that names the text; a file or a skill of that name has
    precedence."""
    done = run_here("compile", "store-handbook")
    assert done.code == 0
    assert str(config.resource("skills")) in done.err
    assert run_here("ask", "Which carrier delivers the parcels?", "--splice", "store-handbook").code == 0
    assert list(empty.iterdir()) == []
    Path("style-guide").write_text("Be kind.\n")
    assert "came with notes" not in run_here("compile", "style-guide").err


@pytest.mark.parametrize("word", ["stor-handbook", "Store-Handbok", "style-gide"])
def test_a_misspelt_sample(empty: Path, home: Path, word: str) -> None:
    """Its name is offered, also where nothing is compiled."""
    meant = "style-guide" if "style" in word else "store-handbook"
    assert f"Did you mean {meant}?" in run_here("compile", word).err
    error = run_here("ask", "When?", "--splice", word).err
    assert f"Did you mean {meant}?" in error and f"notes compile {meant}" in error


def test_init_copies_what_ships(empty: Path, home: Path) -> None:
    """Copies every sample and config.yaml; a second run changes nothing."""
    done = run_here("init")
    assert done.code == 0 and "next: notes compile skills/store-handbook" in done.err
    for sample in config.sample_skills():
        assert load_skill(empty / "skills" / sample.name).text == load_skill(sample).text
    assert (home / "config.yaml").read_text() == SETTINGS and home.stat().st_mode & 0o777 == 0o700
    changed = empty / "skills" / "store-handbook" / "SKILL.md"
    changed.write_text("Mine.\n")
    again = run_here("init", "--json").json
    assert again["written"] == [] and str(home / "config.yaml") in again["kept"] and changed.read_text() == "Mine.\n"


def test_every_setting_that_is_explained_is_one(empty: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written it sets nothing; with each # before a word taken away it is read without complaint."""
    assert run_here("init").code == 0 and config.load_config() == {}
    text = re.sub(r"^#(?! \w)", "", SETTINGS, flags=re.M)
    (home / "config.yaml").write_text(text)
    assert len(config.load_config()) >= 7
    assert run_here("ls", "-q").code == 0


def test_init_where_nothing_can_be_written(empty: Path) -> None:
    Path("skills").write_text("a file")
    outcome = run_here("init")
    assert outcome.code == 1 and outcome.err.startswith("notes: cannot write skills/")
    Path("skills").unlink()
    Path("skills").symlink_to("nowhere")
    outcome = run_here("init")
    assert outcome.code == 1 and outcome.err.startswith("notes: cannot write skills/")


def test_paths(home: Path) -> None:
    """A table for people, one path for scripts; nothing is made by asking."""
    assert run_here("paths", "config").out == f"{home}/config.yaml\n"
    assert f"library   {home}/library " in run_here("paths").out
    assert run_here("paths", "--json").json["sessions"] == f"{home}/sessions"
    assert run_here("paths", "servers").out == f"{home}/servers\n"
    assert run_here("paths", "nowhere").code == 2 and not home.exists()


def test_what_a_field_is_where_there_is_none(empty: Path) -> None:
    """At the compile, and where one is named."""
    Path("plain.txt").write_text("Hello.\n")
    assert "no fields like fee: 12" in run_here("compile", "plain.txt").err
    for flag in ("--field", "--erratum"):
        outcome = run_here("ask", "x", "--splice", "plain", flag, "a=b")
        assert outcome.code == 1 and "a {{placeholder}}" in outcome.err

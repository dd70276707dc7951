"""Messages in full: tests/messages.yaml has command lines and their stderr.

Other tests assert the kind of error and a keyword. `MESSAGES=write pytest tests/commands/test_messages.py` writes the
current messages into the file, for review as a diff.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import TEXT, Notes, snapshot, without_uses

FILE = Path(__file__).parents[1] / "messages.yaml"
KEPT: dict[str, list[dict[str, Any]]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))


def kept(home: Path) -> dict[str, bytes]:
    """The files of a user: neither locks nor memories of templates and digests."""
    passing = (".lock", "digests.json")
    return {name: data for name, data in without_uses(snapshot(home)).items() if not name.endswith(passing)}


Check = Callable[[dict[str, Any]], None]


@pytest.fixture
def check(notes: Notes, model: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run an entry in a folder of its own: one line, nothing on stdout, and all files as they were."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "returns.txt").write_text(TEXT)

    def checked(entry: dict[str, Any]) -> None:
        before = kept(home) if home.exists() else None
        outcome = notes(*shlex.split(entry["notes"]))
        shown = outcome.err
        for place, name in ((folder, "here"), (home, "home"), (model, "model")):
            shown = shown.replace(str(place), f"<{name}>")
        if "MESSAGES" in os.environ:
            entry |= {"exit": outcome.code, "says": shown.rstrip("\n")}
        assert (outcome.code, shown) == (entry["exit"], entry["says"] + "\n"), entry["notes"]
        assert outcome.code and outcome.out == "" and shown.startswith("notes: ") and shown.count("\n") == 1, entry
        assert (kept(home) if home.exists() else None) == before, entry["notes"]

    return checked


@contextmanager
def written_at_the_end() -> Iterator[None]:
    try:
        yield
    finally:
        if "MESSAGES" in os.environ:
            FILE.write_text(yaml.safe_dump(KEPT, width=1000, sort_keys=False, allow_unicode=True), encoding="utf-8")


def test_wrong_usage(check: Check, home: Path) -> None:
    """Exit 2 with advice or the help page to read; no file is created."""
    with written_at_the_end():
        for entry in KEPT["usage"]:
            check(entry)
            assert entry["exit"] == 2 and not home.exists(), entry


def test_what_is_refused(check: Check, notes: Notes) -> None:
    """With a skill `returns` in the library and a session `mine` of one turn, which stay as they are."""
    assert notes("compile", "returns.txt").code == 0
    assert notes("ask", "Why?", "--splice", "returns", "--session", "mine", "-n", 2).code == 0
    with written_at_the_end():
        for entry in KEPT["refusals"]:
            check(entry)
            if " --splice returns --field " in entry["notes"]:  # before anything is printed
                check({**entry, "notes": entry["notes"] + " --explain"})


def test_settings_that_cannot_be_used(check: Check, notes: Notes, home: Path) -> None:
    """They name the key; --help still works."""
    home.mkdir()
    with written_at_the_end():
        for entry in KEPT["settings"]:
            (home / "config.yaml").write_text(entry["config"])
            check(entry)
            assert notes("--help").code == 0


def test_texts_that_are_no_skills(check: Check, home: Path) -> None:
    """They name the file; nothing is compiled."""
    with written_at_the_end():
        for entry in KEPT["texts"]:
            Path("returns.txt").write_text(entry["text"])
            check(entry)
            assert "returns.txt" in entry["says"] and not (home / "library").exists()

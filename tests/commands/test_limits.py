"""Longer than a model was trained for, or larger than memory is: refused by every command, in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from notes_cli.engine import limits

from .conftest import Notes, snapshot

TRAINED = 512


@pytest.fixture
def short(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that was trained for 512 tokens."""
    path = make_model("llama", trained=TRAINED)
    monkeypatch.setenv("NOTES_MODEL", str(path))
    return path


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    """A skill of more tokens than that, with a field."""
    path = tmp_path / "manual.txt"
    path.write_text("date: 2026-06-01\n" + "Be kind to all.\n" * 40)
    return path


@pytest.fixture
def cases(tmp_path: Path, manual: Path) -> Path:
    path = tmp_path / "cases.yaml"
    path.write_text(
        "cases:\n  - {skill: manual.txt, question: 'May I?', choices: [a, b], field: date, value: 2026-07-01, "
        "right: [a, b]}\n"
    )
    return path


def kept(home: Path) -> dict[str, bytes]:
    """Return a user's files, without locks."""
    return {name: data for name, data in snapshot(home).items() if not name.endswith(".lock")}


def test_beyond_the_trained_context(
    notes: Notes, short: Path, skill: Path, manual: Path, cases: Path, home: Path
) -> None:
    """compile, ask, a later turn, verify and calibrate: each error has the length and advice."""
    assert notes("compile", skill).code == 0
    assert notes("ask", "Why?", "--splice", "returns", "--session", "mine", "-n", 2).code == 0
    before = kept(home)
    long = "Why? " * 120
    for arguments in (
        ("compile", manual),
        ("compile", manual, "--influence"),
        ("compile", manual, "--blocks", 4),
        ("ask", "Why?", "--splice", manual),
        ("ask", long),
        ("ask", long, "--splice", "returns", "--json"),
        ("ask", long, "--splice", "returns", "--explain"),
        ("ask", long, "--think"),
        ("ask", long, "--session", "mine"),
        ("ask", long, "--session", "other"),
        ("verify", "returns", "--question", long),
        ("verify", "returns", "--question", long, "--field", "tier=b"),
        ("verify", "--session", "mine", "--question", long),
        ("calibrate", "--cases", cases, "--only"),
        ("ask", "Why?", "-c", TRAINED + 1),
        ("compile", skill, "-f", "-c", 4096),
    ):
        outcome = notes(*arguments)
        assert outcome.code == 1 and outcome.err.count("\n") == 1, (arguments, outcome)
        assert "but tiny llama was trained for 512" in outcome.err and "--beyond-trained" in outcome.err
    assert kept(home) == before


def test_what_the_line_suggests_works(notes: Notes, short: Path, manual: Path, home: Path) -> None:
    """RoPE scaling by the factor that it names, the flag, and the flag as a setting."""
    refused = notes("compile", manual)
    scaling = refused.err.split("extend that (")[1].split(")")[0].split()
    assert notes("compile", manual, *scaling).code == 0
    assert notes("ask", "Why?", "--splice", "manual", "-n", 2, *scaling).code == 0
    assert notes("compile", manual, "--beyond-trained").code == 0
    (home / "config.yaml").write_text("beyond-trained: true\n")
    assert notes("ask", "Why?", "--splice", "manual", "-n", 2).code == 0


def test_a_longer_session_of_before(notes: Notes, short: Path, skill: Path) -> None:
    """A session beyond the trained length continues with the flag in the error, and nothing is lost."""
    begin = ("ask", "Why? " * 120, "--splice", skill, "--session", "mine", "-n", 2)
    assert notes(*begin, "--beyond-trained").code == 0
    refused = notes("ask", "And?", "--session", "mine")
    assert refused.code == 1 and "trained for 512" in refused.err
    assert notes("ask", "And?", "--session", "mine", "-n", 2, "--beyond-trained").code == 0


def test_more_than_memory(notes: Notes, model: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before allocation, with needed and available memory and advice. -v prints the estimate."""
    assert "a context of 4,096 tokens: " in notes("ask", "Why?", "-n", 1, "-v").err
    assert "of K/V" in notes("doctor", "--json").json["context"]
    monkeypatch.setattr(limits, "available_memory", lambda: 3_000_000)
    for arguments in (("ask", "Why?"), ("ask", "Why?", "--splice", "returns"), ("verify", "returns", "-c", 8000)):
        outcome = notes(*arguments)
        assert outcome.code == 1 and outcome.err.count("\n") == 1
        assert "tokens needs about" in outcome.err and "3.0 MB of memory is available" in outcome.err

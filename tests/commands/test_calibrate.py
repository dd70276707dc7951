"""`notes calibrate`, and `--method auto` after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Notes

CASE = """cases:
  - skill: returns.txt
    question: May I return this?
    choices: [accepted, refused]
    field: date
    value: 2026-07-01
    right: [accepted, refused]
"""


@pytest.fixture
def mine(skill: Path) -> Path:
    """A battery of one decision beside the skill's text."""
    path = skill.parent / "mine.yaml"
    path.write_text(CASE)
    return path


def test_a_deaf_model_makes_auto_recompute(notes: Notes, compiled: Path, mine: Path, home: Path) -> None:
    """Random weights: the verdict in words, and then `--field` decodes the corrected skill anew."""
    ask = ("ask", "Why?", "--splice", "returns", "--field", "date=2026-07-01", "--explain")
    before = notes(*ask)
    assert "method erratum: " in before.out and "notes calibrate" in before.out
    done = notes("calibrate", "--cases", mine, "-n", 5)
    assert done.code == 0 and "direct: no method is trustworthy: use recompute" in done.out
    assert str(home / "profiles") in done.err
    after = notes(*ask)
    assert "method recompute: no method is trustworthy" in after.out and "recomputed with the new value" in after.out
    assert "recomputed with the new value" not in notes(*ask, "--method", "erratum").out


def test_only_cases_of_ones_own(notes: Notes, mine: Path) -> None:
    """The battery that ships is left out."""
    found = notes("calibrate", "--cases", mine, "--only", "--json").json
    assert found["cases"] == 1 and json.loads(Path(found["path"]).read_text())["cases"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--only"], 2, "--only needs decisions of your own: --cases FILE"),
        (["--cases", "missing.yaml"], 1, "missing.yaml"),
        (["-n", "0"], 2, "0 is not a whole number from 1"),
    ],
)
def test_refused_in_a_line(notes: Notes, home: Path, arguments: list[str], code: int, message: str) -> None:
    """Nothing is measured or written."""
    done = notes("calibrate", *arguments)
    assert done.code == code and message in done.err and done.err.count("\n") == 1
    assert not (home / "profiles").exists()

"""`notes verify`: what it measures, what it says, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from notes_cli.measure import verify

from .conftest import Notes


def test_pass_is_exit_0(notes: Notes, compiled: Path) -> None:
    """Decisions and logits as in a full recompute: one line a question, the verdict last, exit 0."""
    outcome = notes("verify", "returns", "--choices", "a,b", "--question", "Why?", "--question", "When?")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[1].startswith("Why?") and lines[2].startswith("When?")
    assert lines[-1].startswith("pass: 2 of 2 decisions")


def test_fail_is_exit_1(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cosine below the bound fails although the decisions agree; the report is printed all the same."""
    monkeypatch.setattr(verify, "COSINE", 1.1)
    outcome = notes("verify", "returns", "--choices", "a,b", "--question", "Why?")
    assert outcome.code == 1 and outcome.out.splitlines()[-1].startswith("FAIL: 1 of 1")
    js = notes("verify", "returns", "--choices", "a,b", "--question", "Why?", "--json")
    assert js.code == 1 and js.json["pass"] is False and js.json["same_decision"] is True


def test_rows_that_were_not_moved_are_exact(notes: Notes, compiled: Path) -> None:
    """Without system text the skill stands where it was compiled: no seam, no rotation, and the control is the same."""
    case = notes("verify", "returns", "--choices", "a,b", "-s", "", "--json").json["cases"][0]
    assert case["moved"] is False and case["cosine"] > 0.9999 and case["kl"] < 1e-3
    assert case["control_cosine"] == pytest.approx(case["cosine"])


def test_the_control_is_worse(notes: Notes, compiled: Path) -> None:
    """Rows placed without rotation are farther from the recompute than those that were rotated."""
    result = notes("verify", "returns", "--choices", "a,b", "--json").json
    assert all(case["moved"] for case in result["cases"])
    assert result["control"]["cosine"] < result["cosine"] < 1


def test_questions_come_from_the_fields(notes: Notes, compiled: Path) -> None:
    """Without --question each field is asked for; an erratum adds the same questions once more, corrected."""
    plain = notes("verify", "returns", "--choices", "a,b", "--json").json["cases"]
    assert [case["question"] for case in plain] == ["What is the date?", "What is the tier?"]
    assert {case["corrected"] for case in plain} == {None}
    both = notes("verify", "returns", "--choices", "a,b", "--json", "--erratum", "date=2026-07-01").json["cases"]
    assert [case["errata"] for case in both] == [[], [], ["date=2026-07-01"], ["date=2026-07-01"]]
    assert all(case["corrected"] in ("a", "b") for case in both[2:])
    for case in both:
        same = case["decision"] == case["reference"]
        assert case["right"] == (same and case["corrected"] in (None, case["decision"]))


def test_nothing_to_ask(notes: Notes, tmp_path: Path) -> None:
    """A skill without fields and no --question: one line, exit 1."""
    (tmp_path / "plain.txt").write_text("Be kind to all.")
    assert notes("compile", tmp_path / "plain.txt").code == 0
    outcome = notes("verify", "plain")
    assert outcome.code == 1 and "Give --question" in outcome.err
    assert notes("verify", "plain", "--question", "Why?", "--choices", "a,b").code == 0


def test_unknown_skill_and_field(notes: Notes, compiled: Path) -> None:
    """Each is one line on stderr and exit 1."""
    for arguments, message in (("retruns", "Did you mean returns?"), ("returns --erratum x=1", "date, tier")):
        outcome = notes("verify", *arguments.split())
        assert (outcome.code, outcome.out) == (1, "") and message in outcome.err and outcome.err.count("\n") == 1

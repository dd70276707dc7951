"""`notes verify`: measurements, output, and exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import SAMPLES

from notes_cli.engine.context import Context
from notes_cli.measure import verify

from .conftest import Notes, on_a_terminal


def test_a_narrow_terminal_has_no_figures(notes: Notes, compiled: Path) -> None:
    """At 80 columns the decisions have room, without words cut into pieces."""
    asked = ["verify", "returns", "--choices", "a,b", "--question", "Why?"]
    narrow, wide = (on_a_terminal(asked, COLUMNS=columns) for columns in ("80", "120"))
    assert "decision" in narrow and "KL" not in narrow and "KL" in wide


def test_fail_is_exit_1(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cosine below the bound fails although the decisions agree; the report is printed all the same."""
    monkeypatch.setattr(verify, "COSINE", 1.1)
    outcome = notes("verify", "returns", "--choices", "a,b", "--question", "Why?")
    lines = outcome.out.splitlines()
    assert outcome.code == 1 and lines[-2].startswith("FAIL: 1 of 1") and lines[-1].startswith("next: ")
    assert lines[-3].startswith("missed: the mean cosine is ") and "it must be 1.1 or more (lowest: " in lines[-3]
    assert "'Why?'" in lines[-3]
    js = notes("verify", "returns", "--choices", "a,b", "--question", "Why?", "--json")
    assert js.code == 1 and js.json["pass"] is False and js.json["same_decision"] is True
    assert js.json["failed"] == [lines[-3].removeprefix("missed: ")]


def test_keys_that_are_not_turned_fail(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A splice with unrotated keys fails, whatever the logits are; the error names the skill and its K/V."""
    splice = Context.splice
    monkeypatch.setattr(Context, "splice", lambda *given, **how: splice(*given, **{**how, "rotate": False}))
    outcome = notes("verify", "returns", "--choices", "a,b")
    lines = outcome.out.splitlines()
    assert outcome.code == 1 and lines[-2].startswith("FAIL")
    assert lines[-1] == "next: compile returns again: notes compile --from returns --force"
    assert any(line.startswith("missed: returns has wrong rows: layer 0, K") for line in lines)


def test_what_a_method_leaves_stale_fails(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the shipped model: without an edit the old value decides, which is exit 1; with one the new value does."""
    monkeypatch.delenv("NOTES_MODEL")
    assert notes("compile", SAMPLES / "returns").code == 0
    ask = ("--question", "May I return this?", "--choices", "accepted,refused", "--field", "date=2026-07-01")
    stale = notes("verify", "returns", *ask, "--method", "stale")
    assert "missed: stale: 'May I return this?' decides 'accepted', the recompute's decision is 'refused'" in stale.out
    assert stale.code == 1 and "DIFFERS" in stale.out and "accepted (refused)" in stale.out
    assert notes("verify", "returns", *ask, "--method", "erratum", "--method", "suffix").code == 0
    assert notes("verify", "returns", *ask, "--method", "field").code == 1  # notes of the old value decide
    assert notes("verify", "returns", *ask, "--method", "all").code == 0  # auto is right, stale or not

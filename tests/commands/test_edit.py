"""`notes ask --field --method` and `notes compile --influence`: output of the edit methods."""

from __future__ import annotations

import os
from typing import Any

import pytest
from samples import SAMPLES

from notes_cli.config import shipped_model

from .conftest import run_here

CASES: dict[str, Any] = {
    "May I return this?": ("date=2026-07-01", "accepted", "refused"),
    "What is the shipping?": ("tier=silver", "free", "reduced"),
    "What is the approval?": ("amount=900", "automatic", "manual"),
}


@pytest.mark.parametrize("question", CASES)
def test_decisions_of_the_shipped_model(monkeypatch: pytest.MonkeyPatch, question: str) -> None:
    """`stale`, and the field in place, keep the old decision, which later entries noted; others correct it."""
    assert shipped_model().stat().st_size <= 10_000_000
    field, old, new = CASES[question]
    monkeypatch.setenv("NOTES_MODEL", os.fspath(shipped_model()))
    assert run_here("compile", SAMPLES / "returns").code == 0
    ask = ("ask", question, "--splice", "returns", "--field", field, "--choices", f"{old},{new}", "--method")
    for system in ((), ("-s", "You work for Harbor Books.")):
        for method in ("stale", "field"):
            assert run_here(*ask, method, *system).out.strip() == old
        for method in ("erratum", "field+erratum", "suffix", "recompute"):
            assert run_here(*ask, method, *system).out.strip() == new


def test_a_correction_for_all_reaches_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question's own errata and edits override `notes edit --all`; the text's value withdraws it."""
    monkeypatch.setenv("NOTES_MODEL", os.fspath(shipped_model()))
    assert run_here("compile", SAMPLES / "returns").code == 0
    ask = ("ask", "May I return this?", "--splice", "returns")
    assert run_here("edit", "--all", "--field", "returns.date=2026-07-01").code == 0
    for more in ((), ("--recompute",), ("--session", "told")):
        told = run_here(*ask, *more)
        assert told.out == "refused\n" and "date is 2026-07-01: a correction for all sessions" in told.err, more
    batch = run_here("ask", "--batch", "-", "--splice", "returns", stdin='"May I return this?"')
    assert '"answer": "refused"' in batch.out and "erratum" in run_here(*ask, "--explain").out
    for own in (("--erratum",), ("--field",), ("--method", "field", "--field")):
        assert run_here(*ask, *own, "date=2026-05-02").out == "accepted\n", own
    assert run_here("edit", "--all", "--field", "returns.date=2026-05-01").code == 0
    last = run_here(*ask)
    assert last.out == "accepted\n" and "told" not in last.err

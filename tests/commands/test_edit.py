"""`notes ask --field --method` and `notes compile --influence`: output of the edit methods."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from samples import SAMPLES

from notes_cli.config import shipped_model

from .conftest import TEXT, Notes, run_here

SKILL_TOKENS = len(TEXT.strip())  # the tiny models have one token a byte
METHODS = ["stale", "erratum", "field", "field+erratum", "selective", "selective@3", "blend@3", "suffix", "recompute"]
ASK = ("ask", "Why?", "--splice", "returns")
FIELD = ("--field", "date=2026-07-01")


@pytest.fixture
def influenced(notes: Notes, skill: Path) -> Path:
    """The skill compiled with the influence of its fields."""
    outcome = notes("compile", skill, "--influence")
    assert outcome.code == 0, outcome.err
    return Path(outcome.out.strip())


@pytest.mark.parametrize(
    ("method", "spliced", "rewritten", "says"),
    [
        ("stale", SKILL_TOKENS, 0, False),
        ("erratum", SKILL_TOKENS, 0, True),
        ("field", SKILL_TOKENS, 10, False),
        ("field+erratum", SKILL_TOKENS, 10, True),
        ("selective@3", SKILL_TOKENS, 13, False),
        ("blend@3", SKILL_TOKENS, 13, False),
        ("suffix", TEXT.index("2026-06-01"), 0, False),
        ("recompute", 0, 0, False),
    ],
)
def test_tokens_are_counted_by_what_was_done(
    notes: Notes, influenced: Path, method: str, spliced: int, rewritten: int, says: bool
) -> None:
    """Spliced, rewritten and erratum tokens; `decoded` includes all that were computed."""
    tokens = notes(*ASK, *FIELD, "--method", method, "-n", 1, "--json").json["tokens"]
    assert (tokens["spliced"], tokens["rewritten"], tokens["erratum"] > 0) == (spliced, rewritten, says)
    assert tokens["decoded"] == tokens["total"] - spliced + rewritten
    if rewritten:
        line = notes(*ASK, *FIELD, "--method", method, "--explain").out.splitlines()
        assert any(text.rstrip().endswith(f"; {rewritten} of them recomputed in place") for text in line)
        assert line[-1].endswith(f"{rewritten} in place of spliced ones)")


# ---- the model that ships: it must really decide by the new value

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


# ---- two skills with one field


@pytest.fixture
def two(notes: Notes, compiled: Path, tmp_path: Path) -> tuple[str, ...]:
    """The options that splice returns (date, tier) and fees (date, plan)."""
    other = tmp_path / "fees.txt"
    other.write_text("date: 2026-07-01\nplan: solo")
    assert notes("compile", other).code == 0
    return ("--splice", "returns", "--splice", "fees")


@pytest.mark.parametrize("option", ["--erratum", "--field"])
def test_whose_field_is_not_guessed(notes: Notes, two: tuple[str, ...], option: str) -> None:
    """The error lists the qualified names; a qualified field, or one of a single skill, is accepted."""
    ask = ("ask", "Why?", *two, "--method", "erratum") if option == "--field" else ("ask", "Why?", *two)
    for command in ((*ask, "-n", 1), (*ask, "--explain"), ("verify", "returns", "fees")):
        outcome = notes(*command, option, "date=2026-08-01")
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
        assert "name one of returns.date" in outcome.err
    for field in ("returns.date", "fees.date", "fees.plan", "plan"):
        done = notes(*ask, option, f"{field}=x", "-n", 1, "--json")
        assert [piece["kind"] for piece in done.json["pieces"]].count("erratum") == 1
    done = notes(*ask, option, "*.date=2026-07-01", "-n", 1, "--json")
    assert [piece["kind"] for piece in done.json["pieces"]].count("erratum") == 2
    assert done.err.startswith("*.date is returns.date, fees.date\n")


def test_values_that_contradict_each_other_are_of_one_skill(notes: Notes, two: tuple[str, ...]) -> None:
    """Another skill's field of the same name is another field; one of all skills is each of them."""
    ask = ("ask", "Why?", *two, "--method", "field", "-n", 1, "--field", "returns.date=1 May")
    for other in (("--field", "fees.date=2 May"), ("--erratum", "fees.date=2 May")):
        assert notes(*ask, *other).code == 0
    for other in (("--field", "*.date=2 May"), ("--erratum", "*.date=2 May")):
        outcome = notes(*ask, *other)
        assert outcome.code == 2 and "returns.date is given" in outcome.err and "'2 May'" in outcome.err
    both = ("--field", "returns.date=1 May", "--field", "*.date=2 May")
    assert notes("verify", "returns", "fees", "--question", "x", *both).code == 2

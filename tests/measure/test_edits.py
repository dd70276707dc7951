"""Verifying edit methods: references, and criteria."""

from __future__ import annotations

from dataclasses import replace

import pytest

from notes_cli.editing.methods import METHODS, Method
from notes_cli.engine.decision import decide
from notes_cli.errors import NotesError
from notes_cli.measure.verify import EditCase, Edits, Tried, cosine, verify_edits
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.settings import Defaults
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, with_values

from ..refused import refused

SAME = EditCase("Why?", 1.0, 0.0, True, "a", "a", 9)
OTHER = replace(SAME, cosine=0.5, kl=1.0, decision="b", decoded=11)
CHOICES = ["a", "b"]


def test_what_passes() -> None:
    """Each requested and possible method in all its cases; with "all", only the one that auto chooses."""
    good, bad, refused = (
        Tried("field", (SAME,)),
        Tried("stale", (SAME, OTHER)),
        Tried("block", refused=NotesError("why")),
    )
    assert (bad.same, bad.mean("cosine"), bad.mean("kl"), bad.mean("decoded")) == (1, 0.75, 0.5, 10)
    assert refused.mean("cosine") is None and not refused.passed
    for tried, auto, every, passed in (
        ((good, refused), "x", False, True),
        ((good, bad), "x", False, False),
        ((refused,), "x", False, False),
        ((good, bad, refused), "field", True, True),
        ((good, bad, refused), "stale", True, False),
        ((good, bad, refused), "block", True, False),
    ):
        assert Edits(tried, auto, "why", every).passed is passed


@pytest.fixture
def prompt(workspace: Workspace, skill: Skill) -> Prompt:
    return Prompt("", [compile_skill(workspace, skill)], system="Be kind.", fields={"date": "2026-07-01"})


def test_cases_hold_what_the_prompts_give(workspace: Workspace, skill: Skill, prompt: Prompt) -> None:
    """The reference is the corrected text, compiled and assembled by hand; a case is the edited sequence."""
    field, recompute = verify_edits(workspace, prompt, ["Why?"], ["field", "recompute"], choices=CHOICES).tried
    new = compile_skill(workspace, with_values(skill, {"date": "2026-07-01"}))
    by_hand = assemble(workspace, Prompt("Why?", [new], system="Be kind."), splice=False)
    wanted, reference = by_hand.logits(), decide(by_hand, CHOICES).choice
    assert field.cases[0].reference == recompute.cases[0].decision == reference
    assert recompute.cases[0].kl == 0 and recompute.cases[0].decoded == len(by_hand)
    amended = assemble(workspace, replace(prompt, question="Why?", method=Method("field")))
    assert field.cases[0].cosine == pytest.approx(cosine(amended.logits(), wanted), abs=1e-5)
    assert field.cases[0].decoded == len(by_hand) - len(new) + 1 + len("2026-07-01")


def test_all_and_auto(workspace: Workspace, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method is tried once, with that of the profile; refused ones are no errors."""
    found = Defaults(Method("selective", 3), None, 1, "early", "selective@3: 9 of 9")
    monkeypatch.setattr("notes_cli.runtime.settings.defaults", lambda workspace, think=False: found)
    monkeypatch.setattr("notes_cli.runtime.settings.few_tokens_follow", lambda change: False)
    edits = verify_edits(workspace, prompt, ["Why?"], ["all", "field"], choices=CHOICES)
    assert [one.method for one in edits.tried] == [*(str(Method(name)) for name in METHODS), "selective@3"]
    assert (edits.auto, edits.why, edits.all) == ("selective@3", "selective@3: 9 of 9", True)
    assert [one.method for one in edits.tried if one.refused] == ["block"]
    assert [one.method for one in verify_edits(workspace, prompt, ["Why?"], ["auto"]).tried] == ["selective@3"]


def test_nothing_to_verify(workspace: Workspace, prompt: Prompt) -> None:
    """No question, a value that changes nothing, an unknown method."""
    for changed, questions, methods, message in (
        (prompt, [], ["auto"], "Give --question"),
        (replace(prompt, fields={"tier": "gold"}), ["Why?"], ["auto"], "the text says tier=gold already"),
        (prompt, ["Why?"], ["magic"], "no edit method 'magic'"),
    ):
        with refused(NotesError, message):
            verify_edits(workspace, changed, questions, methods)

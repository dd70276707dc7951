"""Verifying: what is compared with what, and what passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from notes_cli.engine.decision import decide
from notes_cli.errors import NotesError
from notes_cli.measure.verify import Case, Control, Report, corrected_segment, field_questions, verify
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum
from notes_cli.text.skill import Skill, with_values

from ..refused import refused

GOOD = Case(
    *("Why?", (), 1.0, 0.0, True, "a", "a", 0.5, None, 0.9, "b"),
    spliced=3,
    moved=True,
)
CORRECTION = Erratum("date", "2026-07-01", "date=2026-07-01")


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"corrected": "a"}, True),
        ({"control_decision": "a", "control_cosine": 1.0}, True),
        ({"same_top": False}, True),
        ({"decision": "b"}, False),
        ({"corrected": "b"}, False),
        ({"cosine": 0.97}, False),
        ({"keys": 0.1, "control_keys": 0.31}, True),
        ({"keys": 0.1, "control_keys": 0.3}, False),
        ({"keys": 0.1, "control_keys": 0.0}, False),
    ],
)
def test_what_passes(changes: dict[str, object], passed: bool) -> None:
    """Every decision as the recompute and the corrected text, a mean cosine of 0.99, and a control that is worse: one
    bad case fails."""
    assert Report((GOOD, replace(GOOD, **changes))).passed is passed  # type: ignore[arg-type]


def test_a_control_that_cannot_show_anything() -> None:
    """Says so, and why; nothing reused at all is nothing verified."""
    assert Report((GOOD,)).control == Control(
        "nothing", "the first layer of this model does not rotate its keys, or has none"
    )
    still = replace(GOOD, moved=False)
    assert Report((still,)).control.why == "rows were reused where they were compiled" and Report((still,)).passed
    unused = Report((replace(still, spliced=0),))
    assert unused.control.why == "nothing was reused" and not unused.passed
    shown = replace(GOOD, keys=0.0, control_keys=1.0)
    assert Report((still, shown)).control.verdict == "caught"


def test_means() -> None:
    """Cosines and divergence are means over the cases."""
    report = Report((GOOD, replace(GOOD, cosine=0.5, kl=0.2, control_cosine=0.1)))
    assert (report.cosine, report.kl, report.control_cosine) == pytest.approx((0.75, 0.1, 0.5))


def test_cases_hold_what_the_prompts_give(workspace: Workspace, skill: Skill) -> None:
    """Spliced, reference and corrected decisions are those of prompts assembled by hand."""
    segment = compile_skill(workspace, skill)
    report = verify(workspace, Prompt("", [segment], [CORRECTION], "Be kind."), ["Why?"], choices=["a", "b"])
    plain, corrected = report.cases
    assert (plain.errata, plain.corrected) == ((), None) and corrected.errata == ("date=2026-07-01",)
    prompt = Prompt("Why?", [segment], [CORRECTION], "Be kind.")
    reference = decide(assemble(workspace, prompt, splice=False), ["a", "b"])
    assert (corrected.reference, corrected.margin) == (reference.choice, pytest.approx(reference.margin, abs=1e-4))
    new = compile_skill(workspace, with_values(skill, {"date": "2026-07-01"}))
    by_hand = assemble(workspace, Prompt("Why?", [new], system="Be kind."), splice=False)
    assert corrected.corrected == decide(by_hand, ["a", "b"]).choice
    assert corrected.spliced == len(segment) - 1 and corrected.moved
    assert plain.control_cosine < plain.cosine


def test_an_exact_splice_measures_as_exact(workspace: Workspace, skill: Skill) -> None:
    """Where nothing moves, the cosine is 1 to rounding and the decision the same."""
    report = verify(workspace, Prompt("", [compile_skill(workspace, skill)]), ["Why?", "When?"], choices=["a", "b"])
    assert report.cosine > 0.9999 and report.kl < 1e-3 and report.passed
    assert not any(case.moved for case in report.cases)


def test_decisions_without_choices_are_greedy_answers(workspace: Workspace, skill: Skill) -> None:
    """The text of up to 24 greedy tokens; no margin."""
    case = verify(workspace, Prompt("", [compile_skill(workspace, skill)]), ["Why?"]).cases[0]
    assert case.margin is None and 0 < len(case.reference) <= 24


def test_the_corrected_text(workspace: Workspace, skill: Skill) -> None:
    """New values are in the text, tokens are its own, other fields stay; it has no rows to splice by mistake."""
    segment = compile_skill(workspace, skill)
    new = corrected_segment(segment, {"date": "2026-07-01", "of-another-skill": "x"}, workspace)
    assert new.text == skill.text.replace("2026-06-01", "2026-07-01")
    assert new.tokens.tolist() == workspace.model.tokenize(new.text).tolist() and new.layers == ()


def test_field_questions(workspace: Workspace, skill: Skill) -> None:
    """One a field, in order, each once, in words."""
    segment = compile_skill(workspace, skill)
    assert field_questions([segment, segment]) == ["What is the date?", "What is the tier?"]
    span = replace(segment.fields[0], name="due_date-limit")
    assert field_questions([replace(segment, fields=(span,))]) == ["What is the due date limit?"]


def test_nothing_to_ask(workspace: Workspace, skill: Skill) -> None:
    """No question: an error that says what to give."""
    with refused(NotesError, "--question"):
        verify(workspace, Prompt("", [compile_skill(workspace, skill)]), [])

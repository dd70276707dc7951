"""Verification of splices, edit methods and sessions: the comparisons, and the criteria."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples import with_values

from notes_cli.config import paths
from notes_cli.editing.methods import ERRATUM, FIELD, METHODS, Method, change
from notes_cli.errors import NotesError
from notes_cli.measure.verify import (
    FIRST,
    Answered,
    Beginning,
    Case,
    Cause,
    EditReport,
    Parting,
    Report,
    SessionReport,
    answered,
    corrected_segment,
    cosine,
    divergence,
    field_questions,
    noise_of,
    parting,
    same_top,
    verify,
    verify_edits,
    verify_session,
    verify_skills,
)
from notes_cli.runtime.answering import ask_many, explain
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import decide
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.request import Callbacks, Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.session import Session
from notes_cli.sessions.session_kv import SessionKV
from notes_cli.text.skill import Skill

from ..conftest import MakeWorkspace
from ..refused import refused

GOOD = Case("Why?", 1.0, 0.0, True, "a", "a", spliced=3)


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"corrected": "a"}, True),
        ({"same_top": False}, True),
        ({"decision": "b"}, False),
        ({"corrected": "b"}, False),
        ({"cosine": 0.97}, False),
        ({"decision": "b", "parting": Parting(2, 0.5, 0.2)}, True),
        ({"decision": "b", "parting": Parting(2, 0.7, 0.2)}, False),
        ({"decision": "b", "parting": Parting(2, 0.09, 0.0)}, True),
        ({"decision": "b", "parting": Parting(2, 0.11, 0.0)}, False),
        ({"decision": "b", "parting": Parting(FIRST, 3.0, 0.0)}, True),
        ({"decision": "b", "parting": Parting(FIRST - 1, 3.0, 0.0)}, False),
        ({"corrected": "b", "missing": ()}, True),
        ({"corrected": "b", "missing": ("2026-07-01",)}, False),
        ({"spliced": 0}, True),
        ({"decision": "b", "babble": True}, True),
    ],
)
def test_what_passes(changes: dict[str, object], passed: bool) -> None:
    """Decisions as the recompute and the corrected text, a mean cosine of 0.99; greedy answers may part late."""
    assert Report((GOOD, replace(GOOD, **changes))).passed is passed  # type: ignore[arg-type]
    nothing = Report((replace(GOOD, spliced=0),))  # two recomputes of the same tokens always agree
    assert not nothing.passed and "nothing was reused" in str(nothing.failures[0])


def test_babble_is_no_verdict(workspace: Workspace) -> None:
    """A text whose tokens are hardly likelier than others. If all are, nothing is verified."""
    flat, sure = np.zeros(9, np.float32), np.eye(9, dtype=np.float32)[1] * 9
    for logits, babble in ((sure, False), (flat, True)):
        assert Answered("x", (1,) * 24, (logits,) * 25).babble is babble
    assert not Answered("", (), (flat,)).babble
    assert "answers none of these" in str(Report((replace(GOOD, babble=True),)).failures[0])


def test_questions_share_what_they_begin_with(workspace: Workspace, skill: Skill, decoded: list[int]) -> None:
    """Three times the tokens of a batch that recomputes, at most. A case is the same alone; `ended` leaves some out."""
    text = skill.text + "".join(f"\n{n}. Who returns {n} pays for {n + 1}." for n in range(20))
    segment = compile_skill(workspace, replace(skill, text=text))
    questions, errata = [f"Is it {n}?" for n in range(8)], ["date=2026-07-01", "tier=basic"]
    request = Request("", [segment], errata, recompute=True)
    decoded.clear()
    assert len([*ask_many(workspace, [replace(request, question=question) for question in questions])]) == 8
    batch = sum(decoded)
    decoded.clear()
    report = verify_skills(workspace, replace(request, recompute=False), questions)
    assert len(report.cases) == 16 and len(segment) > 300
    assert sum(decoded) < 3 * batch
    alone = verify_skills(workspace, replace(request, recompute=False), questions[-1:])
    for one, many in zip(alone.cases, report.cases[7::8], strict=True):
        assert (one.decision, one.reference, one.corrected) == (many.decision, many.reference, many.corrected)
        assert one.cosine == pytest.approx(many.cosine, abs=1e-5) and one.spliced == many.spliced
    asked = iter([False, False, *[True] * 20])
    some = verify_skills(workspace, request, questions, callbacks=Callbacks(ended=lambda: next(asked)))
    assert (len(some.cases), some.left, some.rows, some.passed) == (2, 14, {}, False)


def test_a_wrong_row_fails(workspace: Workspace, skill: Skill) -> None:
    """Also with equal decisions: the error names layer, tensor and tokens. Control: the K/V as compiled."""
    segment = compile_skill(workspace, skill)
    layers = list(segment.layers)
    layers[1] = replace(layers[1], v=np.zeros_like(layers[1].v))
    for one, passed in ((segment, True), (replace(segment, layers=tuple(layers)), False)):
        report = verify(workspace, Prompt("", [one], system="Be kind."), ["Why?"], choices=["a", "b"])
        [(name, check)] = report.rows.items()
        assert (name, check.right, check.tokens) == (segment.name, passed, len(segment))
        wrong = [str(failure) for failure in report.failures if "wrong rows" in str(failure)]
        assert bool(wrong) is not passed
        assert passed or "layer 1, V, tokens 0 to" in wrong[0]


def test_keys_one_position_too_far_fail(workspace: Workspace, skill: Skill) -> None:
    """The keys of every layer: the logits are nearly equal, but the K/V check fails."""
    segment = compile_skill(workspace, skill)
    with workspace.sequence() as sequence:
        sequence.append(segment.context)
        sequence.splice(segment)
        first = len(segment.context)
        layers = sequence.context.read(sequence.seq_id, first, len(segment), base=segment.base + 1, dtype="f16")
    report = verify(workspace, Prompt("", [replace(segment, layers=layers)]), ["Why?"], choices=["a", "b"])
    assert not report.passed and "layer 0, K" in str(report.failures[0])


def test_an_erratum_is_verified_as_it_is_asked(workspace: Workspace, skill: Skill) -> None:
    """By the method that `notes ask` uses: the field in place, and an erratum."""
    segment = compile_skill(workspace, skill)
    asked: list[Prompt] = []

    def kept(workspace: Workspace, prompt: Prompt, *given: Any, **how: Any) -> Report:
        asked.append(prompt)
        return verify(workspace, prompt, *given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("notes_cli.measure.verify.verify", kept)
        request = Request("", [segment], ["date=2026-07-01"], choices=["a", "b"])
        report = verify_skills(workspace, request, ["Why?"])
    wanted = explain(workspace, Request("Why?", [segment], ["date=2026-07-01"])).settings.method
    assert [one.method for one in asked] == [wanted] and wanted is not None and wanted.edits_rows
    assert [case.errata for case in report.cases] == [(), ("date=2026-07-01",)]
    assert report.cases[1].corrected in ("a", "b")


def test_where_texts_part(workspace: Workspace) -> None:
    """The number of equal tokens, and the gap in the recompute's logits there."""
    with workspace.sequence() as sequence:
        sequence.append(range(1, 30))
        one = answered(sequence, None)
    assert one.text and len(one.logits) == len(one.tokens) + 1 and one.prompt is not None and len(one.prompt) == 29
    assert parting(one, one, lambda: 1.0) is None
    logits = [*one.logits]
    logits[2] = logits[2].copy()
    second = int(np.argsort(logits[2])[-2])
    logits[2][second] = logits[2].max() + 1
    other = replace(one, text="another", tokens=(*one.tokens[:2], second), logits=tuple(logits[:4]))
    found = parting(other, one, lambda: 0.25)
    gap = float(one.logits[2].max() - one.logits[2][second])
    assert found is not None and (found.at, found.noise) == (2, 0.25) and found.gap == pytest.approx(gap, abs=1e-4)


def test_noise_is_what_other_batches_do(workspace: Workspace) -> None:
    """It is small, and depends on the prompt; the context is unchanged."""
    with workspace.sequence() as sequence:
        sequence.append(range(1, 200))
        one = answered(sequence, None)
    used = workspace.context.used
    assert 0 <= noise_of(Beginning(workspace), one) < 1e-3 and workspace.context.used == used
    assert one.prompt is not None
    assert noise_of(Beginning(workspace), replace(one, prompt=one.prompt[::-1])) > 1e-2


def test_cases_hold_what_the_prompts_give(workspace: Workspace, skill: Skill) -> None:
    """Spliced, reference and corrected decisions are those of prompts assembled by hand."""
    segment = compile_skill(workspace, skill)
    correction = {"fields": {"date": "2026-07-01"}}  # by an erratum
    report = verify(workspace, Prompt("", [segment], (), "Be kind.", **correction), ["Why?"], choices=["a", "b"])  # type: ignore[arg-type]
    plain, corrected = report.cases
    assert (plain.errata, plain.corrected) == ((), None) and corrected.errata == ("date=2026-07-01",)
    prompt = Prompt("Why?", [segment], [], "Be kind.", **correction)  # type: ignore[arg-type]
    reference = decide(assemble(workspace, prompt, splice=False), ["a", "b"])
    assert corrected.reference == reference.choice
    new = compile_skill(workspace, with_values(skill, {"date": "2026-07-01"}))
    by_hand = assemble(workspace, Prompt("Why?", [new], system="Be kind."), splice=False)
    assert corrected.corrected == decide(by_hand, ["a", "b"]).choice
    assert corrected.spliced == len(segment) - 1


def test_an_exact_splice_measures_as_exact(workspace: Workspace, skill: Skill) -> None:
    """If nothing moves, the cosine is 1 to rounding, and the decisions are equal."""
    report = verify(workspace, Prompt("", [compile_skill(workspace, skill)]), ["Why?", "When?"], choices=["a", "b"])
    assert report.mean("cosine") > 0.9999 and report.mean("kl") < 1e-3 and report.passed


def test_the_corrected_text(workspace: Workspace, skill: Skill) -> None:
    """It has the new values and their tokens, other fields stay, and there is no K/V to splice by mistake. Questions
    about fields: one per field, in order, without duplicates."""
    segment = compile_skill(workspace, skill)
    new = corrected_segment(segment, change(workspace.model, segment, {"date": "2026-07-01"}))
    assert new.text == skill.text.replace("2026-06-01", "2026-07-01")
    assert new.tokens.tolist() == workspace.model.tokenize(new.text).tolist() and new.layers == ()
    assert field_questions([segment, segment]) == ["What is the date?", "What is the tier?"]
    span = replace(segment.fields[0], name="due_date-limit")
    assert field_questions([replace(segment, fields=(span,))]) == ["What is the due date limit?"]


def test_logits_are_compared_by_hand() -> None:
    """KL(reference || found), in nats, is not symmetric; tokens of probability 0 add nothing, and NaN is no match."""
    a, b = np.array([1, 2, 3], np.float32), np.array([3, 1, 1], np.float32)
    assert cosine(a, a) == pytest.approx(1) and divergence(a, a) == 0 and same_top(a, a) and not same_top(a, b)
    p, q = np.exp(b) / np.exp(b).sum(), np.exp(a) / np.exp(a).sum()
    assert divergence(a, b) == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-6)
    never = np.float32(-np.inf)
    assert divergence(np.append(a, never), np.append(b, never)) == pytest.approx(divergence(a, b))
    assert np.isnan(divergence(np.full(3, np.nan, np.float32), a))


def tried(method: str, *decided: str, decoded: int = 9) -> tuple[Case, ...]:
    """A case for each decision, where the recompute's is "a"."""
    return tuple(Case("Why?", 1.0, 0.0, True, each, "a", decoded=decoded, method=method) for each in decided)


CHOICES = ["a", "b"]
GOOD_FIELD, STALE, IMPOSSIBLE = tried("field", "a"), tried("stale", "a", "b"), {"suffix": NotesError("why")}


@pytest.mark.parametrize(
    ("cases", "default", "named", "passed"),
    [
        (GOOD_FIELD, "x", True, True),
        (GOOD_FIELD + STALE, "x", True, False),
        ((), "x", True, False),
        (GOOD_FIELD + STALE, "field", False, True),
        (GOOD_FIELD + STALE, "stale", False, False),
        (GOOD_FIELD + STALE, "suffix", False, False),
    ],
)
def test_which_methods_pass(cases: tuple[Case, ...], default: str, named: bool, passed: bool) -> None:
    """Each named and possible method in all its cases; without names, only the default."""
    assert EditReport(cases, refused=IMPOSSIBLE, default=default, named=named).passed is passed


@pytest.mark.parametrize(
    ("others", "cheapest"),
    [
        ((*tried("suffix", "a", "a", decoded=90), *tried("erratum", "a", "a"), *STALE), "erratum"),
        (tried("suffix", "a", "a", decoded=90), "suffix"),
        ((), None),
        ((*tried("suffix", "a", "a"), *tried("stale", "a", "a")), None),
    ],
)
def test_the_cheapest_that_agrees(others: tuple[Case, ...], cheapest: str | None) -> None:
    """By the tokens decoded, over all questions; none where the old value decides as the new one does."""
    assert EditReport((*tried("field", "a", "b", decoded=1), *others)).cheapest == cheapest


@pytest.fixture
def prompt(workspace: Workspace, skill: Skill) -> Prompt:
    return Prompt("", [compile_skill(workspace, skill)], system="Be kind.", fields={"date": "2026-07-01"})


def test_cases_of_methods_hold_what_the_prompts_give(workspace: Workspace, skill: Skill, prompt: Prompt) -> None:
    """The reference is the corrected text, compiled and assembled by hand; a case is the edited sequence."""
    field, recompute = verify_edits(workspace, prompt, ["Why?"], ["field", "recompute"], choices=CHOICES).cases
    new = compile_skill(workspace, with_values(skill, {"date": "2026-07-01"}))
    by_hand = assemble(workspace, Prompt("Why?", [new], system="Be kind."), splice=False)
    wanted, reference = by_hand.logits(), decide(by_hand, CHOICES).choice
    assert field.reference == recompute.decision == reference
    assert recompute.kl == 0 and recompute.decoded == len(by_hand)
    amended = assemble(workspace, replace(prompt, question="Why?", method=Method.parse("field")))
    assert field.cosine == pytest.approx(cosine(amended.logits(), wanted), abs=1e-5)
    assert field.decoded == len(by_hand) - len(new) + 1 + len("2026-07-01")


def test_without_names_all_methods_are_tried(
    workspace: Workspace, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, and the default is that of config.yaml."""
    monkeypatch.setattr("notes_cli.runtime.resolve.default_method", lambda _: (FIELD, "field: 9 of 9"))
    monkeypatch.setattr("notes_cli.runtime.resolve.NEAR", 0)
    edits = verify_edits(workspace, prompt, ["Why?"], [], choices=CHOICES)
    assert [*edits.by_method, *edits.refused] == [*METHODS]
    assert (edits.default, edits.why, edits.named) == ("field", "field: 9 of 9", False)
    assert [*verify_edits(workspace, prompt, ["Why?"], ["suffix"]).by_method] == ["suffix"]


def test_nothing_to_verify(workspace: Workspace, prompt: Prompt) -> None:
    """No question, a value that changes nothing, an unknown method."""
    with refused(NotesError, "Give it a question"):
        verify(workspace, replace(prompt, fields={}), [])
    for changed, questions, methods, message in (
        (prompt, [], [], "Give it a question"),
        (replace(prompt, fields={"tier": "gold"}), ["Why?"], [], "the text says tier=gold already"),
        (prompt, ["Why?"], ["magic"], "no edit method 'magic'"),
    ):
        with refused(NotesError, message):
            verify_edits(workspace, changed, questions, methods)


@pytest.fixture
def session(request: pytest.FixtureRequest, workspace: Workspace, skill: Skill) -> Iterator[Session]:
    """One turn, spliced at its compiled position: exact. By this parameter after a system text: moved."""
    with Sessions(paths().sessions).locked("mine", new=True) as stored:
        session = Session(workspace, stored)
        prompt = Prompt("Why?", [compile_skill(workspace, skill)], system=getattr(request, "param", None))
        session.begin(prompt, assemble(workspace, prompt))
        session.keep("yes")
        yield session


def verified(session: Session) -> SessionReport:
    """Verify a session restored from disk."""
    return verify_session(Session(session.workspace, session.stored), ["When?"], choices=["a", "b"])


def test_a_session_is_its_prefill(session: Session) -> None:
    """Also after errata, suffix edits and a compaction: only rounding differs, and no cause is reported."""
    for number in range(2):
        session.edit("date", f"2026-07-0{number + 1}", ERRATUM)
        session.follow("And then?")
        session.keep("no")
    session.edit("tier", "basic", Method.parse("suffix"))
    session.compact()
    report = verified(session)
    assert report.passed and report.mean("cosine") > 0.9999 and not report.causes
    assert max(report.largest.k, report.largest.v) < 0.01


def test_stale_rows_are_seen_where_they_are(session: Session) -> None:
    """After an edit in place, K/V before it is exact, later K/V differs, and the edit is the cause."""
    session.edit("date", "2026-12-24", Method.parse("field"))
    report = verified(session)
    start = session.state.skills[0].fields[0].first + session.state.span("returns")[0]
    assert report.largest.position > start and max(report.largest.k, report.largest.v) > 0.03
    assert report.layers[0].k < 0.001  # the first layer depends only on its own token
    assert report.causes == {Cause.IN_PLACE: ("date=2026-12-24",)}


def test_a_correction_of_a_turn_is_a_cause(session: Session) -> None:
    """An erratum with a question edits in place, too."""
    session.follow("And then?", errata=["tier=basic"])
    session.keep("no")
    report = verified(session)
    assert report.largest.k > 0.01 and report.causes == {Cause.IN_PLACE: ("returns",)}


@pytest.mark.parametrize("session", ["Be kind."], indirect=True)
def test_rows_of_another_left_context_are_a_reason(session: Session) -> None:
    """A moved skill was compiled after a different context."""
    assert verified(session).causes == {Cause.OTHER_CONTEXT: ("returns",)}


def test_the_session_stays_as_it_is(session: Session) -> None:
    """No question of a verification is kept, on disk or in the sequence. Without a turn there is nothing to compare."""
    before, tokens = session.state, list(session.state.tokens)
    report = verify_session(session, ["When?", "Who?"])
    assert [case.question for case in report.cases] == ["", "When?", "Who?"]
    assert session.state == before == SessionFolder(session.stored.folder).state
    assert session.sequence.tokens.tolist() == tokens == session.state.tokens
    session.undo()
    with pytest.raises(NotesError, match="session mine has no turn"):
        verify_session(session, ["When?"])


def test_rows_of_another_session_do_not_pass(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: K/V of other tokens differs clearly from the prefill."""
    read = SessionKV._restore

    def spoilt(self: SessionKV) -> object:
        sequence = read(self)
        positions = list(range(5, 25))
        sequence.context.rewrite(sequence.seq_id, positions, np.full(len(positions), 65, np.int32))
        return sequence

    monkeypatch.setattr(SessionKV, "_restore", spoilt)
    session.sequence.close()  # restored from disk
    report = verified(session)
    assert max(report.largest.k, report.largest.v) > 0.5 and report.mean("cosine") < 0.999


def test_a_session_longer_than_a_fresh_context(make_workspace: MakeWorkspace, session: Session) -> None:
    """The context grows."""
    session.follow("x" * (512 - len(session.state.tokens) - 40))
    session.keep("no")
    workspace = make_workspace(n_ctx=256)
    report = verify_session(Session(workspace, session.stored), ["When?"], choices=["a", "b"])
    assert report.passed and report.tokens == len(session.state.tokens) > 256 and workspace.context.n_ctx > 256

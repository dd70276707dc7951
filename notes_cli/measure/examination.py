"""Examining: what is to be verified of skills or of a session, settled as a question to them is, and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from notes_cli.measure.composition import compose
from notes_cli.measure.edits import Edits, verify_edits
from notes_cli.measure.session import SessionReport, verify_session
from notes_cli.measure.verify import Report, field_questions, verify
from notes_cli.measure.wording import verify_system
from notes_cli.runtime.asking import SILENT, Listener, Request, keep_lists
from notes_cli.runtime.opening import SkillRef, open_segments
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.settings import AUTO
from notes_cli.runtime.settling import settled
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.session import Session

LABEL = "recomputing"  # what takes long


@dataclass(frozen=True, slots=True)
class Examination:
    """What is to be verified. What is None goes by what was measured of the model.

    `splice`: names of compiled skills, segment files or texts, or segments. `questions`: without any, the value of each
    field. `errata`: each question is asked without them and with them. `values`: new values of fields, brought in by
    each of `methods`, which may hold "auto" and "all". `system`: None for a few sentences, so that skills move, where
    they can. `choices`: None to compare greedy answers.
    """

    splice: Sequence[SkillRef] = ()
    questions: Sequence[str] = ()
    errata: Sequence[str] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    methods: Sequence[str] = (AUTO,)
    choices: Sequence[str] | None = None
    system: str | None = None
    seam: int | None = None
    wording: str | None = None

    def __post_init__(self) -> None:
        keep_lists(self, "splice", "questions", "errata", "methods", "choices")


def examine_splice(workspace: Workspace, wanted: Examination, listener: Listener = SILENT) -> Report:
    """Compare splice and errata with a full recompute of the same tokens; of several skills also what each question
    needs of them, and what repairs those that decide otherwise. Raise NotesError where that cannot be."""
    prompt, questions, seam = _settled(workspace, wanted, listener)
    how: dict[str, Any] = {"choices": wanted.choices, "seam": seam}
    with listener.watch(LABEL, later=True) as update:
        report = verify(workspace, prompt, questions, progress=update, **how)
        composed = compose(workspace, replace(prompt, fields={}), report.cases, progress=update, **how)
    return replace(report, composition=composed)


def examine_edits(workspace: Workspace, wanted: Examination, listener: Listener = SILENT) -> Edits:
    """Compare edit methods that bring in the values with a full recompute of the corrected text. Raise NotesError
    where that cannot be."""
    prompt, questions, seam = _settled(workspace, wanted, listener)
    with listener.watch(LABEL, later=True) as update:
        given = workspace, prompt, questions, wanted.methods
        return verify_edits(*given, choices=wanted.choices, seam=seam, progress=update)


def examine_session(session: Session, wanted: Examination, listener: Listener = SILENT) -> SessionReport:
    """Compare what is put back from disk with a prefill of the session's tokens, at its end and after each question.
    Only questions, choices and wording count. Raise NotesError where that cannot be."""
    questions = wanted.questions or field_questions(session.state.skills)
    request, had = Request("", wording=wanted.wording), session.state.skills
    wording = settled(session.workspace, request, (), listener, had=had, goes_on=True).settings.wording
    with listener.watch(LABEL, later=True) as update:
        return verify_session(session, questions, choices=wanted.choices, wording=wording, progress=update)


def _settled(workspace: Workspace, wanted: Examination, listener: Listener) -> tuple[Prompt, Sequence[str], int]:
    """The prompt without a question, the questions, and the seam."""
    segments = open_segments(workspace, wanted.splice, listener.notice, watch=listener.watch)
    system = wanted.system
    if system is None:
        fixed = any(segment.pinned and not (segment.carry and workspace.context.carries) for segment in segments)
        system = "" if fixed else verify_system()
    how: dict[str, Any] = {"seam": wanted.seam, "wording": wanted.wording, "fields": wanted.fields}
    request = Request("", errata=wanted.errata, system=system, **how)
    draft = settled(workspace, request, segments, listener)
    return draft.prompt, wanted.questions or field_questions(segments), draft.settings.seam

"""Verification of skills or of a session: resolved as for a question, and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.methods import record_of
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import LayerRows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError, Notice, Progress
from notes_cli.measure.compare import ANSWER, cosine, divergence, same_top, verify_system
from notes_cli.measure.composition import compose
from notes_cli.measure.verify import (
    Edits,
    Report,
    below_cosine,
    decided,
    field_questions,
    other_decision,
    verify,
    verify_edits,
)
from notes_cli.runtime.open_skills import SkillRef, open_segments
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.request import NO_CALLBACKS, Callbacks, Request, freeze_lists
from notes_cli.runtime.resolve import resolve
from notes_cli.runtime.settings import AUTO
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.session import Session
from notes_cli.sessions.state import Entry, State
from notes_cli.text.messages import user_message
from notes_cli.text.prompt import next_turn


@dataclass(frozen=True, slots=True)
class Point:
    """Where both were compared: after a question, or at the end (no question, and no decision)."""

    question: str | None
    cosine: float
    kl: float
    same_top: bool
    decision: str | None
    reference: str | None
    difference: float = 0.0  # of the logit that differs most


@dataclass(frozen=True, slots=True)
class LayerError:
    """The largest error of a row in one layer, relative to the row of the prefill, and where."""

    layer: int
    part: str
    k: float
    v: float
    position: int


class Cause(Enum):
    """Why rows may differ from those of a prefill by more than rounding."""

    OTHER_CONTEXT = "other_context"  # skills that are preceded by a different context than at compile time
    BLOCKS = "blocks"  # skills that were compiled in blocks, which have not seen each other
    IN_PLACE = "in_place"  # edits in place: what comes after them was computed with the old value
    CUT = "cut"  # parts that were cut out: what comes after them was computed with them


@dataclass(frozen=True, slots=True)
class SessionReport:
    """All that was compared, the edits in the session, and why there may be differences."""

    tokens: int
    points: tuple[Point, ...]
    layers: tuple[LayerError, ...]
    edits: tuple[Entry, ...]
    causes: Mapping[Cause, tuple[str, ...]]  # of differences, with the skills or edits that are meant

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else "failed"
        return f"SessionReport({verdict}, {self.tokens} tokens, cosine {self.cosine:.4f})"

    @property
    def cosine(self) -> float:
        return fmean(point.cosine for point in self.points)

    @property
    def kl(self) -> float:
        return fmean(point.kl for point in self.points)

    @property
    def same_decision(self) -> bool:
        return all(point.decision == point.reference for point in self.points)

    @property
    def largest(self) -> LayerError:
        return max(self.layers, key=lambda error: max(error.k, error.v))

    @property
    def failures(self) -> tuple[Notice, ...]:
        """Each bar that was missed, by which figure."""
        found = below_cosine([(point.question or "at the end", point.cosine) for point in self.points])
        different = [point for point in self.points if point.decision != point.reference]
        found += [other_decision(point.question or "", point.decision, point.reference) for point in different]
        return tuple(found)

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True, slots=True)
class _Found:
    """What one sequence came to at one point."""

    logits: NDArray[np.float32]
    decision: str | None
    tokens: tuple[int, ...] = ()  # of the turn that asked


def verify_session(
    session: Session,
    questions: Sequence[str],
    *,
    choices: Sequence[str] | None = None,
    wording: str | None = None,
    progress: Progress | None = None,
) -> SessionReport:
    """Compare at the end, and after each question as the next turn would ask it. The session stays as it is. `progress`
    is told of each prefill."""
    if session.empty:
        raise NotesError(f"there is nothing to verify: session {session.stored.name} has no turn")
    if session.state.images:
        raise NotesError(f"session {session.stored.name} has images, which a prefill of its tokens cannot show")
    workspace, state = session.workspace, session.state
    follows = next_turn(workspace.template, [user_message("?")])
    ending = int(workspace.tokenize(follows[0])[0])  # what ends the last answer
    ours = [_end(session.sequence, ending)]
    rows = _rows(session.sequence)
    for question in questions:
        sequence = session.follow(question, (), wording, ANSWER)
        logits, tokens = sequence.logits(), sequence.tokens[len(state.tokens) :]
        ours.append(_Found(logits, decided(sequence, choices)[0], tuple(map(int, tokens))))
        _back(workspace, sequence, len(state.tokens))

    longest = max(len(found.tokens) for found in ours)
    with _prefilled(workspace, state, longest + 1 + ANSWER, progress) as prefilled:
        theirs = [_end(prefilled, ending)]
        layers = tuple(map(_error, rows, _rows(prefilled)))
        for found in ours[1:]:
            with prefilled.share() as sequence:
                sequence.append(found.tokens)
                theirs.append(_Found(sequence.logits(), decided(sequence, choices)[0]))
    points = map(_point, [None, *questions], ours, theirs)
    edits = tuple(entry for entry in state.entries if entry.kind == "edit")
    return SessionReport(len(state.tokens), tuple(points), layers, edits, _causes(state))


def _prefilled(workspace: Workspace, state: State, room: int, progress: Progress | None) -> KVSequence:
    workspace.make_room(len(state.tokens), room)
    sequence = workspace.sequence()
    sequence.append(state.tokens)
    sequence.flush(progress)
    return sequence


def _back(workspace: Workspace, sequence: KVSequence, length: int) -> None:
    """Go back to before the question where the memory can; where it cannot, the sequence is assembled again."""
    if not workspace.model.recurrent:
        sequence.truncate(length)


def _end(sequence: KVSequence, ending: int) -> _Found:
    """After the token that ends the answer: rows that were put back have no logits of their own."""
    return _Found(sequence.lookahead([ending])[0], None)


def _rows(sequence: KVSequence) -> tuple[LayerRows, ...]:
    return sequence.context.read(sequence.seq_id, 0, len(sequence), base=0, dtype=sequence.context.lossless_type)


def _error(found: LayerRows, wanted: LayerRows) -> LayerError:
    k, v = _relative(found.k, wanted.k), _relative(found.v, wanted.v)
    state = found.part == "state"  # after the last token
    position = -1 if state else int(np.maximum(k, v).argmax())
    return LayerError(found.layer, found.part, float(k.max()), float(v.max()), position)


def _relative(found: NDArray[np.floating], wanted: NDArray[np.floating]) -> NDArray[np.float32]:
    """Of each row; 0 where there are no columns."""
    a, b = found.astype(np.float32), wanted.astype(np.float32)
    relative: NDArray[np.float32] = np.linalg.norm(a - b, axis=1) / (np.linalg.norm(b, axis=1) + 1e-6)
    return relative


def _point(question: str | None, ours: _Found, theirs: _Found) -> Point:
    a, b = ours.logits, theirs.logits
    far = float(np.abs(a - b).max())
    return Point(question, cosine(a, b), divergence(a, b), same_top(a, b), ours.decision, theirs.decision, far)


def _causes(state: State) -> dict[Cause, tuple[str, ...]]:
    splices = [entry for entry in state.entries if entry.kind == "splice"]
    edits = [entry for entry in state.entries if entry.kind == "edit"]
    moved = [entry.name for entry in splices if entry.origin.reason is Reason.MOVED or entry.how == "seam"]
    apart = [entry.name for entry in splices if entry.origin.blocks]
    # All of a block that was computed apart counts as rewritten: that is in BLOCKS.
    partly = [entry.name for entry in splices if entry.origin.rewritten and entry.origin.reason is not Reason.BLOCK]
    partly += [entry.text for entry in edits if (record := record_of(entry.how)) is None or record.in_place]
    cut = [entry.text for entry in state.traces]
    found = {Cause.OTHER_CONTEXT: moved, Cause.BLOCKS: apart, Cause.IN_PLACE: partly, Cause.CUT: cut}
    return {cause: tuple(dict.fromkeys(where)) for cause, where in found.items() if where}


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
        freeze_lists(self, "splice", "questions", "errata", "methods", "choices")


def examine_splice(workspace: Workspace, wanted: Examination, callbacks: Callbacks = NO_CALLBACKS) -> Report:
    """Compare splice and errata with a full recompute of the same tokens; of several skills also what each question
    needs of them, and what repairs those that decide otherwise. Raise NotesError where that cannot be."""
    prompt, questions, seam = _settled(workspace, wanted, callbacks)
    how: dict[str, Any] = {"choices": wanted.choices, "seam": seam}
    with callbacks.progress(LABEL, later=True) as update:
        report = verify(workspace, prompt, questions, progress=update, **how)
        composed = compose(workspace, replace(prompt, fields={}), report.cases, progress=update, **how)
    return replace(report, composition=composed)


def examine_edits(workspace: Workspace, wanted: Examination, callbacks: Callbacks = NO_CALLBACKS) -> Edits:
    """Compare edit methods that bring in the values with a full recompute of the corrected text. Raise NotesError
    where that cannot be."""
    prompt, questions, seam = _settled(workspace, wanted, callbacks)
    with callbacks.progress(LABEL, later=True) as update:
        given = workspace, prompt, questions, wanted.methods
        return verify_edits(*given, choices=wanted.choices, seam=seam, progress=update)


def examine_session(session: Session, wanted: Examination, callbacks: Callbacks = NO_CALLBACKS) -> SessionReport:
    """Compare what is put back from disk with a prefill of the session's tokens, at its end and after each question.
    Only questions, choices and wording count. Raise NotesError where that cannot be."""
    questions = wanted.questions or field_questions(session.state.skills)
    request, had = Request("", wording=wanted.wording), session.state.skills
    wording = resolve(session.workspace, request, (), callbacks, had=had, goes_on=True).settings.wording
    with callbacks.progress(LABEL, later=True) as update:
        return verify_session(session, questions, choices=wanted.choices, wording=wording, progress=update)


def _settled(workspace: Workspace, wanted: Examination, callbacks: Callbacks) -> tuple[Prompt, Sequence[str], int]:
    """The prompt without a question, the questions, and the seam."""
    segments = open_segments(workspace, wanted.splice, callbacks.on_notice, watch=callbacks.progress)
    system = wanted.system
    if system is None:
        fixed = any(segment.prefix_only and not (segment.carry and workspace.context.carries) for segment in segments)
        system = "" if fixed else verify_system()
    how: dict[str, Any] = {"seam": wanted.seam, "wording": wanted.wording, "fields": wanted.fields}
    request = Request("", errata=wanted.errata, system=system, **how)
    draft = resolve(workspace, request, segments, callbacks)
    return draft.prompt, wanted.questions or field_questions(segments), draft.settings.seam

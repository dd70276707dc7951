"""Compares a session with one prefill (`verify --session`), and resolves the options of all kinds of `verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.methods import METHODS
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import LayerRows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError, Notice, Progress
from notes_cli.measure.verify import (
    ANSWER,
    Edits,
    Report,
    answered,
    below_cosine,
    cosine,
    divergence,
    field_questions,
    other_decision,
    same_top,
    verify,
    verify_edits,
    verify_system,
)
from notes_cli.runtime.open_skills import SkillRef, open_segments
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.request import NO_CALLBACKS, Callbacks, Request, freeze_lists
from notes_cli.runtime.resolve import resolve
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.session import Session
from notes_cli.sessions.state import Entry, State
from notes_cli.text.messages import user_message
from notes_cli.text.prompt import next_turn


@dataclass(frozen=True, slots=True)
class Point:
    """A comparison after a question, or at the end of the session (no question and no decision)."""

    question: str | None
    cosine: float
    kl: float
    same_top: bool
    decision: str | None
    reference: str | None
    difference: float = 0.0  # largest absolute difference of a logit


@dataclass(frozen=True, slots=True)
class LayerError:
    """The largest error of a KV entry in a layer, relative to that of the prefill, and its position."""

    layer: int
    part: str
    k: float
    v: float
    position: int


class Cause(Enum):
    """Reasons why K/V may differ from a prefill's by more than rounding."""

    OTHER_CONTEXT = "other_context"  # skills preceded by a different context than at compile time
    BLOCKS = "blocks"  # skills compiled in blocks, which are independent of each other
    IN_PLACE = "in_place"  # edits in place: later K/V was computed with the old value
    CUT = "cut"  # cuts: later K/V was computed with the removed parts


@dataclass(frozen=True, slots=True)
class SessionReport:
    """The comparison of a session with a prefill, its edits, and possible causes of differences."""

    tokens: int
    points: tuple[Point, ...]
    layers: tuple[LayerError, ...]
    edits: tuple[Entry, ...]
    causes: Mapping[Cause, tuple[str, ...]]  # with the skills, edits or cuts concerned

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
        """The criteria that were missed."""
        failures = below_cosine([(point.question or "at the end", point.cosine) for point in self.points])
        different = [point for point in self.points if point.decision != point.reference]
        failures += [other_decision(point.question or "", point.decision, point.reference) for point in different]
        return tuple(failures)

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True, slots=True)
class _Observation:
    logits: NDArray[np.float32]
    decision: str | None
    tokens: tuple[int, ...] = ()  # of the turn with the question


def verify_session(
    session: Session,
    questions: Sequence[str],
    *,
    choices: Sequence[str] | None = None,
    wording: str | None = None,
    progress: Progress | None = None,
) -> SessionReport:
    """Compare a session with a prefill of its tokens: at its end, and after each question as the next turn. The session
    is not changed. `progress` is called during each prefill."""
    if session.empty:
        raise NotesError(f"there is nothing to verify: session {session.stored.name} has no turn")
    if session.state.images:
        raise NotesError(f"session {session.stored.name} has images, which a prefill of its tokens cannot show")
    workspace, state = session.workspace, session.state
    follows = next_turn(workspace.template, [user_message("?")])
    ending = int(workspace.tokenize(follows[0])[0])  # the token that ends the last answer
    restored = [_observe_end(session.sequence, ending)]
    rows = _rows(session.sequence)
    for question in questions:
        sequence = session.follow(question, (), wording, ANSWER)
        logits, tokens = sequence.logits(), sequence.tokens[len(state.tokens) :]
        restored.append(_Observation(logits, answered(sequence, choices).text, tuple(map(int, tokens))))
        if not workspace.model.recurrent:  # else the session restores it again
            sequence.truncate(len(state.tokens))

    longest = max(len(observation.tokens) for observation in restored)
    workspace.make_room(len(state.tokens), longest + 1 + ANSWER)
    with workspace.sequence() as prefilled:
        prefilled.append(state.tokens)
        prefilled.flush(progress)
        reference = [_observe_end(prefilled, ending)]
        layers = tuple(map(_layer_error, rows, _rows(prefilled)))
        for observation in restored[1:]:
            with prefilled.share() as sequence:
                sequence.append(observation.tokens)
                reference.append(_Observation(sequence.logits(), answered(sequence, choices).text))
    points = []
    for asked, one, other in zip([None, *questions], restored, reference, strict=True):
        a, b = one.logits, other.logits
        figures = cosine(a, b), divergence(a, b), same_top(a, b), one.decision, other.decision
        points.append(Point(asked, *figures, float(np.abs(a - b).max())))
    edits = tuple(entry for entry in state.entries if entry.kind == "edit")
    return SessionReport(len(state.tokens), tuple(points), layers, edits, _causes(state))


def _observe_end(sequence: KVSequence, ending: int) -> _Observation:
    """Return the logits after the token that ends the answer: restored K/V has no logits."""
    return _Observation(sequence.lookahead([ending])[0], None)


def _rows(sequence: KVSequence) -> tuple[LayerRows, ...]:
    return sequence.context.read(sequence.seq_id, 0, len(sequence), base=0, dtype=sequence.context.lossless_type)


def _layer_error(rows: LayerRows, reference: LayerRows) -> LayerError:
    errors = []  # relative, by row, [n_rows] each; 0 without columns
    for found, expected in ((rows.k, reference.k), (rows.v, reference.v)):
        a, b = found.astype(np.float32), expected.astype(np.float32)
        errors.append(np.linalg.norm(a - b, axis=1) / (np.linalg.norm(b, axis=1) + 1e-6))
    k, v = errors
    position = -1 if rows.part == "state" else int(np.maximum(k, v).argmax())  # a state: after the last token
    return LayerError(rows.layer, rows.part, float(k.max()), float(v.max()), position)


def _causes(state: State) -> dict[Cause, tuple[str, ...]]:
    splices = [entry for entry in state.entries if entry.kind == "splice"]
    edits = [entry for entry in state.entries if entry.kind == "edit"]
    moved = [entry.name for entry in splices if entry.reason is Reason.MOVED or entry.how == "seam"]
    blocks = [entry.name for entry in splices if entry.blocks]
    in_place = [entry.name for entry in splices if entry.rewritten]
    in_place += [entry.text for entry in edits if (method := METHODS.get(entry.how)) is None or method.in_place]
    in_place += [skill.name for skill in state.skills if skill.in_place]
    cut = [entry.text for entry in state.traces]
    causes = {Cause.OTHER_CONTEXT: moved, Cause.BLOCKS: blocks, Cause.IN_PLACE: in_place, Cause.CUT: cut}
    return {cause: tuple(dict.fromkeys(names)) for cause, names in causes.items() if names}


LABEL = "recomputing"  # of the progress display


@dataclass(frozen=True, slots=True)
class Examination:
    """Options of a verification. None: the default of the model.

    `splice`: names of compiled skills, segment files or texts, or segments. `questions`: default: the value of each
    field. `errata`: each question is asked without and with them. `fields`: new values, applied by each of `methods`,
    by default all. `system`: None for a short text, so that skills are moved if possible.
    `choices`: None to compare greedy answers.
    """

    splice: Sequence[SkillRef] = ()
    questions: Sequence[str] = ()
    errata: Sequence[str] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    methods: Sequence[str] = ()
    choices: Sequence[str] | None = None
    system: str | None = None
    seam: int | None = None
    wording: str | None = None

    def __post_init__(self) -> None:
        freeze_lists(self, "splice", "questions", "errata", "methods", "choices")


def examine_splice(workspace: Workspace, options: Examination, callbacks: Callbacks = NO_CALLBACKS) -> Report:
    """Compare splices and errata with a full recompute of the same tokens. Raises NotesError if that is not
    possible."""
    prompt, questions, seam = _resolve(workspace, options, callbacks)
    with callbacks.progress(LABEL, later=True) as update:
        return verify(workspace, prompt, questions, choices=options.choices, seam=seam, progress=update)


def examine_edits(workspace: Workspace, options: Examination, callbacks: Callbacks = NO_CALLBACKS) -> Edits:
    """Compare edit methods with a full recompute of the corrected text. Raises NotesError if that is not possible."""
    prompt, questions, seam = _resolve(workspace, options, callbacks)
    with callbacks.progress(LABEL, later=True) as update:
        arguments = workspace, prompt, questions, options.methods
        return verify_edits(*arguments, choices=options.choices, seam=seam, progress=update)


def examine_session(session: Session, options: Examination, callbacks: Callbacks = NO_CALLBACKS) -> SessionReport:
    """Compare a session restored from disk with a prefill of its tokens, at its end and after each question. Only
    questions, choices and wording count. Raises NotesError if that is not possible."""
    questions = options.questions or field_questions(session.state.skills)
    request, had = Request("", wording=options.wording), session.state.skills
    wording = resolve(session.workspace, request, (), callbacks, had=had, goes_on=True).settings.wording
    with callbacks.progress(LABEL, later=True) as update:
        return verify_session(session, questions, choices=options.choices, wording=wording, progress=update)


def _resolve(workspace: Workspace, options: Examination, callbacks: Callbacks) -> tuple[Prompt, Sequence[str], int]:
    """Return the prompt without a question, the questions, and the seam."""
    segments = open_segments(workspace, options.splice, callbacks.on_event, watch=callbacks.progress)
    system = options.system
    if system is None:
        fixed = any(segment.prefix_only and not (segment.carry and workspace.context.carries) for segment in segments)
        system = "" if fixed else verify_system()
    how: dict[str, Any] = {"seam": options.seam, "wording": options.wording, "fields": options.fields}
    request = Request("", errata=options.errata, system=system, **how)
    draft = resolve(workspace, request, segments, callbacks)
    return draft.prompt, options.questions or field_questions(segments), draft.settings.seam

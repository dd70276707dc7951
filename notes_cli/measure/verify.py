"""Whether a spliced, corrected or edited prompt decides as a full recompute does, on this model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.change import change
from notes_cli.editing.methods import METHODS, RECOMPUTE, Method
from notes_cli.engine.segment import Segment, quantized
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Notice, Progress, UnsupportedError
from notes_cli.measure.compare import (
    ANSWER,
    Answered,
    Composed,
    Parting,
    answered,
    cosine,
    divergence,
    noise_of,
    parting,
    same_top,
)
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.check_rows import RowCheck, check_rows
from notes_cli.runtime.corrections import known_fields, resolve_values
from notes_cli.runtime.prompt import Prompt, changes_of
from notes_cli.runtime.resolve import method_for
from notes_cli.runtime.settings import AUTO, DEFAULT_SEAM
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.state import SkillText
from notes_cli.text.keys import listed

COSINE = 0.99  # a mean below this fails


@dataclass(frozen=True, slots=True)
class Case:
    """One question, measured. Decisions are the chosen answer, or the greedy answer's text without choices.

    `corrected` is the decision of the corrected text recomputed; None where no correction is of a field. Of texts,
    which two prompts word differently, only the new values are compared: `missing` are those that the corrected text's
    answer has and this one has not. `margin` is the distance between the two best choices in the reference, None
    without choices. `parting`: where the answer parts from the reference; None where it does not.
    """

    question: str
    errata: tuple[str, ...]
    cosine: float
    kl: float
    same_top: bool
    decision: str
    reference: str
    margin: float | None
    corrected: str | None
    spliced: int
    moved: bool  # whether any row was rotated
    parting: Parting | None = None
    missing: tuple[str, ...] | None = None  # None with choices

    @property
    def same_decision(self) -> bool:
        return self.decision == self.reference or bool(self.parting and self.parting.same)

    @property
    def as_corrected(self) -> bool:
        """True if the decision is that of the corrected text, or there is none."""
        return self.corrected in (None, self.decision) or self.missing == ()

    @property
    def right(self) -> bool:
        """Decides as the reference, and as the corrected text where there is one."""
        return self.same_decision and self.as_corrected


@dataclass(frozen=True, slots=True)
class Report:
    """All cases of one verification."""

    cases: tuple[Case, ...]
    composition: Composed | None = None  # where there are several skills
    system: str = ""  # what precedes the skills
    small: tuple[tuple[str, str, int], ...] = ()  # skills whose files keep quantized rows: name, as what, bytes
    rows: tuple[tuple[str, RowCheck], ...] = ()  # what a comparison of each skill's rows has found, by its name

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else "failed"
        return f"Report({verdict}, {len(self.cases)} case{'s' * (len(self.cases) != 1)}, cosine {self.cosine:.4f})"

    @property
    def cosine(self) -> float:
        return fmean(case.cosine for case in self.cases)

    @property
    def kl(self) -> float:
        return fmean(case.kl for case in self.cases)

    @property
    def failures(self) -> tuple[Notice, ...]:
        """Each bar that was missed, by which figure."""
        found = [Notice(f"{name} has wrong rows: {check.reason}") for name, check in self.rows if not check.right]
        found += below_cosine([(case.question, case.cosine) for case in self.cases])
        for case in self.cases:
            if not case.same_decision:
                found.append(other_decision(case.question, case.decision, case.reference, parting=case.parting))
            elif case.missing:
                what = f"{case.question!r} is answered without {listed(case.missing)}: {case.decision!r}"
                found.append(Notice(f"{what}, the corrected text's answer is {case.corrected!r}"))
            elif not case.as_corrected:
                whose = "the corrected text's"
                found.append(other_decision(case.question, case.decision, case.corrected or "", whose))
        if not any(case.spliced for case in self.cases):
            found.append(Notice("nothing was reused, so nothing was verified", Help.EXPLAIN()))
        return tuple(found)

    @property
    def passed(self) -> bool:
        return not self.failures


def below_cosine(rows: Sequence[tuple[str, float]]) -> list[Notice]:
    """The bar that the mean cosine of these rows (what was asked, and its cosine) misses, if it does."""
    mean = fmean(cosine for _, cosine in rows)
    if mean >= COSINE:
        return []
    row, lowest = min(rows, key=lambda one: one[1])
    return [Notice(f"the mean cosine is {mean:.4f}, it must be {COSINE} or more (lowest: {lowest:.4f}, {row!r})")]


def other_decision(
    row: str,
    decision: str | None,
    reference: str | None,
    whose: str = "the recompute's",
    *,
    parting: Parting | None = None,
) -> Notice:
    """The bar that a row misses whose decision is another than it should be."""
    where = f", from token {parting.at + 1} on" if parting else ""
    return Notice(f"{row!r} decides {decision!r}, {whose} decision is {reference!r}{where}")


def verify(
    workspace: Workspace,
    prompt: Prompt,
    questions: Sequence[str],
    *,
    choices: Sequence[str] | None = None,
    seam: int = DEFAULT_SEAM,
    progress: Progress | None = None,
) -> Report:
    """Ask each question (the prompt's own is not asked) without the prompt's corrections and, if there are any, with
    them. `progress` is called during each recompute."""
    check_questions(questions)
    plain = replace(prompt, errata=(), fields={})
    corrections = [plain, prompt] if prompt.errata or prompt.fields else [plain]
    asked = [replace(one, question=question) for one in corrections for question in questions]
    small = [(one.name, one.kv, one.nbytes) for one in prompt.segments if any(quantized(one.kv))]
    places: dict[str, list[int]] = {one.name: [] for one in prompt.segments}
    cases = tuple(_measure(workspace, one, choices, seam, progress, places) for one in asked)
    rows = [(one.name, check_rows(workspace, one, places[one.name], progress)) for one in prompt.segments]
    return Report(cases, system=prompt.system or "", small=tuple(small), rows=tuple(rows))


def check_questions(questions: Sequence[str]) -> None:
    """Raise NotesError if there is none."""
    if not questions:
        raise NotesError("there is nothing to verify: no question, and no field to ask for", Help.QUESTION())


def field_questions(segments: Sequence[Segment] | Sequence[SkillText]) -> list[str]:
    """What can be asked of any skill: the value of each of its fields."""
    known = known_fields(*segments)
    asked = [one for key in known for one in known.find(key)]
    said = [
        f"{one.field.replace('_', ' ').replace('-', ' ')}{f' of {one.skill}' if one.shared else ''}" for one in asked
    ]
    return [f"What is the {name}?" for name in said]


def corrected_segment(segment: Segment, values: dict[str, str], workspace: Workspace) -> Segment:
    """The segment of the text with new values: tokens only, to be recomputed. Fields it does not have are skipped."""
    found = change(workspace.model, segment, values)
    bare = replace(segment, fields=(), layers=())
    return replace(bare, text=found.text, tokens=found.tokens) if found else bare


def _measure(
    workspace: Workspace,
    prompt: Prompt,
    choices: Sequence[str] | None,
    seam: int,
    progress: Progress | None,
    places: dict[str, list[int]],
) -> Case:
    """`places`: the positions where skills are placed are added to it."""
    with assemble(workspace, prompt, seam=seam, room=ANSWER) as spliced:
        logits = spliced.logits()
        moved = [piece for piece in spliced.pieces if piece.moved]
        for piece in moved:
            first = next(one for one in spliced.pieces if one.kind == "splice" and one.name == piece.name)
            places[piece.name].append(first.position)
        count = spliced.count("spliced")
        found = answered(spliced, choices)

    with assemble(workspace, prompt, splice=False, room=ANSWER) as reference:
        reference.flush(progress)
        expected = reference.logits()
        wanted = answered(reference, choices)

    corrected = _corrected(workspace, prompt, choices, progress)
    return Case(
        question=prompt.question,
        errata=(*(f"{name}={value}" for name, value in prompt.fields.items()), *(one.text for one in prompt.errata)),
        cosine=cosine(logits, expected),
        kl=divergence(logits, expected),
        same_top=same_top(logits, expected),
        decision=found.text,
        reference=wanted.text,
        margin=wanted.margin,
        corrected=corrected.text if corrected else None,
        spliced=count,
        moved=bool(moved),
        parting=parting(found, wanted, partial(noise_of, workspace, wanted)),
        missing=None if choices else _missing(prompt, found, corrected),
    )


def _missing(prompt: Prompt, found: Answered, corrected: Answered | None) -> tuple[str, ...]:
    """The new values that the corrected text's answer has, and this one has not."""
    values = [value.strip() for _, value in resolve_values(prompt.fields, prompt.segments)]
    texts = (corrected.text.casefold() if corrected else "", found.text.casefold())
    return tuple(value for value in values if value.casefold() in texts[0] and value.casefold() not in texts[1])


def _corrected(
    workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None, progress: Progress | None
) -> Answered | None:
    """The decision of the corrected text without an erratum; None where no field is corrected."""
    values = resolve_values(prompt.fields, prompt.segments)
    names = {one.name for one in prompt.segments if one.media}
    if not values or any(one.skill in names for one, _ in values):  # a text with images is not written again
        return None
    segments = [
        corrected_segment(segment, {one.field: value for one, value in values if one.skill == segment.name}, workspace)
        for segment in prompt.segments
    ]
    with assemble(workspace, replace(prompt, segments=segments, fields={}), splice=False, room=ANSWER) as sequence:
        sequence.flush(progress)
        return answered(sequence, choices)


def decided(sequence: KVSequence, choices: Sequence[str] | None) -> tuple[str, float | None]:
    """The decision at the end of a sequence, and its margin where there are choices."""
    found = answered(sequence, choices)
    return found.text, found.margin


ALL = "all"

Reference = tuple[NDArray[np.float32], str]  # logits after the prompt, and the decision


@dataclass(frozen=True, slots=True)
class EditCase:
    """One question to a sequence that one method has amended. `reference` is the decision of the corrected text."""

    question: str
    cosine: float
    kl: float
    same_top: bool
    decision: str
    reference: str
    decoded: int  # tokens of the prompt that were computed


@dataclass(frozen=True, slots=True)
class Tried:
    """One method, over all questions. Without cases, `refused` says why it is not possible here."""

    method: str
    cases: tuple[EditCase, ...] = ()
    refused: NotesError | None = None

    @property
    def same(self) -> int:
        """Decisions as the recompute's."""
        return sum(case.decision == case.reference for case in self.cases)

    @property
    def passed(self) -> bool:
        return bool(self.cases) and self.same == len(self.cases)

    def mean(self, what: str) -> float | None:
        """Of `cosine`, `kl` or `decoded` over the cases; None without any."""
        return fmean(float(getattr(case, what)) for case in self.cases) if self.cases else None


@dataclass(frozen=True, slots=True)
class Edits:
    """The methods that were tried, and the one that holds where none is named."""

    tried: tuple[Tried, ...]
    auto: str
    why: str
    all: bool  # every method was asked for: one that fails is a finding then, unless it is `auto`

    def __repr__(self) -> str:
        shown = [f"{one.method} {one.same} of {len(one.cases)}" if one.cases else one.method for one in self.tried]
        return f"Edits({'passed' if self.passed else 'failed'}, {', '.join(shown)})"

    @property
    def failures(self) -> tuple[Notice, ...]:
        """Each decision of a method that was asked for, and is possible, that is not the recompute's."""
        tried = [one for one in self.tried if one.cases and (not self.all or one.method == self.auto)]
        if not tried:
            return (Notice("none of these methods is possible here, so nothing was verified"),)
        return tuple(
            Notice(f"{one.method}: {other_decision(case.question, case.decision, case.reference)}")
            for one in tried
            for case in one.cases
            if case.decision != case.reference
        )

    @property
    def passed(self) -> bool:
        """Whether those that were asked for, and are possible, decide as the recompute; at least one is."""
        return not self.failures


def verify_edits(
    workspace: Workspace,
    prompt: Prompt,
    questions: Sequence[str],
    methods: Sequence[str],
    *,
    choices: Sequence[str] | None = None,
    seam: int = DEFAULT_SEAM,
    progress: Progress | None = None,
) -> Edits:
    """Amend the prompt's skills by its values, by each method, and ask each question (the prompt's own is not asked).

    `methods` may hold `auto` and `all`. Raise NotesError for one that does not exist, for values that change nothing,
    and where there is no question. `progress` is called during each recompute.
    """
    check_questions(questions)
    if any(one.media for one in prompt.segments):
        what = "of a skill with an image nothing is edited, so there are no methods to compare"
        raise UnsupportedError(what, "Leave it out, and correct it by an erratum")
    if not changes_of(workspace, prompt):
        values = ", ".join(f"{name}={value}" for name, value in prompt.fields.items())
        raise NotesError(f"there is nothing to verify: the text says {values} already")
    auto, why = method_for(workspace, prompt)
    named = {AUTO: [auto], ALL: [*map(Method, METHODS), auto]}
    chosen = [named.get(name) or [Method.parse(name, also=tuple(named))] for name in methods]
    wanted = dict.fromkeys(method for several in chosen for method in several)
    asked = [replace(prompt, question=question) for question in questions]
    references = [_recomputed(workspace, one, choices, progress) for one in asked]
    tried = [_tried(workspace, asked, references, method, choices, seam, progress) for method in wanted]
    return Edits(tuple(tried), str(auto), why, ALL in methods)


def _recomputed(
    workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None, progress: Progress | None
) -> Reference:
    with assemble(workspace, replace(prompt, method=RECOMPUTE), splice=False, room=ANSWER) as sequence:
        sequence.flush(progress)
        return sequence.logits(), decided(sequence, choices)[0]


def _tried(
    workspace: Workspace,
    asked: Sequence[Prompt],
    references: Sequence[Reference],
    method: Method,
    choices: Sequence[str] | None,
    seam: int,
    progress: Progress | None,
) -> Tried:
    cases = []
    for prompt, (wanted, reference) in zip(asked, references, strict=True):
        try:
            sequence = assemble(workspace, replace(prompt, method=method), seam=seam, room=ANSWER)
        except NotesError as error:  # this model, or the way the skill was compiled, has other methods
            return Tried(str(method), refused=error)
        with sequence:
            sequence.flush(progress)
            found = sequence.logits()
            decoded = sequence.decoded
            decision, _ = decided(sequence, choices)
        near = cosine(found, wanted), divergence(found, wanted), same_top(found, wanted)
        cases.append(EditCase(prompt.question, *near, decision, reference, decoded))
    return Tried(str(method), tuple(cases))

"""Verifying: does a spliced and corrected prompt decide as a full recompute does, on this model?

Every case is laid out four ways: spliced; recomputed from the same tokens (the reference); spliced without rotation
(the control, which must be worse); and, where errata change fields, the corrected text recomputed without errata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from notes_cli.editing.change import change
from notes_cli.engine.decision import decide
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError
from notes_cli.library.sessions import SkillText
from notes_cli.measure.compare import cosine, divergence, same_top
from notes_cli.text.erratum import Erratum
from notes_cli.work.choosing import DEFAULT_PLACE, DEFAULT_SEAM
from notes_cli.work.prompting import Prompt, lay
from notes_cli.work.workspace import Workspace

COSINE = 0.99  # a mean below this fails
ANSWER = 24  # tokens of an answer that are compared where no choices are given


@dataclass(frozen=True, slots=True)
class Case:
    """One question, measured. Decisions are the chosen answer, or the greedy answer's text without choices.

    `corrected` is the decision of the corrected text recomputed; None where no erratum changes a field. `margin` is
    the distance between the two best choices in the reference, None without choices.
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
    control_cosine: float
    control_decision: str
    spliced: int
    moved: bool  # whether any row was rotated; if not, the control is the splice itself

    @property
    def same_decision(self) -> bool:
        return self.decision == self.reference

    @property
    def right(self) -> bool:
        """Decides as the reference, and as the corrected text where there is one."""
        return self.same_decision and self.corrected in (None, self.decision)


@dataclass(frozen=True, slots=True)
class Report:
    """All cases of one verification."""

    cases: tuple[Case, ...]

    @property
    def cosine(self) -> float:
        return fmean(case.cosine for case in self.cases)

    @property
    def kl(self) -> float:
        return fmean(case.kl for case in self.cases)

    @property
    def control_cosine(self) -> float:
        return fmean(case.control_cosine for case in self.cases)

    @property
    def passed(self) -> bool:
        return self.cosine >= COSINE and all(case.right for case in self.cases)


def verify(
    workspace: Workspace,
    segments: Sequence[Segment],
    questions: Sequence[str],
    errata: Sequence[Erratum],
    *,
    choices: Sequence[str] | None = None,
    system: str | None = None,
    seam: int = DEFAULT_SEAM,
    wording: str | None = None,
    place: str = DEFAULT_PLACE,
) -> Report:
    """Measure every question as it stands and, if there are errata, with them."""
    check_questions(questions)
    corrections: list[Sequence[Erratum]] = [(), errata] if errata else [()]
    cases = [
        _measure(workspace, Prompt(question, segments, correction, system, wording, place=place), choices, seam)
        for correction in corrections
        for question in questions
    ]
    return Report(tuple(cases))


def check_questions(questions: Sequence[str]) -> None:
    """Raise NotesError if there is none."""
    if not questions:
        raise NotesError("there is nothing to verify: no question, and no field to ask for. Give --question")


def field_questions(segments: Sequence[Segment] | Sequence[SkillText]) -> list[str]:
    """What can be asked of any skill: the value of each of its fields."""
    names = dict.fromkeys(span.name for segment in segments for span in segment.fields)
    return [f"What is the {name.replace('_', ' ').replace('-', ' ')}?" for name in names]


def corrected_segment(segment: Segment, values: dict[str, str], workspace: Workspace) -> Segment:
    """The segment of the text with new values: tokens only, to be recomputed. Fields it does not have are skipped."""
    found = change(workspace.model, segment, values)
    bare = replace(segment, fields=(), layers=())
    return replace(bare, text=found.text, tokens=found.tokens) if found else bare


def _measure(workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None, seam: int) -> Case:
    reference = lay(workspace, prompt, splice=False, room=ANSWER)
    wanted = reference.logits()
    reference_decision, margin = decided(reference, choices)

    spliced = lay(workspace, prompt, seam=seam, room=ANSWER)
    found = spliced.logits()
    decision, _ = decided(spliced, choices)
    moved = any(piece.moved for piece in spliced.pieces)
    count = spliced.count("spliced")

    control = lay(workspace, prompt, seam=seam, rotate=False, room=ANSWER)
    unrotated = control.logits()
    control_decision, _ = decided(control, choices)

    return Case(
        question=prompt.question,
        errata=tuple(erratum.text for erratum in prompt.errata),
        cosine=cosine(found, wanted),
        kl=divergence(found, wanted),
        same_top=same_top(found, wanted),
        decision=decision,
        reference=reference_decision,
        margin=margin,
        corrected=_corrected_decision(workspace, prompt, choices),
        control_cosine=cosine(unrotated, wanted),
        control_decision=control_decision,
        spliced=count,
        moved=moved,
    )


def _corrected_decision(workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None) -> str | None:
    values = {erratum.field: erratum.value for erratum in prompt.errata if erratum.field and erratum.value}
    if not values:
        return None
    free = [erratum for erratum in prompt.errata if erratum.field is None]
    segments = [corrected_segment(segment, values, workspace) for segment in prompt.segments]
    notebook = lay(workspace, replace(prompt, segments=segments, errata=free), splice=False, room=ANSWER)
    return decided(notebook, choices)[0]


def decided(notebook: Notebook, choices: Sequence[str] | None) -> tuple[str, float | None]:
    """The decision at the end of a notebook, and its margin where there are choices."""
    if choices:
        decision = decide(notebook, choices)
        return decision.choice, decision.margin
    with Sampler(SamplerOptions(temperature=0.0)) as sampler:
        return notebook.context.model.text(notebook.generate(sampler, ANSWER)).strip(), None

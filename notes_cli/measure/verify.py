"""Verifying: does a spliced and corrected prompt decide as a full recompute does, on this model?

Every case is assembled in four ways: spliced; recomputed from the same tokens (the reference); spliced without rotation
(the control); and, where errata change fields, the corrected text recomputed without errata.

What the control must do: the keys of the first layer, which follow from a token and its position alone, must be off by
WORSE times as much as those of the splice. Deeper rows and logits also hold what precedes the skill, so they say
how near the splice is, but not for sure whether keys were rotated. Where nothing was moved, or the first layer does not
rotate, the control cannot show anything, and that is what is said of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.change import change
from notes_cli.engine.decision import decide
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment, quantized
from notes_cli.errors import Help, NotesError, Notice, Progress
from notes_cli.measure.compare import cosine, divergence, same_top
from notes_cli.measure.composed import Composed
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.corrections import known_fields
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.settings import DEFAULT_SEAM
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.state import SkillText
from notes_cli.text.erratum import Erratum

COSINE = 0.99  # a mean below this fails
WORSE = 3.0  # times the error of the splice's first keys: that of the control must be more
KEYS = 64  # tokens of a skill whose keys are compared
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
    # Relative errors of the keys of the first layer, of what was moved; None where there are none that rotate.
    keys: float | None = None
    control_keys: float | None = None

    @property
    def same_decision(self) -> bool:
        return self.decision == self.reference

    @property
    def right(self) -> bool:
        """Decides as the reference, and as the corrected text where there is one."""
        return self.same_decision and self.corrected in (None, self.decision)


@dataclass(frozen=True, slots=True)
class Control:
    """What the control has shown: `caught` or `missed`, or `nothing`, where it cannot show anything; and why."""

    verdict: str
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """All cases of one verification."""

    cases: tuple[Case, ...]
    composition: Composed | None = None  # where there are several skills
    system: str = ""  # what precedes the skills
    small: tuple[tuple[str, str, int], ...] = ()  # skills whose files keep quantized rows: name, as what, bytes

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
    def control_cosine(self) -> float:
        return fmean(case.control_cosine for case in self.cases)

    @property
    def control(self) -> Control:
        """What the control has shown."""
        moved = [case for case in self.cases if case.moved]
        pairs = [(case.keys, case.control_keys) for case in moved]
        if shown := [(keys, off) for keys, off in pairs if keys is not None and off is not None]:
            keys, off = max(keys for keys, _ in shown), min(off for _, off in shown)
            caught = all(off > WORSE * keys for keys, off in shown)
            return Control(
                "caught" if caught else "missed",
                f"without rotation the first layer's keys are off by {off:.1e}, with it by {keys:.1e} "
                f"(they must be off by {WORSE:g} times as much)",
            )
        if moved:
            return Control("nothing", "the first layer of this model does not rotate its keys, or has none")
        if any(case.spliced for case in self.cases):
            return Control("nothing", "rows were reused where they were compiled")
        return Control("nothing", "nothing was reused")

    @property
    def failures(self) -> tuple[Notice, ...]:
        """Each bar that was missed, by which figure."""
        found = below_cosine([(case.question, case.cosine) for case in self.cases])
        for case in self.cases:
            if not case.same_decision:
                found.append(other_decision(case.question, case.decision, case.reference))
            elif not case.right:
                found.append(other_decision(case.question, case.decision, case.corrected or "", "the corrected text's"))
        if self.control.verdict == "missed":
            found.append(Notice(f"the control was not caught: {self.control.why}"))
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


def other_decision(row: str, decision: str | None, reference: str | None, whose: str = "the recompute's") -> Notice:
    """The bar that a row misses whose decision is another than it should be."""
    return Notice(f"{row!r} decides {decision!r}, {whose} decision is {reference!r}")


def verify(
    workspace: Workspace,
    prompt: Prompt,
    questions: Sequence[str],
    *,
    choices: Sequence[str] | None = None,
    seam: int = DEFAULT_SEAM,
    progress: Progress | None = None,
) -> Report:
    """Ask each question (the prompt's own is not asked) without the prompt's errata and, if there are any, with them.
    `progress` is told of each recompute."""
    check_questions(questions)
    corrections: list[Sequence[Erratum]] = [(), prompt.errata] if prompt.errata else [()]
    asked = [replace(prompt, question=question, errata=errata) for errata in corrections for question in questions]
    small = [(one.name, one.kv, one.nbytes) for one in prompt.segments if any(quantized(one.kv))]
    cases = tuple(_measure(workspace, one, choices, seam, progress) for one in asked)
    return Report(cases, system=prompt.system or "", small=tuple(small))


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
    workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None, seam: int, progress: Progress | None
) -> Case:
    with assemble(workspace, prompt, seam=seam, room=ANSWER) as spliced:
        found = spliced.logits()
        places = [(piece.position, min(piece.tokens, KEYS)) for piece in spliced.pieces if piece.moved]
        count = spliced.count("spliced")
        keys = _keys(spliced, places)
        decision, _ = decided(spliced, choices)

    with assemble(workspace, prompt, seam=seam, rotate=False, room=ANSWER) as control:
        unrotated = control.logits()
        control_keys = _keys(control, places)
        control_decision, _ = decided(control, choices)

    with assemble(workspace, prompt, splice=False, room=ANSWER) as reference:
        reference.flush(progress)
        wanted = reference.logits()
        right = _keys(reference, places)
        reference_decision, margin = decided(reference, choices)

    return Case(
        question=prompt.question,
        errata=tuple(erratum.text for erratum in prompt.errata),
        cosine=cosine(found, wanted),
        kl=divergence(found, wanted),
        same_top=same_top(found, wanted),
        decision=decision,
        reference=reference_decision,
        margin=margin,
        corrected=_corrected_decision(workspace, prompt, choices, progress),
        control_cosine=cosine(unrotated, wanted),
        control_decision=control_decision,
        spliced=count,
        moved=bool(places),
        keys=_off(keys, right),
        control_keys=_off(control_keys, right),
    )


def _keys(notebook: Notebook, places: Sequence[tuple[int, int]]) -> NDArray[np.float32] | None:
    """Keys of the first layer of so many tokens from each position on, one after the other, [n, n_embd_k]; None where
    it does not rotate them, or there are none."""
    context = notebook.context
    first = next((index for index, layer in enumerate(context.layers) if layer.part == "attention"), None)
    if not places or first is None or context.layers[first].rope < 0:
        return None
    if context.model.recurrent:  # keys of later layers follow from a state, too, and rows are read as a whole
        if context.layers[first].layer:
            return None
        whole = notebook.read(0, len(notebook), "f32")[0][first].k
        return np.concatenate([whole[start : start + n] for start, n in places])
    read = [notebook.read(start, start + n, "f32")[0][first].k for start, n in places]
    return np.concatenate(read)


def _off(found: NDArray[np.float32] | None, wanted: NDArray[np.float32] | None) -> float | None:
    """The error, relative to what is wanted."""
    if found is None or wanted is None:
        return None
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _corrected_decision(
    workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None, progress: Progress | None
) -> str | None:
    said = [erratum for erratum in prompt.errata if erratum.field]
    names = {span.name for one in prompt.segments if one.media for span in one.fields}
    if not said or names & {erratum.field for erratum in said}:  # a text with images in it is not written again
        return None
    free = [erratum for erratum in prompt.errata if erratum.field is None]
    segments = [
        corrected_segment(
            segment,
            {one.field: one.value for one in said if one.field and one.value and one.skill in ("", segment.name)},
            workspace,
        )
        for segment in prompt.segments
    ]
    corrected = replace(prompt, segments=segments, errata=free)
    with assemble(workspace, corrected, splice=False, room=ANSWER) as notebook:
        notebook.flush(progress)
        return decided(notebook, choices)[0]


def decided(notebook: Notebook, choices: Sequence[str] | None) -> tuple[str, float | None]:
    """The decision at the end of a notebook, and its margin where there are choices."""
    if choices:
        decision = decide(notebook, choices)
        return decision.choice, decision.margin
    with Sampler(SamplerOptions(temperature=0.0)) as sampler:
        return notebook.context.model.text(notebook.generate(sampler, ANSWER)).strip(), None

"""Verifying edit methods: does a notebook that each has amended decide as a full recompute of the corrected text?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.methods import METHODS, RECOMPUTE, Method
from notes_cli.errors import NotesError, Notice, Progress, UnsupportedError
from notes_cli.measure.answers import ANSWER
from notes_cli.measure.compare import cosine, divergence, same_top
from notes_cli.measure.verify import check_questions, decided, other_decision
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt, changes_of
from notes_cli.runtime.settings import AUTO, DEFAULT_SEAM
from notes_cli.runtime.settling import method_for
from notes_cli.runtime.workspace import Workspace

ALL = "all"

Reference = tuple[NDArray[np.float32], str]  # logits after the prompt, and the decision


@dataclass(frozen=True, slots=True)
class EditCase:
    """One question to a notebook that one method has amended. `reference` is the decision of the corrected text."""

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
    with assemble(workspace, replace(prompt, method=RECOMPUTE), splice=False, room=ANSWER) as notebook:
        notebook.flush(progress)
        return notebook.logits(), decided(notebook, choices)[0]


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
            notebook = assemble(workspace, replace(prompt, method=method), seam=seam, room=ANSWER)
        except NotesError as error:  # this model, or the way the skill was compiled, has other methods
            return Tried(str(method), refused=error)
        with notebook:
            notebook.flush(progress)
            found = notebook.logits()
            decoded = notebook.decoded
            decision, _ = decided(notebook, choices)
        near = cosine(found, wanted), divergence(found, wanted), same_top(found, wanted)
        cases.append(EditCase(prompt.question, *near, decision, reference, decoded))
    return Tried(str(method), tuple(cases))

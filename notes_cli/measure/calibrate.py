"""Calibrating: which edit method, wording, seam and place hold on this model, measured over a battery of decisions.

Each case is decided by full recompute with the old value and with the new one. Where these differ the model has heard
the field, and a method is asked to decide as the recompute with the new value does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.influence import influence
from notes_cli.editing.methods import Method
from notes_cli.engine.decision import decide
from notes_cli.engine.sampler import SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import UnsupportedError
from notes_cli.library.profiles import Measured, Profile
from notes_cli.measure.compare import cosine
from notes_cli.text.battery import Case
from notes_cli.text.erratum import shipped_wordings
from notes_cli.text.wording import verify_system
from notes_cli.work.choosing import DEFAULT_PLACE, DEFAULT_SEAM
from notes_cli.work.compiling import compile_skill
from notes_cli.work.prompting import Prompt, lay
from notes_cli.work.thinking import decide_after, think
from notes_cli.work.workspace import Workspace

# In classes of cost, the cheapest first: a few tokens, however long the skill; those behind the field.
CLASSES = (("erratum", "field", "field+erratum", "selective@16"), ("suffix",))
WAYS = ("direct", "reasoned")
SEAMS = (0, 1, 2, 4)
TRUST = 0.95  # of the decisions must be the recompute's
HEARD = 0.5  # of the cases must be decided by the field, or the model does not read
NEAR = 1.25  # a longer seam must bring the logits nearer than this
THINK = 256  # tokens of a chain of thought

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Found:
    """What one way of doing it came to in one case."""

    choice: str
    logits: NDArray[np.float32]
    decoded: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Recomputed:
    """What a full recompute decides with the old value, and with the new one."""

    before: _Found
    after: _Found

    @property
    def heard(self) -> bool:
        """Whether the field decides."""
        return self.before.choice != self.after.choice


class _Tally:
    """Observations by what, name and way."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], list[tuple[bool, bool, float, int, float]]] = defaultdict(list)

    def add(self, what: str, name: str, way: str, found: _Found, reference: _Found, right: str) -> None:
        near = cosine(found.logits, reference.logits)
        same = found.choice == reference.choice
        self._rows[what, name, way].append((same, found.choice == right, near, found.decoded, found.seconds))

    def measured(self) -> list[Measured]:
        found = []
        for (what, name, way), rows in self._rows.items():
            same, right, near, decoded, seconds = (list(column) for column in zip(*rows, strict=True))
            counts = len(rows), sum(same), sum(right)
            means = round(fmean(near), 5), round(fmean(decoded), 1), round(1000 * fmean(seconds), 1)
            found.append(Measured(what, name, way, *counts, *means))
        return found


def calibrate(workspace: Workspace, cases: Sequence[Case], progress: Progress | None = None) -> Profile:
    """Measure the model over the cases: wordings, seams and places first, then the methods in the wording that was
    best. `progress` counts each case twice. Raise UnsupportedError where its rows cannot be kept at all."""
    tally, heard = _Tally(), dict.fromkeys(WAYS, 0)
    cache = workspace.context.options.cache
    told = progress or (lambda done, of: None)
    recomputed = []  # directly, of each case: the dearest part, so done once
    for number, case in enumerate(cases, 1):
        prompt = _prompt(case, compile_skill(workspace, case.skill))
        found = _recomputed(workspace, case, prompt)
        _wordings(workspace, case, prompt, found, tally)
        _unedited(workspace, case, replace(prompt, values={}), found.before, tally)
        recomputed.append(found)
        told(number, 2 * len(cases))
    wording = _wording(tally.measured())
    for number, (case, found) in enumerate(zip(cases, recomputed, strict=True), len(cases) + 1):
        prompt = replace(_prompt(case, _influenced(workspace, case)), wording=wording)
        thinking = replace(prompt, think=True)
        heard["direct"] += _methods(workspace, case, prompt, found, "direct", tally)
        found = _recomputed(workspace, case, thinking)
        heard["reasoned"] += _methods(workspace, case, thinking, found, "reasoned", tally)
        told(number, 2 * len(cases))
    measured = tally.measured()
    return Profile(
        identity=workspace.identity,
        cache=cache,
        cases=len(cases),
        heard=heard,
        methods={way: choose(measured, way, heard[way] / len(cases)) for way in WAYS},
        wording=wording,
        seam=_seam(measured),
        place=_place(measured),
        measured=tuple(measured),
    )


def _prompt(case: Case, segment: Segment) -> Prompt:
    """Behind a system text: skills stand elsewhere than where they were compiled, as they mostly will."""
    return Prompt(case.question, [segment], system=verify_system(), values={case.field: case.value})


def _influenced(workspace: Workspace, case: Case) -> Segment:
    """The case's skill with the influence of its field."""
    segment = compile_skill(workspace, case.skill)
    with workspace.compiler() as context:
        return replace(segment, influence={case.field: influence(context, segment, case.field)})


def _recomputed(workspace: Workspace, case: Case, prompt: Prompt) -> _Recomputed:
    before = _decided(workspace, replace(prompt, values={}), case, splice=False)
    return _Recomputed(before, _decided(workspace, replace(prompt, method=Method("recompute")), case, splice=False))


def _wordings(workspace: Workspace, case: Case, prompt: Prompt, reference: _Recomputed, tally: _Tally) -> None:
    """All wordings of an erratum, on a case that is heard."""
    if not reference.heard:
        return
    for wording in shipped_wordings().forms:
        said = replace(prompt, method=Method("erratum"), wording=wording)
        tally.add("wording", wording, "direct", _decided(workspace, said, case), reference.after, case.right[1])


def _methods(workspace: Workspace, case: Case, prompt: Prompt, reference: _Recomputed, way: str, tally: _Tally) -> bool:
    """All methods, on a case that is heard; whether it is."""
    if not reference.heard:
        return False
    after = reference.after
    for name in ("stale", *(name for names in CLASSES for name in names)):
        try:
            found = _decided(workspace, replace(prompt, method=Method.parse(name)), case)
        except UnsupportedError:  # such models have other methods
            continue
        tally.add("method", name, way, found, after, case.right[1])
    tally.add("method", "recompute", way, after, after, case.right[1])
    return True


def _unedited(workspace: Workspace, case: Case, prompt: Prompt, reference: _Found, tally: _Tally) -> None:
    """Seams and places, on the text as it stands; `reference` is its recompute."""
    right = case.right[0]
    for seam in SEAMS:
        found = _decided(workspace, prompt, case, seam=seam)
        tally.add("seam", str(seam), "direct", found, reference, right)
        if seam == DEFAULT_SEAM:
            tally.add("place", "early", "direct", found, reference, right)
    late = replace(prompt, place="late")
    reference = _decided(workspace, late, case, splice=False)
    tally.add("place", "late", "direct", _decided(workspace, late, case), reference, right)


def _decided(
    workspace: Workspace, prompt: Prompt, case: Case, *, splice: bool = True, seam: int = DEFAULT_SEAM
) -> _Found:
    started = time.perf_counter()
    notebook = lay(workspace, prompt, splice=splice, seam=seam, room=THINK if prompt.think else 0)
    logits = notebook.logits()
    decoded = notebook.decoded
    if prompt.think:
        thought = think(workspace, notebook, SamplerOptions(), THINK)
        choice = decide_after(workspace, notebook, case.choices, thought).choice
    else:
        choice = decide(notebook, case.choices).choice
    return _Found(choice, logits, decoded, time.perf_counter() - started)


def choose(measured: Sequence[Measured], way: str, heard: float) -> str:
    """The method that agrees best in the cheapest class that holds a trustworthy one; else recompute."""
    if heard < HEARD:
        return "recompute"
    scores = {one.name: one for one in measured if one.what == "method" and one.way == way}
    for names in CLASSES:
        tried = [scores[name] for name in names if name in scores]
        best = max(tried, key=lambda one: (one.same, -one.decoded), default=None)
        if best is not None and best.agreement >= TRUST:
            return best.name
    return "recompute"


def _wording(measured: Sequence[Measured]) -> str:
    """The wording that agrees best; the default one unless another is better."""
    default = shipped_wordings().default
    tried = [one for one in measured if one.what == "wording"]
    best = max(tried, key=lambda one: (one.same, one.name == default), default=None)
    return best.name if best else default


def _seam(measured: Sequence[Measured]) -> int:
    """The shortest of the seams that decide alike and hardly differ in their logits."""
    tried = [one for one in measured if one.what == "seam"]
    best = max(one.same for one in tried)
    good = [one for one in tried if one.same == best]
    nearest = min(1 - one.cosine for one in good)
    return min(int(one.name) for one in good if 1 - one.cosine <= NEAR * nearest)


def _place(measured: Sequence[Measured]) -> str:
    """Where a spliced skill is read right more often."""
    tried = [one for one in measured if one.what == "place"]
    return max(tried, key=lambda one: (one.right, one.name == DEFAULT_PLACE)).name

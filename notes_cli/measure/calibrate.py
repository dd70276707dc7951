"""Calibrating: which edit method, wording, seam and place hold on this model, measured over a battery of decisions.

Each case is decided in every way, and what is right is known: that is what counts. Agreement with a full recompute is
told, but a recompute may itself be wrong: a model that overlooks a field in a long text may well follow a correction.
What holds without a profile stays unless something else is proven better (proof.py).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import notes_cli
from notes_cli.editing.methods import ERRATUM, RECOMPUTE, STALE, Cost, calibrated
from notes_cli.editing.select_tokens import influence
from notes_cli.engine.loop import run
from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, Notice, Progress, UnsupportedError
from notes_cli.library.profiles import WAYS, Measured, Profile, Profiles
from notes_cli.library.unfinished import Keep, Unfinished, keep_nothing, step_name
from notes_cli.measure.battery import Case, Pair
from notes_cli.measure.carried_state import measure_carried
from notes_cli.measure.compare import cosine, verify_system
from notes_cli.measure.composition import measure_pairs
from notes_cli.measure.significance import LEAST, choose
from notes_cli.runtime.answering import NO_CALLBACKS, Callbacks
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import choose_task
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.settings import DEFAULT_PLACE, DEFAULT_SEAM
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import shipped_wordings
from notes_cli.text.sizes import human_time

CANDIDATES = calibrated()
SAFEST = tuple(map(str, CANDIDATES))
# In classes of cost, the cheapest first.
CLASSES = tuple(tuple(str(method) for method in CANDIDATES if method.record.cost is cost) for cost in Cost)
SEAMS = (0, 1, 2, 4)  # a longer one is safer: more is recomputed
THINK = 256  # tokens of a chain of thought


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
    def decisive(self) -> bool:
        """Whether the field decides."""
        return self.before.choice != self.after.choice


class _Tally:
    """Observations by what, name and way, in the order of the cases."""

    def __init__(self) -> None:
        self.rows: list[Sequence[Any]] = []  # as JSON has them

    def add(self, what: str, name: str, way: str, found: _Found, reference: _Found, right: str) -> None:
        near = cosine(found.logits, reference.logits)
        same = found.choice == reference.choice
        self.rows.append([what, name, way, same, found.choice == right, near, found.decoded, found.seconds])

    def _grouped(self) -> dict[tuple[str, str, str], list[Sequence[Any]]]:
        found: dict[tuple[str, str, str], list[Sequence[Any]]] = defaultdict(list)
        for what, name, way, *row in self.rows:
            found[what, name, way].append(row)
        return found

    def right(self, what: str, way: str = "direct") -> dict[str, list[bool]]:
        """By name: whether each case was right. Without what was not possible in all cases, and `stale`."""
        found = {
            name: [row[1] for row in rows]
            for (one, name, by), rows in self._grouped().items()
            if (one, by) == (what, way) and name != str(STALE)
        }
        most = max(map(len, found.values()), default=0)
        return {name: rows for name, rows in found.items() if len(rows) == most}

    def measured(self) -> list[Measured]:
        found = []
        for (what, name, way), rows in self._grouped().items():
            same, right, near, decoded, seconds = (list(column) for column in zip(*rows, strict=True))
            counts = len(rows), sum(same), sum(right)
            means = round(fmean(near), 5), round(fmean(decoded), 1), round(1000 * fmean(seconds), 1)
            found.append(Measured(what, name, way, *counts, *means))
        return found


class Calibration(NamedTuple):
    """What was measured, and where it is kept: nowhere, if the cases were too few to choose by."""

    profile: Profile
    path: Path | None


def calibrate_and_keep(
    workspace: Workspace, cases: Sequence[Case], callbacks: Callbacks = NO_CALLBACKS, pairs: Sequence[Pair] = ()
) -> Calibration:
    """Calibrate, and keep the profile for whoever asks this model from then on; without pairs what was known of
    composition stays. The first notice is how long it will take. What was measured is kept if it is stopped, and the
    next call goes on with that. Raise what `calibrate` raises."""
    if len(cases) < LEAST:
        callbacks.on_notice(Notice(_duration(workspace, cases, pairs, ())))
        with callbacks.progress("measuring decisions", unit="steps") as update:
            return Calibration(calibrate(workspace, cases, update, pairs), None)
    writer, cache = f"notes {notes_cli.__version__}", workspace.context.options.cache
    profiles = Profiles(workspace.paths.profiles)
    kind = f"{writer}, {workspace.identity}, {cache}, {shipped_wordings()}"
    unfinished = Unfinished(profiles.path(workspace.identity, cache), kind)
    callbacks.on_notice(Notice(_duration(workspace, cases, pairs, unfinished.found), Help.STOP_AND_GO_ON()))
    with callbacks.progress("measuring decisions", unit="steps") as update:
        profile = calibrate(workspace, cases, update, pairs, unfinished.keep)
    if not pairs:
        profile = _with_known(profiles, profile)
    path = profiles.save(profile, writer)
    unfinished.forget()
    return Calibration(profile, path)


def _with_known(profiles: Profiles, profile: Profile) -> Profile:
    """The profile with what an earlier one says of composition."""
    try:
        earlier = profiles.find(profile.identity, profile.cache)
    except NotesError:  # it is not followed any more
        return profile
    if earlier is None:
        return profile
    rows = tuple(one for one in earlier.measured if one.what == "composition")
    return replace(profile, composition=earlier.composition, measured=(*profile.measured, *rows))


def calibrate(
    workspace: Workspace,
    cases: Sequence[Case],
    progress: Progress | None = None,
    pairs: Sequence[Pair] = (),
    keep: Keep = keep_nothing,
) -> Profile:
    """Measure the model over the cases: wordings, seams and places first, then the methods in the wording that was
    best; of recurrent layers, whether their state may be carried through skills; over the pairs, whether skills that
    were compiled apart compose. `progress` counts each case twice, a third time for a state, and each pair. `keep`:
    keeps what each of these steps found. Raise UnsupportedError where its rows cannot be kept at all."""
    tally, decisive = _Tally(), dict.fromkeys(WAYS, 0)
    cache = workspace.context.options.cache
    told = progress or (lambda done, of: None)
    state = len(cases) if workspace.context.supports("carry") is None else 0
    steps = 2 * len(cases) + state + len(pairs)
    done = count(1)
    recomputed: dict[int, _Recomputed] = {}  # directly, of each case: the dearest part, so done once
    for number, case in enumerate(cases):
        tally.rows += keep(step_name("forms", number, case), partial(_forms, workspace, number, case, recomputed))
        told(next(done), steps)
    wording = _one_of(tally, "wording", shipped_wordings().default)
    for number, case in enumerate(cases):
        measure = partial(_edits, workspace, number, case, wording, recomputed)
        rows, by = keep(f"{step_name('edits', number, case)} {wording}", measure)
        tally.rows += rows
        decisive = {way: decisive[way] + by[way] for way in WAYS}
        told(next(done), steps)
    carry, carried = measure_carried(workspace, cases, lambda: told(next(done), steps), keep)
    composition, composed = measure_pairs(workspace, pairs, lambda: told(next(done), steps), keep=keep)
    chosen = {way: choose(tally.right("method", way), str(ERRATUM), CLASSES, SAFEST) for way in WAYS}
    return Profile(
        identity=workspace.identity,
        cache=cache,
        cases=len(cases),
        decisive=decisive,
        methods={way: choice.name for way, choice in chosen.items()},
        wording=wording,
        seam=int(_one_of(tally, "seam", str(DEFAULT_SEAM))),
        place=_one_of(tally, "place", DEFAULT_PLACE),
        measured=(*tally.measured(), *carried, *composed),
        verdicts={way: choice.why for way, choice in chosen.items()},
        composition=composition,
        carry=carry,
    )


def _duration(workspace: Workspace, cases: Sequence[Case], pairs: Sequence[Pair], kept: Collection[str]) -> str:
    """About how long a calibration takes, for people: by three decisions of the first case. `kept`: the steps that
    were measured before."""
    case = cases[0]
    prompt = _prompt(case, compile_skill(workspace, case.skill))
    whole, thought = (
        _decided(workspace, replace(prompt, method=RECOMPUTE, think=think), case, splice=False).seconds
        for think in (False, True)
    )
    spliced = _decided(workspace, replace(prompt, method=ERRATUM), case).seconds
    methods, forms = len(CANDIDATES), len(shipped_wordings().forms) + len(SEAMS) + 1
    seconds = {  # of a step of each kind; a compile takes about as long as a recompute
        "forms": 4 * whole + forms * spliced,
        "edits": 2 * whole + methods * spliced + (methods + 2) * thought,
    }
    if workspace.context.supports("carry") is None:
        seconds["state"] = 5 * whole + 2 * spliced
    names = [step_name(kind, number, case) for kind in seconds for number, case in enumerate(cases)]
    if workspace.context.supports("splice") is None:
        seconds["pair"] = 9 * whole + 8 * spliced
        names += [step_name("pair", number, pair) for number, pair in enumerate(pairs)]
    known = {" ".join(name.split()[:3]) for name in kept}  # without the wording
    left = [name for name in names if name not in known]
    takes = f"takes about {human_time(sum(seconds[name.split()[0]] for name in left))}"
    if len(left) < len(names):
        return f"{len(names) - len(left)} of {len(names)} steps were measured before; the rest {takes}"
    many = [f"{len(cases)} decision{'s' * (len(cases) > 1)}", f"{len(pairs)} pair{'s' * (len(pairs) > 1)} of skills"]
    return f"measuring {' and '.join(many if pairs else many[:1])} {takes}"


def _forms(workspace: Workspace, number: int, case: Case, recomputed: dict[int, _Recomputed]) -> list[Sequence[Any]]:
    """Wordings, seams and places in one case, whose recomputes are added to the others'."""
    tally = _Tally()
    prompt = _prompt(case, compile_skill(workspace, case.skill))
    found = recomputed[number] = _recomputed(workspace, case, prompt)
    _wordings(workspace, case, prompt, found, tally)
    _unedited(workspace, case, replace(prompt, fields={}), found.before, tally)
    return tally.rows


def _edits(
    workspace: Workspace, number: int, case: Case, wording: str, recomputed: Mapping[int, _Recomputed]
) -> tuple[list[Sequence[Any]], dict[str, bool]]:
    """The edit methods in one case, and by way whether its field decides."""
    tally = _Tally()
    prompt = replace(_prompt(case, _influenced(workspace, case)), wording=wording)
    thinking = replace(prompt, think=True)
    direct = recomputed[number] if number in recomputed else _recomputed(workspace, case, prompt)
    by = {"direct": _methods(workspace, case, prompt, direct, "direct", tally)}
    by["reasoned"] = _methods(workspace, case, thinking, _recomputed(workspace, case, thinking), "reasoned", tally)
    return tally.rows, by


def _one_of(tally: _Tally, what: str, default: str) -> str:
    """The wording, the seam or the place that is proven better than the default, or the default. They cost alike; of
    seams the longer one is the safer."""
    right = tally.right(what)
    safest = sorted(right, key=lambda name: -int(name) if what == "seam" else name != default)
    return choose(right, default, [safest], safest).name


def _prompt(case: Case, segment: Segment) -> Prompt:
    """With a system text: skills are not where they were compiled, as they mostly will not be."""
    return Prompt(case.question, [segment], system=verify_system(), fields={case.field: case.value})


def _influenced(workspace: Workspace, case: Case) -> Segment:
    """The case's skill with the influence of its field."""
    segment = compile_skill(workspace, case.skill)
    with workspace.scratch(len(segment.context) + len(segment) + 8) as sequence:  # another value may be longer
        return replace(segment, influence={case.field: influence(sequence, segment, case.field)})


def _recomputed(workspace: Workspace, case: Case, prompt: Prompt) -> _Recomputed:
    before = _decided(workspace, replace(prompt, fields={}), case, splice=False)
    return _Recomputed(before, _decided(workspace, replace(prompt, method=RECOMPUTE), case, splice=False))


def _wordings(workspace: Workspace, case: Case, prompt: Prompt, reference: _Recomputed, tally: _Tally) -> None:
    """All wordings of an erratum."""
    for wording in shipped_wordings().forms:
        said = replace(prompt, method=ERRATUM, wording=wording)
        tally.add("wording", wording, "direct", _decided(workspace, said, case), reference.after, case.right[1])


def _methods(workspace: Workspace, case: Case, prompt: Prompt, reference: _Recomputed, way: str, tally: _Tally) -> bool:
    """All methods; whether the field decides when all is recomputed."""
    after = reference.after
    for method in (STALE, *(method for method in CANDIDATES if method != RECOMPUTE)):
        try:
            found = _decided(workspace, replace(prompt, method=method), case)
        except UnsupportedError:  # such models have other methods
            continue
        tally.add("method", str(method), way, found, after, case.right[1])
    tally.add("method", str(RECOMPUTE), way, after, after, case.right[1])
    return reference.decisive


def _unedited(workspace: Workspace, case: Case, prompt: Prompt, reference: _Found, tally: _Tally) -> None:
    """Seams and places, on the text as it is; `reference` is its recompute."""
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
    room = THINK if prompt.think else 0
    with assemble(workspace, prompt, splice=splice, seam=seam, room=room) as sequence:
        logits = sequence.logits()
        decoded = sequence.decoded
        choice = run(choose_task(workspace, sequence, case.choices, room)).choice
    return _Found(choice, logits, decoded, time.perf_counter() - started)

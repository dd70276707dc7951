"""Calibrates a model: measures which edit method, wording, seam and place give correct decisions, as a profile.

Each case is decided with every setting and compared with the known correct choice. Agreement with a full recompute is
reported, but does not count: a recompute may be wrong itself, where a model overlooks a field in a long text but
follows a correction. A default changes only if another setting is proven better (battery.py). Also determines
whether the model takes notes during prefill, and reports a profile in Markdown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import notes_cli
from notes_cli.editing.methods import ERRATUM, FIELD, RECOMPUTE, STALE, SUFFIX, Cost, calibrated, influence
from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, Notice, Progress, UnsupportedError
from notes_cli.library.profiles import (
    WAYS,
    CalibrationCheckpoint,
    Keep,
    Measured,
    Profile,
    Profiles,
    keep_nothing,
    step_name,
)
from notes_cli.measure.battery import LEAST, Case, Pair, choose, format_count, interval
from notes_cli.measure.composition import SPLICED, Decision, Tally, decide, measure_carried, measure_pairs
from notes_cli.measure.verify import ONE_PREFILL, verify_system
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import DEFAULT_SEAM, Prompt
from notes_cli.runtime.request import NO_CALLBACKS, Callbacks
from notes_cli.runtime.resolve import DEFAULT_PLACE
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import shipped_wordings
from notes_cli.text.names import human_time

CANDIDATES = calibrated()
SAFEST = tuple(map(str, CANDIDATES))
# By class of cost, cheapest first.
CLASSES = tuple(tuple(str(method) for method in CANDIDATES if method.record.cost is cost) for cost in Cost)
SEAMS = (0, 1, 2, 4)  # longer is safer: more is recomputed
THINK = 256  # tokens of reasoning


class _Recomputed(NamedTuple):
    """Decisions of a full recompute with the old value, and with the new one."""

    before: Decision
    after: Decision


class Calibration(NamedTuple):
    """A profile and its path; None if there were too few cases to save it."""

    profile: Profile
    path: Path | None


def calibrate_and_keep(
    workspace: Workspace, cases: Sequence[Case], callbacks: Callbacks = NO_CALLBACKS, pairs: Sequence[Pair] = ()
) -> Calibration:
    """Calibrate and save the model's profile; without `pairs`, an earlier result for composition stays. The first
    notice estimates the duration. Steps are saved as they finish, and the next call resumes after an interruption.
    Raises as `calibrate` does."""
    if len(cases) < LEAST:
        callbacks.on_notice(Notice(_duration(workspace, cases, pairs, ())))
        with callbacks.progress("measuring decisions", unit="steps") as update:
            return Calibration(calibrate(workspace, cases, update, pairs), None)
    writer, cache = f"notes {notes_cli.__version__}", workspace.context.options.cache
    profiles = Profiles(workspace.paths.profiles)
    kind = f"{writer}, {workspace.identity}, {cache}, {shipped_wordings()}"
    unfinished = CalibrationCheckpoint(profiles.path(workspace.identity, cache), kind)
    callbacks.on_notice(Notice(_duration(workspace, cases, pairs, unfinished.found), Help.STOP_AND_GO_ON()))
    with callbacks.progress("measuring decisions", unit="steps") as update:
        profile = calibrate(workspace, cases, update, pairs, unfinished.keep)
    if not pairs:
        with suppress(NotesError):  # an earlier profile that is no longer valid
            if earlier := profiles.find(profile.identity, profile.cache):
                rows = tuple(row for row in earlier.measured if row.what == "composition")
                profile = replace(profile, composition=earlier.composition, measured=(*profile.measured, *rows))
    path = profiles.save(profile, writer)
    unfinished.forget()
    return Calibration(profile, path)


def calibrate(
    workspace: Workspace,
    cases: Sequence[Case],
    progress: Progress | None = None,
    pairs: Sequence[Pair] = (),
    keep: Keep = keep_nothing,
) -> Profile:
    """Measure the model: over the cases, wordings, seams and places, then methods with the best wording, and whether
    recurrent state may be carried through skills; over the pairs, whether skills that were compiled separately
    compose. `progress` counts each case twice, a third time for recurrent state, and each pair. `keep` saves the
    result of each step. Raises UnsupportedError if K/V of this model cannot be saved."""
    tally, decisive = Tally(), dict.fromkeys(WAYS, 0)
    cache = workspace.context.options.cache
    update = progress or (lambda done, of: None)
    state = len(cases) if workspace.context.supports("carry") is None else 0
    steps = 2 * len(cases) + state + len(pairs)
    done = count(1)
    recomputed: dict[int, _Recomputed] = {}  # by case, without reasoning: the most expensive part, so done once
    for number, case in enumerate(cases):
        tally.rows += keep(step_name("forms", number, case), partial(_try_forms, workspace, number, case, recomputed))
        update(next(done), steps)
    wording = _choose_setting(tally, "wording", shipped_wordings().default)
    for number, case in enumerate(cases):
        measure = partial(_try_edits, workspace, number, case, wording, recomputed)
        rows, by = keep(f"{step_name('edits', number, case)} {wording}", measure)
        tally.rows += rows
        decisive = {way: decisive[way] + by[way] for way in WAYS}
        update(next(done), steps)
    carry, carried = measure_carried(workspace, cases, lambda: update(next(done), steps), keep)
    composition, composed = measure_pairs(workspace, pairs, lambda: update(next(done), steps), keep=keep)
    chosen = {way: choose(tally.right("method", way), str(ERRATUM), CLASSES, SAFEST) for way in WAYS}
    return Profile(
        identity=workspace.identity,
        cache=cache,
        cases=len(cases),
        decisive=decisive,
        methods={way: choice.name for way, choice in chosen.items()},
        wording=wording,
        seam=int(_choose_setting(tally, "seam", str(DEFAULT_SEAM))),
        place=_choose_setting(tally, "place", DEFAULT_PLACE),
        measured=(*tally.measured(), *carried, *composed),
        verdicts={way: choice.why for way, choice in chosen.items()},
        composition=composition,
        carry=carry,
    )


def _duration(workspace: Workspace, cases: Sequence[Case], pairs: Sequence[Pair], kept: Collection[str]) -> str:
    """Estimate the duration, as a text, from three decisions of the first case. `kept`: steps measured earlier."""
    case = cases[0]
    prompt = _prompt(case, compile_skill(workspace, case.skill))
    whole, reasoned = (
        _decide(workspace, replace(prompt, method=RECOMPUTE, think=think), case, splice=False).seconds
        for think in (False, True)
    )
    spliced = _decide(workspace, replace(prompt, method=ERRATUM), case).seconds
    methods, forms = len(CANDIDATES), len(shipped_wordings().forms) + len(SEAMS) + 1
    seconds = {  # per step, by kind; a compile takes about as long as a recompute
        "forms": 4 * whole + forms * spliced,
        "edits": 2 * whole + methods * spliced + (methods + 2) * reasoned,
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


def _try_forms(
    workspace: Workspace, number: int, case: Case, recomputed: dict[int, _Recomputed]
) -> list[Sequence[Any]]:
    """Measure wordings, seams and places in one case, and add its recomputes to `recomputed`."""
    tally = Tally()
    prompt = _prompt(case, compile_skill(workspace, case.skill))
    reference = recomputed[number] = _recompute(workspace, case, prompt)
    for wording in shipped_wordings().forms:
        decision = _decide(workspace, replace(prompt, method=ERRATUM, wording=wording), case)
        tally.add("wording", wording, "direct", decision, reference.after, case.right[1])
    _try_unedited(workspace, case, replace(prompt, fields={}), reference.before, tally)
    return tally.rows


def _try_edits(
    workspace: Workspace, number: int, case: Case, wording: str, recomputed: Mapping[int, _Recomputed]
) -> tuple[list[Sequence[Any]], dict[str, bool]]:
    """Measure the edit methods in one case. Returns rows, and whether the decision depends on the field, by way."""
    tally = Tally()
    segment = compile_skill(workspace, case.skill)
    with workspace.scratch(len(segment.context) + len(segment) + 8) as sequence:  # the counterfactual may be longer
        segment = replace(segment, influence={case.field: influence(sequence, segment, case.field)})
    prompt = replace(_prompt(case, segment), wording=wording)
    thinking = replace(prompt, think=True)
    direct = recomputed[number] if number in recomputed else _recompute(workspace, case, prompt)
    by = {"direct": _try_methods(workspace, case, prompt, direct, "direct", tally)}
    by["reasoned"] = _try_methods(workspace, case, thinking, _recompute(workspace, case, thinking), "reasoned", tally)
    return tally.rows, by


def _choose_setting(tally: Tally, what: str, default: str) -> str:
    """Return the wording, seam or place that is proven better than the default, else the default. All cost the same;
    longer seams are safer."""
    right = tally.right(what)
    safest = sorted(right, key=lambda name: -int(name) if what == "seam" else name != default)
    return choose(right, default, [safest], safest).name


def _prompt(case: Case, segment: Segment) -> Prompt:
    """Return the case's prompt, with a system text so that skills are not at the position where they were compiled."""
    return Prompt(case.question, [segment], system=verify_system(), fields={case.field: case.value})


def _recompute(workspace: Workspace, case: Case, prompt: Prompt) -> _Recomputed:
    before = _decide(workspace, replace(prompt, fields={}), case, splice=False)
    return _Recomputed(before, _decide(workspace, replace(prompt, method=RECOMPUTE), case, splice=False))


def _try_methods(
    workspace: Workspace, case: Case, prompt: Prompt, reference: _Recomputed, way: str, tally: Tally
) -> bool:
    """Measure all methods. Returns whether a recompute's decision depends on the field."""
    after = reference.after
    for method in (STALE, *(method for method in CANDIDATES if method != RECOMPUTE)):
        try:
            decision = _decide(workspace, replace(prompt, method=method), case)
        except UnsupportedError:  # on this model
            continue
        tally.add("method", str(method), way, decision, after, case.right[1])
    tally.add("method", str(RECOMPUTE), way, after, after, case.right[1])
    return reference.before.choice != after.choice


def _try_unedited(workspace: Workspace, case: Case, prompt: Prompt, reference: Decision, tally: Tally) -> None:
    """Measure seams and places on the unedited text; `reference` is its recompute."""
    right = case.right[0]
    for seam in SEAMS:
        decision = _decide(workspace, prompt, case, seam=seam)
        tally.add("seam", str(seam), "direct", decision, reference, right)
        if seam == DEFAULT_SEAM:
            tally.add("place", "early", "direct", decision, reference, right)
    late = replace(prompt, place="late")
    reference = _decide(workspace, late, case, splice=False)
    tally.add("place", "late", "direct", _decide(workspace, late, case), reference, right)


def _decide(
    workspace: Workspace, prompt: Prompt, case: Case, *, splice: bool = True, seam: int = DEFAULT_SEAM
) -> Decision:
    room = THINK if prompt.think else 0
    return decide(
        workspace, lambda: assemble(workspace, prompt, splice=splice, seam=seam, room=room), case.choices, room
    )


# The finding, and a report. The test for notes that a model takes during prefill is that of the paper
# (arXiv:2606.17107, section 3): the K/V of a field is corrected in place, and nothing after it is recomputed. A model
# that looks the field up while it decodes follows the new value; one that stored conclusions in later K/V does not.

# Columns of the last table of a report: a row per model, to compare several.
ROW = (
    *("model", "weights", "cache", "recompute", "field in place", "after a thought", "erratum", "after a thought"),
    *("skills apart", "read together", "uses", "finding"),
)
METHODS = ("method", "decoded", "cosine", "directly: right", "as recompute", "after a thought: right", "as recompute")
PAIRS = ("two skills", "decoded", "one is needed: right", "both are needed: right")
TITLE = ": does it take notes?"


class Finding(NamedTuple):
    """`kind`: takes notes, looks up, partly; unable: its decisions do not depend on such fields; open: too few
    decisions. `why`: the reason, for display."""

    kind: str
    why: str


def finding(profile: Profile) -> Finding | None:
    """Judge by the decisions after a correction in place, with exact intervals (battery.py). None for a profile
    without them, as for a model whose K/V cannot be recomputed in place.

    Only decisions that the new value changes count: those where stale K/V and a recompute disagree. A method changes as
    many of them as it agrees with the recompute more often. If recomputing everything from the field on does not change
    most of them, the decisions depend on something before the field, and the finding is `unable`."""
    stale, field, suffix = (profile.found("method", str(method)) for method in (STALE, FIELD, SUFFIX))
    if stale is None or field is None or suffix is None:
        return None
    changed = stale.cases - stale.same
    if stale.cases < LEAST:
        return Finding("open", f"{stale.cases} decisions are too few to tell, {LEAST} at least are needed")
    in_place, after = (min(changed, max(0, method.same - stale.same)) for method in (field, suffix))
    (low, high), (least, most) = interval(in_place, changed), interval(after, changed)
    counts = (
        f"of {changed} decisions that the new value of a field turns, correcting the field in place turns {in_place} "
        f"({low:.2f} to {high:.2f}), computing all that follows it again {after} ({least:.2f} to {most:.2f})"
    )
    if least <= 0.5:
        return Finding(
            "unable", f"{counts}: it does not decide by such fields, so this tells nothing about corrections"
        )
    if high < 0.5:
        return Finding("takes notes", f"{counts}: what follows from a field is noted while the text is read")
    if low > 0.5:
        return Finding("looks up", f"{counts}: the field is looked up when the question is asked")
    return Finding("partly", f"{counts}: what follows from a field is noted in part, and looked up in part")


def page(profile: Profile, by: str) -> str:
    """Return a report of a profile in Markdown. `by`: program, version and time of the measurement."""
    identity, verdict = profile.identity, finding(profile)
    model = f"{identity.model} {identity.quantization}"
    parts = [
        f"# {model}{TITLE}",
        f"Measured by {by}, over {profile.cases} decisions, in each of which one field of a text "
        "changes so that another answer is right. "
        f"Architecture {identity.architecture}, cache {profile.cache}, RoPE {identity.rope_text}, weights "
        f"`{identity.weights[:16]}`. In brackets: exact 95% intervals.",
        f"**{verdict.kind.capitalize()}**: {verdict.why}."
        if verdict
        else "Fields cannot be corrected in place on this model.",
    ]
    field, erratum = (profile.found("method", str(method), "reasoned") for method in (FIELD, ERRATUM))
    if field:
        parts.append(f"After a chain of thought the field corrected in place is followed in {_right(field)}.")
    if direct := profile.found("method", str(ERRATUM)):
        after = f", after a chain of thought in {_right(erratum)}" if erratum else ""
        parts.append(f"An erratum, a short line after the text, is followed in {_right(direct)}{after}.")
    parts.append(grid(METHODS, [(name, decoded, *others) for name, decoded, _, *others in method_rows(profile)]))
    settings = [f"* {way}: `{profile.methods[way]}`: {profile.verdicts[way]}" for way in WAYS]
    settings.append(f"* wording `{profile.wording}`, seam {profile.seam}, place {profile.place}")
    if profile.carry:
        settings.append(f"* recurrent state: {profile.carry.why}")
    settings.append(f"* several skills: {profile.composition.why if profile.composition else 'not measured'}")
    parts.append("\n".join(settings))
    pairs = list(pair_rows(profile))
    if pairs:
        parts.append(grid(PAIRS, pairs))
    parts += ["## In one row, beside other models", grid(ROW, [row(profile)])]
    return "\n\n".join(parts) + "\n"


def is_page(data: bytes) -> bool:
    """Return True if a file is such a report, which may be overwritten."""
    first = data.partition(b"\n")[0]
    return first.startswith(b"# ") and first.endswith(TITLE.encode())


def row(profile: Profile) -> tuple[str, ...]:
    verdict = finding(profile)
    counts = [
        _count(profile.found("method", str(method), way))
        for method, way in (
            *((RECOMPUTE, "direct"), (FIELD, "direct"), (FIELD, "reasoned")),
            *((ERRATUM, "direct"), (ERRATUM, "reasoned")),
        )
    ]
    both = [_count(profile.found("composition", name, "two")) for name in (SPLICED, ONE_PREFILL)]
    identity = profile.identity
    used = " / ".join(dict.fromkeys(profile.methods[way] for way in WAYS))
    return (
        *(f"{identity.model} ({identity.architecture})", identity.quantization, profile.cache),
        *counts,
        *both,
        *(used, verdict.kind if verdict else ""),
    )


def method_rows(profile: Profile) -> Iterator[tuple[str, ...]]:
    """Yield for each method: name, tokens decoded, milliseconds, cosine, and the decisions directly and after
    reasoning, right and as a recompute's."""
    for name in dict.fromkeys(row.name for row in profile.measured if row.what == "method"):
        direct, reasoned = (profile.found("method", name, way) for way in WAYS)
        cost = direct or reasoned
        assert cost is not None  # measured in at least one way
        shares = [cell for way in (direct, reasoned) for cell in ((_right(way), str(way.same)) if way else ("", ""))]
        yield (name, f"{cost.decoded:.0f}", f"{cost.ms:.0f}", f"{cost.cosine:.4f}", *shares)


def pair_rows(profile: Profile) -> Iterator[tuple[str, ...]]:
    """Yield for each way to compose two skills: name, tokens decoded, and the right decisions that need one or both."""
    for name in dict.fromkeys(row.name for row in profile.measured if row.what == "composition"):
        one, two = (profile.found("composition", name, way) for way in ("one", "two"))
        cost = two or one
        yield (
            name,
            f"{cost.decoded:.0f}" if cost else "",
            *(_right(each) if each else "" for each in (one, two)),
        )


def _right(measured: Measured) -> str:
    return format_count(measured.right, measured.cases)


def _count(measured: Measured | None) -> str:
    return f"{measured.right} of {measured.cases}" if measured else ""


def grid(columns: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)

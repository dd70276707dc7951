"""Checking composition: do skills that were compiled apart answer as they do when they are read in one prefill?

A skill that was compiled alone has not seen those before it. A question that one skill answers may not mind; one that
needs two may, for what is concluded from the first while the second is read is missing (Kamera, arXiv 2606.23581). So
both kinds are asked in every way. The reference is one prefill of all skills; the control leaves one out: a model that
does no better with both than with one does not answer such questions, and nothing follows for splicing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import fmean

from notes_cli.engine.loop import run
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError, Progress, UnsupportedError
from notes_cli.library.profiles import Composition, Measured
from notes_cli.library.unfinished import Keep, keep_nothing, step_name
from notes_cli.measure.battery import Asked, Pair
from notes_cli.measure.compare import ANSWER, RECOMPUTE, Composed, Mended, Question, cosine, verify_system
from notes_cli.measure.significance import LEAST, Right, as_good, better, count_of
from notes_cli.measure.verify import Case, decided
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import choose_task
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.settings import DEFAULT_SEAM
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Field, Skill, joined

SEAM = 16  # tokens that a longer seam has
THINK = 256  # tokens of a chain of thought
SPLICED = "spliced"
REVERSED, LONGER, TOGETHER, SUFFIX = "reversed", f"seam@{SEAM}", "together", "suffix"
# By what they cost: nothing; some tokens an answer; a compile and its file; all skills but the first at each answer.
REPAIRS = (REVERSED, LONGER, TOGETHER, SUFFIX)
WITHOUT = ("without the first", "without the second")
NEEDS = {1: "one", 2: "two"}  # how many skills a question takes

Whole = Callable[[], Segment]  # compiles the skills of a prompt as one


@dataclass(frozen=True, slots=True)
class _Found:
    """What one way of composing came to for one question."""

    right: bool
    same: bool  # as one prefill of both
    cosine: float
    decoded: int
    seconds: float


def measure_pairs(
    workspace: Workspace,
    pairs: Sequence[Pair],
    step: Callable[[], object] = lambda: None,
    *,
    think: bool = False,
    keep: Keep = keep_nothing,
) -> tuple[Composition | None, list[Measured]]:
    """Ask the questions of each pair in every way. No finding where there are no pairs, and where this model's rows
    cannot be moved: of several skills only the first is reused then. `step` is told after each pair. `think`: decide
    after a chain of thought. `keep`: keeps what was found for each pair."""
    if not pairs or workspace.context.supports("splice") is not None:
        return None, []
    rows: dict[tuple[str, int], list[_Found]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        for needs, way, *found in keep(step_name("pair", number, pair), partial(_pair, workspace, pair, think)):
            rows[way, needs].append(_Found(*found))
        step()
    right = {(way, needs): [one.right for one in found] for (way, needs), found in rows.items()}
    return judge(right), [_measured(way, needs, found) for (way, needs), found in rows.items()]


def _pair(workspace: Workspace, pair: Pair, think: bool) -> list[list[object]]:
    """The questions of a pair in every way: how many skills each needs, the way, and what was found."""
    segments = [compile_skill(workspace, skill) for skill in (pair.first, pair.second)]
    whole = compile_skill(workspace, joined([pair.first, pair.second], "both"))
    return [
        [asked.needs, way, *astuple(found)]
        for asked in pair.asked
        for way, found in _asked(workspace, segments, whole, asked, think).items()
    ]


def _asked(
    workspace: Workspace, segments: Sequence[Segment], whole: Segment, asked: Asked, think: bool
) -> dict[str, _Found]:
    """What each way comes to."""
    prompt = Prompt(asked.question, segments, system=verify_system(), think=think)
    room = THINK if think else 0
    ways: dict[str, Callable[[], KVSequence]] = {
        RECOMPUTE: partial(assemble, workspace, prompt, splice=False, room=room),
        SPLICED: partial(assemble, workspace, prompt, room=room),
        **{way: partial(repaired, workspace, prompt, way, lambda: whole, room=room) for way in REPAIRS},
    }
    if asked.needs == 2:
        for way, left in zip(WITHOUT, reversed(segments), strict=True):
            ways[way] = partial(assemble, workspace, replace(prompt, segments=[left]), splice=False, room=room)
    logits, choices, found = None, {}, {}
    for way, make in ways.items():
        started = time.perf_counter()
        with make() as sequence:
            here = sequence.logits()
            logits = here if logits is None else logits  # the recompute is the first
            decoded = sequence.decoded
            choices[way] = run(choose_task(workspace, sequence, asked.choices, room)).choice
        seconds = time.perf_counter() - started
        same = choices[way] == choices[RECOMPUTE]
        found[way] = _Found(choices[way] == asked.right, same, cosine(here, logits), decoded, seconds)
    return found


def repaired(
    workspace: Workspace, prompt: Prompt, way: str, whole: Whole, *, seam: int = DEFAULT_SEAM, room: int = 0
) -> KVSequence:
    """The prompt's skills composed by one of REPAIRS. Raise UnsupportedError where that makes no difference."""
    segments = prompt.segments
    if way == REVERSED:
        prompt = replace(prompt, segments=[*reversed(segments)])
    elif way == TOGETHER:
        prompt = replace(prompt, segments=[whole()])
    elif way == SUFFIX:
        prompt = replace(prompt, decoded=frozenset(segment.name for segment in segments[1:]))
    elif way == LONGER:
        if seam >= SEAM:
            raise UnsupportedError("the seam is as long already")
        if min(map(len, segments)) <= SEAM:
            raise UnsupportedError("one of the skills is shorter")
        seam = SEAM
    return assemble(workspace, prompt, seam=seam, room=room)


def whole_of(segments: Sequence[Segment]) -> Skill:
    """The skills of these segments as one, by the texts that they hold. Raise UnsupportedError for tools
    and images."""
    if any(one.tools for one in segments):
        raise UnsupportedError("tools are not compiled together with a text")
    if any(one.media for one in segments):
        raise UnsupportedError("images are not compiled together with a text of another file")
    skills = [
        Skill(
            *(one.name, one.description, one.text),
            tuple(Field(span.name, span.value, span.start, span.end) for span in one.fields),
            one.source,
        )
        for one in segments
    ]
    return joined(skills, "-".join(one.name for one in segments))


def compose(
    workspace: Workspace,
    prompt: Prompt,
    cases: Sequence[Case],
    *,
    choices: Sequence[str] | None = None,
    seam: int = DEFAULT_SEAM,
    progress: Progress | None = None,
) -> Composed | None:
    """Which skills each case takes that was verified without errata, and what repairs those that decide otherwise. None
    for fewer than two skills, and where rows cannot be moved: only the first is reused then. `progress` is told of each
    prefill."""
    segments = prompt.segments
    if len(segments) < 2 or any(segment.prefix_only for segment in segments):
        return None
    asked = [case for case in cases if not case.errata]
    questions = tuple(
        Question(
            case.question,
            tuple(
                left.name
                for left in segments
                if _decision(workspace, _without(prompt, case, left), choices, progress) != case.reference
            ),
            case.same_decision,
        )
        for case in asked
    )
    if all(one.same for one in questions):
        return Composed(tuple(one.name for one in segments), questions)
    made: list[Segment] = []

    def whole() -> Segment:
        if not made:
            made.append(compile_skill(workspace, whole_of(segments), progress))
        return made[0]

    tried = []
    for way in REPAIRS:
        try:
            same = []
            for case in asked:
                here = replace(prompt, question=case.question, errata=())
                with repaired(workspace, here, way, whole, seam=seam, room=ANSWER) as sequence:
                    sequence.flush(progress)
                    same.append(decided(sequence, choices)[0] == case.reference)
            tried.append(Mended(way, tuple(same)))
        except NotesError as error:  # a skill that is too short, or too many tokens at once
            tried.append(Mended(way, refused=str(error)))
    return Composed(tuple(one.name for one in segments), questions, tuple(tried))


def _without(prompt: Prompt, case: Case, left: Segment) -> Prompt:
    others = [one for one in prompt.segments if one is not left]
    return replace(prompt, question=case.question, errata=(), segments=others)


def _decision(workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None, progress: Progress | None) -> str:
    with assemble(workspace, prompt, splice=False, room=ANSWER) as sequence:
        sequence.flush(progress)
        return decided(sequence, choices)[0]


def _measured(way: str, needs: int, found: Sequence[_Found]) -> Measured:
    means = (fmean(getattr(one, what) for one in found) for what in ("cosine", "decoded", "seconds"))
    near, decoded, seconds = means
    counts = len(found), sum(one.same for one in found), sum(one.right for one in found)
    return Measured(
        "composition", way, NEEDS[needs], *counts, round(near, 5), round(decoded, 1), round(1000 * seconds, 1)
    )


def judge(right: Mapping[tuple[str, int], Right]) -> Composition:
    """What follows from whether each way was right, by question: of those that one skill answers (1), and of those that
    need both (2)."""
    two = {way: found for (way, needs), found in right.items() if needs == 2}
    together, spliced = two[RECOMPUTE], two[SPLICED]
    alone = " and ".join(f"{sum(two[way])}" for way in WITHOUT)
    if len(together) < LEAST:
        return Composition("open", "", f"{len(together)} questions prove nothing: {LEAST} at least are needed")
    if not all(better(together, two[way]) for way in WITHOUT):
        return Composition(
            "unable",
            "",
            "this model does not answer questions that need two skills even when it reads both together: right in "
            f"{count_of(together)}, with one of the two left out in {alone}; nothing follows for splicing",
        )
    single = f"{sum(right[SPLICED, 1])} of {len(right[SPLICED, 1])} (read together: {sum(right[RECOMPUTE, 1])})"
    figures = (
        f"right in {count_of(spliced)}, read together in {count_of(together)}, with one of the two left out in {alone}"
    )
    if better(together, spliced):
        good = [way for way in REPAIRS if better(two[way], spliced) and as_good(two[way], together)]
        repair = good[0] if good else RECOMPUTE
        mended = f"{repair} is right in {count_of(two[repair])}" if good else "nothing that was tried repairs that"
        return Composition(
            *("fails", repair),
            f"skills that were compiled apart lose questions that need two of them: {figures}; questions that one "
            f"answers are right in {single}; {mended}",
        )
    if as_good(spliced, together):
        why = f"skills that were compiled apart answer questions that need two of them: {figures}; of one: {single}"
        return Composition("holds", "", why)
    return Composition("open", "", f"neither a loss nor that there is none is proven: {figures}; of one: {single}")

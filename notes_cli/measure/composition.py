"""Measures composition: whether skills that were compiled separately give the decisions of one prefill of all.

K/V of a skill that was compiled alone does not depend on the skills before it. A question that needs two skills may
suffer from that more than one that a single skill answers (Kamera, arXiv 2606.23581), so both kinds are measured. The
reference is one prefill of all skills. The control leaves one out: if a model does no better with both, it cannot
answer such questions, and nothing follows for splicing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import fmean

from notes_cli.engine.decoding import run
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError, Progress, UnsupportedError
from notes_cli.library.checkpoints import Keep, keep_nothing, step_name
from notes_cli.library.profiles import Composition, Measured
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

SEAM = 16  # tokens of the longer seam
THINK = 256  # tokens of reasoning
SPLICED = "spliced"
REVERSED, LONGER, TOGETHER, SUFFIX = "reversed", f"seam@{SEAM}", "together", "suffix"
# By cost: none; some tokens per answer; a compile and its file; decoding all skills but the first for each answer.
REPAIRS = (REVERSED, LONGER, TOGETHER, SUFFIX)
WITHOUT = ("without the first", "without the second")
NEEDS = {1: "one", 2: "two"}  # number of skills that a question needs

Whole = Callable[[], Segment]  # compiles the skills of a prompt as one


@dataclass(frozen=True, slots=True)
class _Decision:
    """The outcome of one question with one way of composing."""

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
    """Ask the questions of each pair in every way. Returns no verdict without pairs, and if this model's K/V cannot be
    moved: only the first of several skills is reused then. `step` is called after each pair. `think`: decide after
    reasoning. `keep` saves the result of each pair."""
    if not pairs or workspace.context.supports("splice") is not None:
        return None, []
    rows: dict[tuple[str, int], list[_Decision]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        for needs, way, *values in keep(step_name("pair", number, pair), partial(_try_pair, workspace, pair, think)):
            rows[way, needs].append(_Decision(*values))
        step()
    right = {key: [decision.right for decision in decisions] for key, decisions in rows.items()}
    return judge(right), [_measured(way, needs, decisions) for (way, needs), decisions in rows.items()]


def _try_pair(workspace: Workspace, pair: Pair, think: bool) -> list[list[object]]:
    """Ask the questions of a pair in every way. Returns rows of needed skills, way, and the fields of `_Decision`."""
    segments = [compile_skill(workspace, skill) for skill in (pair.first, pair.second)]
    whole = compile_skill(workspace, joined([pair.first, pair.second], "both"))
    return [
        [asked.needs, way, *astuple(decision)]
        for asked in pair.asked
        for way, decision in _try_ways(workspace, segments, whole, asked, think).items()
    ]


def _try_ways(
    workspace: Workspace, segments: Sequence[Segment], whole: Segment, asked: Asked, think: bool
) -> dict[str, _Decision]:
    """Return the outcome of a question by way of composing."""
    prompt = Prompt(asked.question, segments, system=verify_system(), think=think)
    room = THINK if think else 0
    ways: dict[str, Callable[[], KVSequence]] = {
        RECOMPUTE: partial(assemble, workspace, prompt, splice=False, room=room),
        SPLICED: partial(assemble, workspace, prompt, room=room),
        **{way: partial(repair, workspace, prompt, way, lambda: whole, room=room) for way in REPAIRS},
    }
    if asked.needs == 2:
        for way, left in zip(WITHOUT, reversed(segments), strict=True):
            ways[way] = partial(assemble, workspace, replace(prompt, segments=[left]), splice=False, room=room)
    reference, choices, decisions = None, {}, {}
    for way, make in ways.items():
        started = time.perf_counter()
        with make() as sequence:
            logits = sequence.logits()
            reference = logits if reference is None else reference  # the recompute is first
            decoded = sequence.decoded
            choices[way] = run(choose_task(workspace, sequence, asked.choices, room)).choice
        seconds = time.perf_counter() - started
        same = choices[way] == choices[RECOMPUTE]
        decisions[way] = _Decision(choices[way] == asked.right, same, cosine(logits, reference), decoded, seconds)
    return decisions


def repair(
    workspace: Workspace, prompt: Prompt, way: str, whole: Whole, *, seam: int = DEFAULT_SEAM, room: int = 0
) -> KVSequence:
    """Assemble the prompt with one of REPAIRS. Raises UnsupportedError if that makes no difference."""
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
    """Join the texts of these segments to one skill. Raises UnsupportedError for tools and images."""
    if any(segment.tools for segment in segments):
        raise UnsupportedError("tools are not compiled together with a text")
    if any(segment.media for segment in segments):
        raise UnsupportedError("images are not compiled together with a text of another file")
    skills = [
        Skill(
            *(segment.name, segment.description, segment.text),
            tuple(Field(span.name, span.value, span.start, span.end) for span in segment.fields),
            segment.source,
        )
        for segment in segments
    ]
    return joined(skills, "-".join(segment.name for segment in segments))


def compose(
    workspace: Workspace,
    prompt: Prompt,
    cases: Sequence[Case],
    *,
    choices: Sequence[str] | None = None,
    seam: int = DEFAULT_SEAM,
    progress: Progress | None = None,
) -> Composed | None:
    """Determine which skills each case without errata needs, and repairs for cases that decide differently. Returns
    None for fewer than two skills, and if K/V cannot be moved: only the first is reused then. `progress` is called
    during each prefill."""
    segments = prompt.segments
    if len(segments) < 2 or any(segment.prefix_only for segment in segments):
        return None
    plain = [case for case in cases if not case.errata]
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
        for case in plain
    )
    if all(question.same for question in questions):
        return Composed(tuple(segment.name for segment in segments), questions)
    compiled: list[Segment] = []

    def whole() -> Segment:
        if not compiled:
            compiled.append(compile_skill(workspace, whole_of(segments), progress))
        return compiled[0]

    tried = []
    for way in REPAIRS:
        try:
            same = []
            for case in plain:
                asked = replace(prompt, question=case.question, errata=())
                with repair(workspace, asked, way, whole, seam=seam, room=ANSWER) as sequence:
                    sequence.flush(progress)
                    same.append(decided(sequence, choices)[0] == case.reference)
            tried.append(Mended(way, tuple(same)))
        except NotesError as error:  # a skill that is too short, or too many tokens at once
            tried.append(Mended(way, refused=str(error)))
    return Composed(tuple(segment.name for segment in segments), questions, tuple(tried))


def _without(prompt: Prompt, case: Case, left: Segment) -> Prompt:
    others = [segment for segment in prompt.segments if segment is not left]
    return replace(prompt, question=case.question, errata=(), segments=others)


def _decision(workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None, progress: Progress | None) -> str:
    with assemble(workspace, prompt, splice=False, room=ANSWER) as sequence:
        sequence.flush(progress)
        return decided(sequence, choices)[0]


def _measured(way: str, needs: int, rows: Sequence[_Decision]) -> Measured:
    near, decoded, seconds = (fmean(getattr(row, name) for row in rows) for name in ("cosine", "decoded", "seconds"))
    counts = len(rows), sum(row.same for row in rows), sum(row.right for row in rows)
    return Measured(
        "composition", way, NEEDS[needs], *counts, round(near, 5), round(decoded, 1), round(1000 * seconds, 1)
    )


def judge(right: Mapping[tuple[str, int], Right]) -> Composition:
    """Return the verdict from the correctness by way and number of skills needed, 1 or 2."""
    two = {way: cases for (way, needs), cases in right.items() if needs == 2}
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
        cheapest = good[0] if good else RECOMPUTE
        mended = f"{cheapest} is right in {count_of(two[cheapest])}" if good else "nothing that was tried repairs that"
        return Composition(
            *("fails", cheapest),
            f"skills that were compiled apart lose questions that need two of them: {figures}; questions that one "
            f"answers are right in {single}; {mended}",
        )
    if as_good(spliced, together):
        why = f"skills that were compiled apart answer questions that need two of them: {figures}; of one: {single}"
        return Composition("holds", "", why)
    return Composition("open", "", f"neither a loss nor that there is none is proven: {figures}; of one: {single}")

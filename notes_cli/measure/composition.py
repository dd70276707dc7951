"""Measures whether spliced skills give the decisions of one prefill: several compiled apart, and a state carried on.

K/V of a skill that was compiled alone does not depend on the skills before it. A question that needs two skills may
suffer from that more than one that a single skill answers (Kamera, arXiv 2606.23581), so both kinds are measured. The
reference is one prefill of all skills. The control leaves one out: if a model does no better with both, it cannot
answer such questions, and nothing follows for splicing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.errors import NotesError, Progress, UnsupportedError
from notes_cli.library.profiles import Carried, Composition, Keep, Measured, keep_nothing, step_name
from notes_cli.measure.battery import LEAST, Case, Pair, Right, as_good, better, count_of
from notes_cli.measure.verify import (
    ANSWER,
    ONE_PREFILL,
    Composed,
    Mended,
    Question,
    answered,
    cosine,
    recomputed,
    verify_system,
)
from notes_cli.measure.verify import Case as Measurement
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.freshness import as_skill
from notes_cli.runtime.generate import choose_task
from notes_cli.runtime.prompt import DEFAULT_SEAM, Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, joined

SEAM = 16  # tokens of the longer seam
SPLICED = "spliced"
REVERSED, LONGER, TOGETHER, SUFFIX = "reversed", f"seam@{SEAM}", "together", "suffix"
# By cost: none; some tokens per answer; a compile and its file; decoding all skills but the first for each answer.
REPAIRS = (REVERSED, LONGER, TOGETHER, SUFFIX)
WITHOUT = ("without the first", "without the second")
NEEDS = {1: "one", 2: "two"}  # skills that a question needs

Whole = Callable[[], Segment]  # compiles the skills of a prompt as one


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer that a prompt decides for, the logits it was chosen from, and its cost."""

    choice: str
    logits: NDArray[np.float32]
    decoded: int
    seconds: float


def decide(
    workspace: Workspace, assembled: Callable[[], KVSequence], choices: Sequence[str], room: int = 0
) -> Decision:
    """Assemble a prompt and choose an answer, after reasoning of at most `room` tokens."""
    started = time.perf_counter()
    with assembled() as sequence:
        logits, decoded = sequence.logits(), sequence.decoded
        choice = run(choose_task(workspace, sequence, choices, room)).choice
    return Decision(choice, logits, decoded, time.perf_counter() - started)


class Tally:
    """Decisions by setting (`what`), its value (`name`) and `way` (such as reasoned), in the order of the cases."""

    def __init__(self) -> None:
        self.rows: list[Sequence[Any]] = []  # JSON values

    def add(self, what: str, name: str, way: str, decision: Decision, reference: Decision, right: str) -> None:
        """Add a decision. `reference`: that of a full recompute; `right`: the correct answer."""
        near = cosine(decision.logits, reference.logits)
        same, is_right = decision.choice == reference.choice, decision.choice == right
        self.rows.append([what, name, way, same, is_right, near, decision.decoded, decision.seconds])

    def _grouped(self) -> dict[tuple[str, str, str], list[Sequence[Any]]]:
        groups: dict[tuple[str, str, str], list[Sequence[Any]]] = defaultdict(list)
        for what, name, way, *row in self.rows:
            groups[what, name, way].append(row)
        return groups

    def right(self, what: str, way: str = "direct") -> dict[str, list[bool]]:
        """Return correctness by name and case, without names that were not possible in all cases."""
        correct = {
            name: [row[1] for row in rows]
            for (setting, name, by), rows in self._grouped().items()
            if (setting, by) == (what, way)
        }
        most = max(map(len, correct.values()), default=0)
        return {name: cases for name, cases in correct.items() if len(cases) == most}

    def measured(self) -> list[Measured]:
        measured = []
        for (what, name, way), rows in self._grouped().items():
            same, right, near, decoded, seconds = (list(column) for column in zip(*rows, strict=True))
            counts = len(rows), sum(same), sum(right)
            means = round(fmean(near), 5), round(fmean(decoded), 1), round(1000 * fmean(seconds), 1)
            measured.append(Measured(what, name, way, *counts, *means))
        return measured


def measure_pairs(
    workspace: Workspace,
    pairs: Sequence[Pair],
    step: Callable[[], object] = lambda: None,
    keep: Keep = keep_nothing,
) -> tuple[Composition | None, list[Measured]]:
    """Ask the questions of each pair in every way. Returns no verdict without pairs, and if this model's K/V cannot be
    moved: only the first of several skills is reused then. `step` is called after each pair. `keep` saves the
    result of each pair."""
    if not pairs or workspace.context.supports("splice") is not None:
        return None, []
    tally = Tally()
    for number, pair in enumerate(pairs):
        tally.rows += keep(step_name("pair", number, pair), partial(_try_pair, workspace, pair))
        step()
    return judge(*(tally.right("composition", NEEDS[needs]) for needs in (1, 2))), tally.measured()


def _try_pair(workspace: Workspace, pair: Pair) -> list[Sequence[Any]]:
    tally = Tally()
    segments = [compile_skill(workspace, skill) for skill in (pair.first, pair.second)]
    whole = compile_skill(workspace, joined([pair.first, pair.second], "both"))
    for asked in pair.asked:
        prompt = Prompt(asked.question, segments, system=verify_system())
        ways: dict[str, Callable[[], KVSequence]] = {
            ONE_PREFILL: partial(assemble, workspace, prompt, splice=False),
            SPLICED: partial(assemble, workspace, prompt),
            **{way: partial(repair, workspace, prompt, way, lambda: whole) for way in REPAIRS},
        }
        if asked.needs == 2:
            for way, left in zip(WITHOUT, reversed(segments), strict=True):
                ways[way] = partial(assemble, workspace, replace(prompt, segments=[left]), splice=False)
        decisions = {way: decide(workspace, make, asked.choices) for way, make in ways.items()}
        for way, decision in decisions.items():
            tally.add("composition", way, NEEDS[asked.needs], decision, decisions[ONE_PREFILL], asked.right)
    return tally.rows


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
    skills = [replace(as_skill(segment, (), segment.name), source=segment.source) for segment in segments]
    return joined(skills, "-".join(segment.name for segment in segments))


def compose(
    workspace: Workspace,
    prompt: Prompt,
    cases: Sequence[Measurement],
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
    plain = [(case, replace(prompt, question=case.question, errata=())) for case in cases if not case.errata]
    questions = []
    for case, asked in plain:
        needs = []
        for left in segments:
            others = replace(asked, segments=[segment for segment in segments if segment is not left])
            if recomputed(workspace, others, choices, progress)[1].text != case.reference:
                needs.append(left.name)
        questions.append(Question(case.question, tuple(needs), case.same_decision))
    composed = Composed(tuple(segment.name for segment in segments), tuple(questions))
    if all(question.same for question in questions):
        return composed
    whole = cache(lambda: compile_skill(workspace, whole_of(segments), progress))
    tried = []
    for way in REPAIRS:
        try:
            same = []
            for case, asked in plain:
                with repair(workspace, asked, way, whole, seam=seam, room=ANSWER) as sequence:
                    sequence.flush(progress)
                    same.append(answered(sequence, choices).text == case.reference)
            tried.append(Mended(way, tuple(same)))
        except NotesError as error:  # a skill that is too short, or too many tokens at once
            tried.append(Mended(way, refused=str(error)))
    return replace(composed, tried=tuple(tried))


def judge(one: Mapping[str, Right], two: Mapping[str, Right]) -> Composition:
    """Return the verdict from the correctness by way, of questions that need one skill, and two."""
    together, spliced = two[ONE_PREFILL], two[SPLICED]
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
    single = f"{sum(one[SPLICED])} of {len(one[SPLICED])} (read together: {sum(one[ONE_PREFILL])})"
    figures = (
        f"right in {count_of(spliced)}, read together in {count_of(together)}, with one of the two left out in {alone}"
    )
    if better(together, spliced):
        good = [way for way in REPAIRS if better(two[way], spliced) and as_good(two[way], together)]
        cheapest = good[0] if good else ONE_PREFILL
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


CARRIED, NO_SKILL = "carried", "without"
PLACES = ("after", "before")  # of the skill, relative to the other text


def measure_carried(
    workspace: Workspace, cases: Sequence[Case], done: Callable[[], object], keep: Keep = keep_nothing
) -> tuple[Carried | None, list[Measured]]:
    """Decide each case with its skill after another text, and before another skill that the recurrent state is carried
    through. Return the verdict, and the results of each way; nothing for a model without state that can be carried.
    `done` is called after each case. `keep` saves the result of each."""
    if workspace.context.supports("carry") is not None:
        return None, []
    tally = Tally()
    with workspace.with_carry(True):
        other = compile_skill(workspace, Skill("other", "", verify_system(), (), "-"))
        for number, case in enumerate(cases):
            tally.rows += keep(step_name("state", number, case), partial(_try_carried, workspace, case, other))
            done()
    after, before = (tally.right("state", place) for place in PLACES)
    return judge_carried({way: [*after[way], *before[way]] for way in after}), tally.measured()


def _try_carried(workspace: Workspace, case: Case, other: Segment) -> list[Sequence[Any]]:
    tally = Tally()
    skill = compile_skill(workspace, replace(case.skill, name="mine"))
    after = Prompt(case.question, [skill], system=verify_system())
    for place, prompt in zip(PLACES, (after, Prompt(case.question, [skill, other])), strict=True):
        without = replace(prompt, segments=[segment for segment in prompt.segments if segment is not skill])
        ways = {
            CARRIED: partial(assemble, workspace, prompt),
            ONE_PREFILL: partial(assemble, workspace, prompt, splice=False),
            NO_SKILL: partial(assemble, workspace, without, splice=False),
        }
        decisions = {way: decide(workspace, make, case.choices) for way, make in ways.items()}
        for way, decision in decisions.items():
            tally.add("state", way, place, decision, decisions[ONE_PREFILL], case.right[0])
    return tally.rows


def judge_carried(right: dict[str, Right]) -> Carried:
    """Return the verdict from the correctness of each way, over all cases and both places."""
    carried, read, without = right[CARRIED], right[ONE_PREFILL], right[NO_SKILL]
    if len(read) < 2 * LEAST:
        return Carried("open", f"{len(read)} decisions prove nothing: {2 * LEAST} at least are needed")
    if not better(read, without):
        return Carried(
            "open",
            f"this model does not decide by a skill even when it reads it: right in {count_of(read)}, without the "
            f"skill in {sum(without)}; nothing follows for its state",
        )
    figures = f"right in {count_of(carried)}, all decoded in {count_of(read)}, without the skill in {sum(without)}"
    if better(read, carried):
        return Carried("fails", f"a state that is carried through skills loses decisions: {figures}")
    if as_good(carried, read):
        return Carried("holds", f"a state that is carried through skills decides as one that is decoded: {figures}")
    return Carried("open", f"neither a loss nor that there is none is proven: {figures}")

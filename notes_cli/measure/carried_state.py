"""Measures whether propagating recurrent state through spliced skills keeps decisions correct on this model.

Each case is decided with its skill after another text, and before another skill that the state is carried through;
spliced, recomputed, and without the skill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import fmean

from notes_cli.engine.decoding import run
from notes_cli.engine.segment import Segment
from notes_cli.library.checkpoints import Keep, keep_nothing, step_name
from notes_cli.library.profiles import Carried, Measured
from notes_cli.measure.battery import Case
from notes_cli.measure.compare import cosine, verify_system
from notes_cli.measure.significance import LEAST, Right, as_good, better, count_of
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import choose_task
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill

WAYS = CARRIED, RECOMPUTE, WITHOUT = "carried", "recompute", "without"
PLACES = ("after", "before")  # of the skill, relative to the other text


@dataclass(frozen=True, slots=True)
class _Decision:
    """The outcome of one case in one way."""

    right: bool
    same: bool  # as recomputed
    cosine: float
    decoded: int
    seconds: float


def measure_carried(
    workspace: Workspace, cases: Sequence[Case], done: Callable[[], object], keep: Keep = keep_nothing
) -> tuple[Carried | None, list[Measured]]:
    """Return the verdict, and the results of each way; nothing for a model without state that can be carried. `done` is
    called after each case. `keep` saves the result of each."""
    if workspace.context.supports("carry") is not None:
        return None, []
    rows: dict[tuple[str, str], list[_Decision]] = {(way, place): [] for place in PLACES for way in WAYS}
    with workspace.with_carry(True):
        other = compile_skill(workspace, Skill("other", "", verify_system(), (), "-"))
        for number, case in enumerate(cases):
            step = step_name("state", number, case)
            for place, way, *values in keep(step, partial(_measure_case, workspace, case, other)):
                rows[way, place].append(_Decision(*values))
            done()
    right: dict[str, Right] = {
        way: [decision.right for place in PLACES for decision in rows[way, place]] for way in WAYS
    }
    return judge(right), [_measured(way, place, decisions) for (way, place), decisions in rows.items()]


def _measure_case(workspace: Workspace, case: Case, other: Segment) -> list[list[object]]:
    """Decide a case in both places and each way. Returns rows of place, way, and the fields of `_Decision`."""
    skill = compile_skill(workspace, replace(case.skill, name="mine"))
    after = Prompt(case.question, [skill], system=verify_system())
    rows: list[list[object]] = []
    for place, prompt in zip(PLACES, (after, Prompt(case.question, [skill, other])), strict=True):
        without = replace(prompt, segments=[segment for segment in prompt.segments if segment is not skill])
        reference = None
        for way, asked, splice in ((RECOMPUTE, prompt, False), (CARRIED, prompt, True), (WITHOUT, without, False)):
            started = time.perf_counter()
            with assemble(workspace, asked, splice=splice) as sequence:
                logits, decoded = sequence.logits(), sequence.decoded
                choice = run(choose_task(workspace, sequence, case.choices, 0)).choice
            seconds = time.perf_counter() - started
            reference = reference or (choice, logits)  # the recompute is first
            near = cosine(logits, reference[1])
            decision = _Decision(choice == case.right[0], choice == reference[0], near, decoded, seconds)
            rows.append([place, way, *astuple(decision)])
    return rows


def _measured(way: str, place: str, rows: Sequence[_Decision]) -> Measured:
    near, decoded, seconds = (fmean(getattr(row, name) for row in rows) for name in ("cosine", "decoded", "seconds"))
    counts = len(rows), sum(row.same for row in rows), sum(row.right for row in rows)
    return Measured("state", way, place, *counts, round(near, 5), round(decoded, 1), round(1000 * seconds, 1))


def judge(right: dict[str, Right]) -> Carried:
    """Return the verdict from the correctness of each way, over all cases and both places."""
    carried, read, without = right[CARRIED], right[RECOMPUTE], right[WITHOUT]
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

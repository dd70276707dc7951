"""Whether a recurrent state may be carried through skills on this model: decisions of which the right one is known.

Each case is decided with its skill after another text, through which the state goes on, and with its skill before
another one, through which what was read must not be lost; spliced, recomputed, and with the skill left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import fmean

from notes_cli.engine.loop import run
from notes_cli.engine.segment import Segment
from notes_cli.library.profiles import Carried, Measured
from notes_cli.library.unfinished import Keep, keep_nothing, step_name
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
PLACES = ("after", "before")  # the skill is after the other text, or before it


@dataclass(frozen=True, slots=True)
class _Found:
    """What one way came to in one case."""

    right: bool
    same: bool  # as recomputed
    cosine: float
    decoded: int
    seconds: float


def measure_carried(
    workspace: Workspace, cases: Sequence[Case], done: Callable[[], object], keep: Keep = keep_nothing
) -> tuple[Carried | None, list[Measured]]:
    """What follows, and each way over the cases; nothing for a model without a state that can be carried. `done` is
    called after each case. `keep`: keeps what was found for each."""
    if workspace.context.supports("carry") is not None:
        return None, []
    rows: dict[tuple[str, str], list[_Found]] = {(way, place): [] for place in PLACES for way in WAYS}
    with workspace.with_carry(True):
        other = compile_skill(workspace, Skill("other", "", verify_system(), (), "-"))
        for number, case in enumerate(cases):
            for place, way, *found in keep(step_name("state", number, case), partial(_case, workspace, case, other)):
                rows[way, place].append(_Found(*found))
            done()
    return judge({way: [one.right for place in PLACES for one in rows[way, place]] for way in WAYS}), [
        _measured(way, place, found) for (way, place), found in rows.items()
    ]


def _case(workspace: Workspace, case: Case, other: Segment) -> list[list[object]]:
    """A decision in both places and each way: the place, the way, and what was found."""
    mine = compile_skill(workspace, replace(case.skill, name="mine"))
    after = Prompt(case.question, [mine], system=verify_system())
    rows: list[list[object]] = []
    for place, prompt in zip(PLACES, (after, Prompt(case.question, [mine, other])), strict=True):
        left = replace(prompt, segments=[one for one in prompt.segments if one is not mine])
        wanted = None
        for way, asked, splice in ((RECOMPUTE, prompt, False), (CARRIED, prompt, True), (WITHOUT, left, False)):
            started = time.perf_counter()
            with assemble(workspace, asked, splice=splice) as sequence:
                logits, decoded = sequence.logits(), sequence.decoded
                choice = run(choose_task(workspace, sequence, case.choices, 0)).choice
            seconds = time.perf_counter() - started
            wanted = wanted or (choice, logits)  # the recompute is the first
            near = cosine(logits, wanted[1])
            found = _Found(choice == case.right[0], choice == wanted[0], near, decoded, seconds)
            rows.append([place, way, *astuple(found)])
    return rows


def _measured(way: str, place: str, rows: Sequence[_Found]) -> Measured:
    near, decoded, seconds = (fmean(getattr(one, what) for one in rows) for what in ("cosine", "decoded", "seconds"))
    counts = len(rows), sum(one.same for one in rows), sum(one.right for one in rows)
    return Measured("state", way, place, *counts, round(near, 5), round(decoded, 1), round(1000 * seconds, 1))


def judge(right: dict[str, Right]) -> Carried:
    """What follows from whether each way was right, in each case and both places."""
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

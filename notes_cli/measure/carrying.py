"""Whether a recurrent state may be carried through skills on this model: decisions of which the right one is known.

Each case is decided with its skill after another text, through which the state goes on, and with its skill before
another one, through which what was read must not be lost; spliced, recomputed, and with the skill left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.loop import run
from notes_cli.library.profiles import Carried, Measured
from notes_cli.measure.battery import Case
from notes_cli.measure.compare import cosine
from notes_cli.measure.proof import LEAST, Right, as_good, better, count_of
from notes_cli.measure.wording import verify_system
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.thinking import choosing
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill

CARRIED, RECOMPUTE, WITHOUT = "carried", "recompute", "without"
PLACES = ("after", "before")  # the skill is after the other text, or before it


@dataclass(frozen=True, slots=True)
class _Found:
    right: bool
    choice: str
    logits: NDArray[np.float32]
    decoded: int
    seconds: float


def measure_carried(
    workspace: Workspace, cases: Sequence[Case], done: Callable[[], object]
) -> tuple[Carried | None, list[Measured]]:
    """What follows, and each way over the cases; nothing for a model without a state that can be carried. `done` is
    called after each case."""
    if workspace.context.supports("carry") is not None:
        return None, []
    found: dict[tuple[str, str], list[_Found]] = {}
    with workspace.carrying(True):
        other = compile_skill(workspace, Skill("other", "", verify_system(), (), "-"))
        for case in cases:
            mine = compile_skill(workspace, replace(case.skill, name="mine"))
            after = Prompt(case.question, [mine], system=verify_system())
            for place, prompt in zip(PLACES, (after, Prompt(case.question, [mine, other])), strict=True):
                left = replace(prompt, segments=[one for one in prompt.segments if one is not mine])
                ways = {CARRIED: (prompt, True), RECOMPUTE: (prompt, False), WITHOUT: (left, False)}
                for way, (asked, splice) in ways.items():
                    found.setdefault((way, place), []).append(_decided(workspace, asked, case, splice))
            done()
    return judge({way: [one.right for place in PLACES for one in found[way, place]] for way, _ in found}), [
        _measured(way, place, rows, found[RECOMPUTE, place]) for (way, place), rows in found.items()
    ]


def _decided(workspace: Workspace, prompt: Prompt, case: Case, splice: bool) -> _Found:
    started = time.perf_counter()
    with assemble(workspace, prompt, splice=splice) as notebook:
        logits, decoded = notebook.logits(), notebook.decoded
        choice = run(choosing(workspace, notebook, case.choices, 0)).choice
    return _Found(choice == case.right[0], choice, logits, decoded, time.perf_counter() - started)


def _measured(way: str, place: str, rows: Sequence[_Found], wanted: Sequence[_Found]) -> Measured:
    same = sum(one.choice == other.choice for one, other in zip(rows, wanted, strict=True))
    near = fmean(cosine(one.logits, other.logits) for one, other in zip(rows, wanted, strict=True))
    decoded, seconds = (fmean(getattr(one, what) for one in rows) for what in ("decoded", "seconds"))
    figures = round(near, 5), round(decoded, 1), round(1000 * seconds, 1)
    return Measured("state", way, place, len(rows), same, sum(one.right for one in rows), *figures)


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

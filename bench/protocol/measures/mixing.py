"""Probes of an ordinary cache: all skills of a case as one text, its rows mixed of two compiles."""

from __future__ import annotations

from collections.abc import Iterator

from bench.experiments.cases import joined, near_tie, skill_of
from bench.experiments.table import Row
from bench.experiments.texts import Case
from notes_cli.engine.decision import decide
from notes_cli.engine.segment import Segment
from notes_cli.measure.probe import AlikeError, Mixes
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.workspace import Workspace


def memory(workspace: Workspace, case: Case) -> Segment:
    """The text of a case, with the old value."""
    return compile_skill(workspace, skill_of(joined(case), "memory"))


def mixes_of(workspace: Workspace, case: Case) -> Iterator[Mixes]:
    """The mixes of a case, asked directly; none if both values decide alike."""
    try:
        mixes = Mixes(
            *(workspace, memory(workspace, case), case.field, case.new), question=case.question, choices=case.choices
        )
    except AlikeError:
        return
    with mixes:
        yield mixes


def excluded(number: int, case: Case) -> Row:
    """The row of a case that is left out."""
    return {"case": number, "kind": case.kind, "excluded": True, "near": ""}


def began(number: int, case: Case, mixes: Mixes) -> Row:
    """The row of a case that is not; whether it is a near tie is told by the text with the new value."""
    mixes.recovery([True] * len(mixes.columns))
    near = near_tie(decide(mixes.notebook, case.choices))
    return {"case": number, "kind": case.kind, "excluded": False, "near": near}


def line_of(case: Case, mixes: Mixes) -> list[bool]:
    """For each column, whether it is of the changed field's line: from its value to the end of the line, included.

    The end of a line is a row after the value: fields below the rules may have their note there, where the value has
    been read, and no text follows it.
    """
    characters = mixes.characters()
    end = joined(case).find("\n", characters[mixes.columns[mixes.first].stale[0]][0])
    last = len(joined(case)) if end < 0 else end + 1
    inside = [characters[column.stale[0]][0] < last for column in mixes.columns]
    return [i >= mixes.first and here for i, here in enumerate(inside)]


def acts(recovery: float) -> bool:
    """Whether a mix with this recovery acts on the new value."""
    return recovery > 0.5

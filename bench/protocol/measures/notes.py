"""Where does a decision rest: on the field's own rows, or on those after it? With fields above the rules, and below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bench.experiments.table import Row
from bench.protocol.measures.mixing import acts, began, excluded, line_of, mixes_of
from bench.protocol.texts import Next, Policies
from notes_cli.runtime.workspace import Workspace


def above(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    return _probed(workspace, texts.cases("above", cases))


def below(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    return _probed(workspace, ((number, case.below) for number, case in texts.cases("below", cases)))


def _probed(workspace: Workspace, cases: Iterable[tuple[int, Policies]]) -> Iterator[Row]:
    for number, case in cases:
        row = excluded(number, case)
        for mixes in mixes_of(workspace, case):
            field, after = mixes.field_only(), mixes.after_only()
            row = began(number, case, mixes)
            row |= {"field": acts(field), "after": acts(after), "field_recovery": field, "after_recovery": after}
            line = line_of(case, mixes)
            rest = [i > mixes.first and not here for i, here in enumerate(line)]
            row |= {"line": acts(mixes.recovery(line)), "after_line": acts(mixes.recovery(rest))}
        yield row

"""A field corrected in place, and "re-evaluate" said after it, against nothing said."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bench.experiments.probes import AGAIN
from bench.experiments.table import Row
from bench.protocol.measures.mixing import acts, began, excluded, mixes_of
from bench.protocol.texts import Next, Policies
from notes_cli.editing.methods import Method
from notes_cli.engine.decision import decide
from notes_cli.measure.probe import Mixes
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.cases("again", cases):
        row = excluded(number, case)
        for mixes in mixes_of(workspace, case):
            nothing, again = (_recovery(workspace, case, mixes, words) for words in ("", AGAIN))
            row = began(number, case, mixes)
            row |= {"nothing": acts(nothing), "again": acts(again)}
            row |= {"nothing_recovery": nothing, "again_recovery": again}
        yield row


def _recovery(workspace: Workspace, case: Policies, mixes: Mixes, words: str) -> float:
    said = [Erratum(None, None, words)] if words else []
    prompt = Prompt(case.question, [mixes.stale], said, fields={case.field: case.new}, method=Method("field"))
    with assemble(workspace, prompt) as notebook:
        found = decide(notebook, mixes.decisions).probabilities
    old, new = (math.log(max(found[choice], 1e-300)) for choice in mixes.decisions)
    stale, fresh = mixes.scores
    return (new - old - stale) / (fresh - stale)

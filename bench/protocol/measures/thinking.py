"""After a chain of thought, which each mix writes for itself: does the field alone decide?

Log-odds are those where the chain names its answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from bench.experiments.cases import THINK, near_tie
from bench.experiments.table import Row
from bench.experiments.texts import Case
from bench.protocol.measures.mixing import acts, excluded, memory
from bench.protocol.texts import Next
from notes_cli.engine.decision import Decision
from notes_cli.engine.loop import run
from notes_cli.measure.probe import AlikeError, Mixes
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.thinking import choosing
from notes_cli.runtime.workspace import Workspace

FLOOR = 1e-12  # a probability: a chain that has named one answer leaves the others nothing that means anything


class Reasoned(Mixes):
    """Mixes that decide after a chain of thought."""

    def __init__(self, workspace: Workspace, case: Case) -> None:
        self._choices = case.choices
        super().__init__(
            *(workspace, memory(workspace, case), case.field, case.new), question=case.question, choices=case.choices
        )

    def _assemble(self, prompt: Prompt) -> None:
        if prompt is self._prompt:
            self._prompt = prompt = replace(prompt, think=True)
        self._longest = max(self._longest, 2 * THINK)
        super()._assemble(prompt)

    def decision(self) -> Decision:
        """Of the mix that is there, which is left as it was."""
        length = len(self.notebook)
        found = run(choosing(self._workspace, self.notebook, self._choices, THINK))
        self.notebook.truncate(length)
        return found

    def _decide(self, answer: Callable[[], str]) -> tuple[str, str]:
        return super()._decide(lambda: self.decision().choice)

    def _score(self) -> float:
        probabilities = self.decision().probabilities
        stale, fresh = (math.log(max(probabilities[choice], FLOOR)) for choice in self.decisions)
        return fresh - stale


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.cases("thinking", cases):
        row = excluded(number, case)
        try:
            mixes = Reasoned(workspace, case)
        except AlikeError:
            yield row
            continue
        with mixes:
            field, after = mixes.field_only(), mixes.after_only()
            mixes.recovery([True] * len(mixes.columns))
            row |= {"excluded": False, "near": near_tie(mixes.decision())}
        yield row | {"field": acts(field), "after": acts(after), "field_recovery": field, "after_recovery": after}

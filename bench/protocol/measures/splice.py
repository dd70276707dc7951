"""Does a skill that is spliced after other text and other skills decide as the recompute of the same tokens?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from bench.experiments.cases import SYSTEM, WAYS, near_tie, segments_of
from bench.experiments.table import Row
from bench.protocol.measures.beside import beside
from bench.protocol.measures.greedy import answer, room
from bench.protocol.texts import Next
from notes_cli.engine.decision import decide
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

T = TypeVar("T")


def last(items: Sequence[T], target: int) -> list[T]:
    """All of them in their order, but one after all others."""
    return [*items[:target], *items[target + 1 :], items[target]]


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.policies("splice", cases, skills=(2, 3)):
        segments = last(segments_of(workspace, case.skills), case.target)
        for way in WAYS:
            prompt = Prompt(case.question, segments, system=SYSTEM, think=way == "reasoned")
            found = {}
            for splice in (False, True):
                with assemble(workspace, prompt, splice=splice, room=room(prompt)) as notebook:
                    logits, decision = notebook.logits(), decide(notebook, case.choices)
                    found[splice] = answer(workspace, notebook, prompt, case), logits, decision
            (reference, wanted, sure), (chosen, logits, decision) = found[False], found[True]
            yield {
                "case": number,
                "kind": case.kind,
                "way": way,
                "right": chosen == case.answer,
                "recompute_right": reference == case.answer,
                "same": chosen == reference,
                "choice_same": decision.choice == sure.choice,
                "near": near_tie(sure) if way == "direct" else "",  # a chain decides elsewhere
                **beside(logits, wanted, decision),
            }

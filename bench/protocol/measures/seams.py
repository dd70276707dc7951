"""Seam repair: how much nearer to the recompute is a splice whose first tokens are decoded again where it lies?"""

from __future__ import annotations

from collections.abc import Iterator

from bench.experiments.cases import SYSTEM, near_tie, segments_of
from bench.experiments.table import Row
from bench.protocol.measures.beside import beside
from bench.protocol.measures.greedy import answer, room
from bench.protocol.measures.splice import last
from bench.protocol.texts import Next
from notes_cli.engine.decision import decide
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

SEAMS = (0, 1, 4)  # tokens of every skill; 1 is the default


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.policies("seams", cases, skills=(2, 3)):
        segments = last(segments_of(workspace, case.skills), case.target)
        prompt = Prompt(case.question, segments, system=SYSTEM)
        with assemble(workspace, prompt, splice=False, room=room(prompt)) as notebook:
            wanted, sure = notebook.logits(), decide(notebook, case.choices)
            reference = answer(workspace, notebook, prompt, case)
        for seam in SEAMS:
            with assemble(workspace, prompt, seam=seam, room=room(prompt)) as notebook:
                logits, decision = notebook.logits(), decide(notebook, case.choices)
                chosen = answer(workspace, notebook, prompt, case)
            near = beside(logits, wanted, decision)
            yield {
                "case": number,
                "kind": case.kind,
                "seam": seam,
                "right": chosen == case.answer,
                "recompute_right": reference == case.answer,
                "same": chosen == reference,
                "choice_same": decision.choice == sure.choice,
                "near": near_tie(sure),
                **near,
                "distance": 1 - float(near["cosine"]),
            }

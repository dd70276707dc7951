"""Is the model right: of the text as it is, of the corrected one, and after an erratum, directly and after thinking?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.experiments.cases import SYSTEM, WAYS, near_tie, segments_of
from bench.experiments.table import Row
from bench.protocol.measures.beside import beside
from bench.protocol.measures.greedy import answer, room
from bench.protocol.texts import Next
from notes_cli.engine.decision import decide
from notes_cli.measure.verify import corrected_segment
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.cases("decisions", cases):
        segments = segments_of(workspace, case.skills)
        corrected = [corrected_segment(segment, {case.field: case.new}, workspace) for segment in segments]
        prompt = Prompt(case.question, segments, system=SYSTEM)
        # An erratum as it is said by default: skills spliced, nothing of them computed again.
        forms = {
            "text": (prompt, False, case.answer),
            "corrected": (replace(prompt, segments=corrected), False, case.answer_new),
            "erratum": (replace(prompt, errata=[Erratum(case.field, case.new, "")]), True, case.answer_new),
        }
        for way in WAYS:
            found = {}
            for form, (plain, splice, right) in forms.items():
                asked = replace(plain, think=way == "reasoned")
                with assemble(workspace, asked, splice=splice, room=room(asked)) as notebook:
                    logits = notebook.logits()
                    decision = decide(notebook, case.choices)
                    found[form] = (
                        answer(workspace, notebook, asked, case),
                        logits,
                        near_tie(decision) if way == "direct" else "",
                    )
                reference, wanted, near = found["corrected" if form == "erratum" else form]
                yield {
                    "case": number,
                    "kind": case.kind,
                    "way": way,
                    "form": form,
                    "answer": found[form][0],
                    "right": found[form][0] == right,
                    "same": found[form][0] == reference,
                    "near": near,
                    **beside(logits, wanted, decision),
                }

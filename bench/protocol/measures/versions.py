"""An older version of a policy before the spliced one, which holds: its keys rotated, and not (the control)."""

from __future__ import annotations

from collections.abc import Iterator

from bench.experiments.cases import SYSTEM, near_tie, skill_of
from bench.experiments.table import Row
from bench.protocol.measures.beside import beside
from bench.protocol.measures.greedy import answer, room
from bench.protocol.texts import Next
from notes_cli.engine.decision import decide
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

OLDER = "older"


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.policies("versions", cases, skills=(1,)):
        draft = case.draft
        was = draft.text({**draft.values, case.field: case.new})
        segments = [
            compile_skill(workspace, skill_of(text, name)) for text, name in ((was, OLDER), (draft.text(), "own"))
        ]
        # The older one is text like any other: the one that is spliced is the last.
        prompt = Prompt(case.question, segments, system=SYSTEM, decoded=frozenset({OLDER}))
        ways = {"recompute": (False, True), "rotated": (True, True), "unrotated": (True, False)}
        found = {}
        for name, (splice, rotate) in ways.items():
            with assemble(workspace, prompt, splice=splice, rotate=rotate, room=room(prompt)) as notebook:
                logits, decision = notebook.logits(), decide(notebook, case.choices)
                found[name] = answer(workspace, notebook, prompt, case), logits, decision
        reference, wanted, sure = found["recompute"]
        row: Row = {"case": number, "kind": case.kind, "right": reference == case.answer, "near": near_tie(sure)}
        for name in ("rotated", "unrotated"):
            chosen, logits, decision = found[name]
            row[name] = chosen == reference
            row |= beside(logits, wanted, decision, f"{name}_")
        yield row

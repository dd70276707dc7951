"""A skill spliced so that it begins at position 10^2 to 10^5, beside the recompute of the same tokens there.

The whole prompt is moved: what precedes the skill ends right before it, nothing is at the positions before that, and
so distances between tokens are those of any prompt. Only how far the skill's keys are turned changes. What a splice
loses is of two kinds, and both are told: a skill that was compiled alone has not seen what precedes it (`spliced`);
rows of the same prompt at position 0 have, and were turned only (`turned`). Beside them keys that were not turned, the
control, and llama.cpp's own error: the same recompute in other batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.experiments.cases import SYSTEM, error, near_tie, segments_of
from bench.experiments.table import Row
from bench.protocol.measures.beside import beside
from bench.protocol.measures.greedy import answer
from bench.protocol.texts import Next, Policies
from notes_cli.engine.context import Context
from notes_cli.engine.decision import Decision, decide
from notes_cli.engine.loop import run
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import Tokens
from notes_cli.errors import UnsupportedError
from notes_cli.runtime.assembling import assemble, assembling
from notes_cli.runtime.prompt import Prompt, parts_of
from notes_cli.runtime.workspace import Workspace

POSITIONS = (100, 1_000, 10_000, 100_000)
SPARE = 2048  # positions after that of the skill, for it, the question and the answer
BATCHES = {"batches of 16": 16, "token by token": 1}  # of the same recompute
WAYS = ("spliced", "turned", "unrotated", *BATCHES)


class Moved(Notebook):
    """A notebook whose first row has another position than 0; all others follow it."""

    def __init__(self, context: Context, start: int, first: int) -> None:
        """`start`: the position of the first row, which is that of the token `first`."""
        super().__init__(context)
        self.start = start
        context.decode_at(self.sequence, start, np.array([first], np.int32))
        self.append([first])
        self.advance(1)

    def position(self, row: int) -> int:
        return self.start + row

    def length(self, rows: int) -> int:
        return self.start + rows if rows else 0

    def _row(self, position: int) -> int:
        return max(0, position - self.start)


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    # The hooks place no row beyond the size of a context, so it has a cell for each position, most of them empty.
    options = replace(workspace.options, n_ctx=POSITIONS[-1] + SPARE)
    with Workspace(workspace.model.path, options, beyond_trained=True) as large:
        yield from _measured(large, cases, texts)


def _measured(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.policies("distance", cases, skills=(1,)):
        (skill,) = segments_of(workspace, case.skills)
        alone = Prompt(case.question, [skill], system=SYSTEM)
        with assemble(workspace, alone, splice=False) as notebook:
            notebook.flush()
            tokens, before = notebook.tokens, skill_at(notebook)
            rows, _ = notebook.read(before, before + len(skill), skill.kv)
        seen = replace(alone, segments=[replace(skill, layers=rows, base=before)])
        prompts = {"spliced": (alone, True), "turned": (seen, True), "unrotated": (alone, False)}

        for position in POSITIONS:
            start = position - before
            if start < 0:
                raise UnsupportedError(f"{before} tokens precede a skill, so none can begin at position {position}")
            reference, wanted, sure = _found(workspace, case, moved(workspace, alone, tokens, start, splice=False))
            for way in WAYS:
                if way in BATCHES:
                    there = in_batches(workspace, tokens, start, BATCHES[way])
                else:
                    prompt, rotate = prompts[way]
                    there = moved(workspace, prompt, tokens, start, rotate=rotate)
                chosen, logits, decision = _found(workspace, case, there)
                yield {
                    "case": number,
                    "kind": case.kind,
                    "position": position,
                    "way": way,
                    "same": chosen == reference,
                    "right": chosen == case.answer,
                    "recompute_right": reference == case.answer,
                    "near": near_tie(sure),
                    "error": error(logits, wanted),
                    **beside(logits, wanted, decision),
                }


def _found(workspace: Workspace, case: Policies, notebook: Notebook) -> tuple[str, NDArray[np.float32], Decision]:
    """The answer at the end of a notebook, which is closed, the logits there and the choice."""
    with notebook:
        logits, decision = notebook.logits(), decide(notebook, case.choices)
        return answer(workspace, notebook, Prompt(case.question), case), logits, decision


def skill_at(notebook: Notebook) -> int:
    """The row that the first skill of a notebook begins at."""
    return next(piece.position for piece in notebook.pieces if piece.kind == "splice")


def moved(
    workspace: Workspace, prompt: Prompt, tokens: Tokens, start: int, *, splice: bool = True, rotate: bool = True
) -> Notebook:
    """The prompt, whose tokens these are, from position `start` on."""
    begun = Moved(workspace.context, start, int(tokens[0]))
    parts = parts_of(workspace, prompt)
    return run(assembling(workspace, prompt, parts, splice=splice, rotate=rotate, strict=True, begun=begun))


def in_batches(workspace: Workspace, tokens: Tokens, start: int, size: int) -> Notebook:
    """The tokens decoded from position `start` on, `size` at a time."""
    notebook = Moved(workspace.context, start, int(tokens[0]))
    for first in range(1, len(tokens), size):
        notebook.append(tokens[first : first + size])
        notebook.flush()
    return notebook

"""Answers of a model to prompts that share all but their question, with the logits of the first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.runtime.assemble import assemble, divide_before_question, temporary_cells
from notes_cli.runtime.prompt import Parts, Prompt, chunks_of, parts_of
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.prompt import at_question

ANSWER = 24  # tokens of an answer at most


@dataclass(frozen=True)
class Outcome:
    """An answer, and the logits of its first token, [n_vocab]."""

    text: str
    logits: NDArray[np.float32]


def answers(
    workspace: Workspace, prompts: Sequence[Prompt], *, splice: bool = True, exact: bool = False, seam: int = 1
) -> list[Outcome]:
    """Greedy answers to prompts that differ in their question alone; the rest of the prompt is made once.

    `splice=False` decodes the same tokens, `exact` all that is not where it was compiled, `seam`: boundary tokens.
    """
    parts = [_parts(workspace, prompt) for prompt in prompts]
    longest = max(len(one.tokens[-1]) for one in parts) + ANSWER
    workspace.reserve(parts[0].count + temporary_cells(prompts[0], parts[0]) + longest, 2)
    outcomes = []
    with assemble(workspace, prompts[0], parts=parts[0].stem, splice=splice, exact=exact, seam=seam) as stem:
        if not parts[0].stem.asking:  # else it was divided there
            divide_before_question(stem)
        stem.flush_divided()
        for one in parts:
            with stem.share_rows() as seq_id, Sampler(SamplerOptions(temperature=0.0)) as sampler:
                seq_id.append(one.tokens[-1], "question")
                logits = seq_id.logits().copy()
                text = workspace.model.text(seq_id.generate(sampler, ANSWER)).strip()
            outcomes.append(Outcome(text, logits))
    return outcomes


def _parts(workspace: Workspace, prompt: Prompt) -> Parts:
    """The parts of a prompt, cut before its question, with the batches of `notes ask`."""
    whole = chunks_of(workspace, prompt)
    chunks = at_question(whole)
    return replace(parts_of(workspace, prompt, chunks), asking=1 + len(chunks) - len(whole))

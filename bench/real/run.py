"""Answers of a model to prompts that share all but their question, with the logits of the first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.runtime.assembling import assemble, cells_meanwhile
from notes_cli.runtime.prompt import Prompt, chunks_of, parts_of
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
    cut = [at_question(chunks_of(workspace, prompt)) for prompt in prompts]
    parts = [parts_of(workspace, prompt, chunks) for prompt, chunks in zip(prompts, cut, strict=True)]
    longest = max(len(one.tokens[-1]) for one in parts) + ANSWER
    workspace.make_way(parts[0].count + cells_meanwhile(prompts[0], parts[0]) + longest, 2)
    outcomes = []
    with assemble(workspace, prompts[0], parts=parts[0].stem, splice=splice, exact=exact, seam=seam) as stem:
        stem.flush()
        for one in parts:
            with stem.share() as sequence, Sampler(SamplerOptions(temperature=0.0)) as sampler:
                sequence.append(one.tokens[-1], "question")
                logits = sequence.logits().copy()
                text = workspace.model.text(sequence.generate(sampler, ANSWER)).strip()
            outcomes.append(Outcome(text, logits))
    return outcomes

"""Answers of a model to prompts that share all but their question, with the logits of the first token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.sequence import decode, run
from notes_cli.runtime.assemble import assemble, assemble_task, temporary_cells
from notes_cli.runtime.prefix_cache import PrefixCache
from notes_cli.runtime.prompt import Prompt, parts_of
from notes_cli.runtime.workspace import Workspace

ANSWER = 24  # tokens of an answer at most


@dataclass(frozen=True)
class Outcome:
    """An answer, and the logits of its first token, [n_vocab]."""

    text: str
    logits: NDArray[np.float32]


def answers(
    workspace: Workspace, prompts: Sequence[Prompt], *, splice: bool = True, exact: bool = False
) -> list[Outcome]:
    """Greedy answers to prompts that differ in their question alone; the rest of the prompt is made once.

    `splice=False` decodes the same tokens, `exact` all that is not where it was compiled.
    """
    parts = [parts_of(workspace, prompt) for prompt in prompts]
    longest = max(len(one.tokens[-1]) for one in parts) + ANSWER
    workspace.reserve(2 * parts[0].count + temporary_cells(prompts[0], parts[0]) + longest, 3)
    boundary = PrefixCache().layout(prompts[0], parts[0], 1, splice=splice, exact=exact).boundary
    outcomes = []
    with ExitStack() as stack:
        with assemble(workspace, prompts[0], parts=parts[0], splice=splice, exact=exact, seam=1) as first:
            while not first.divided:
                decode([first])
            stem = stack.enter_context(first.share(boundary) if boundary else workspace.sequence())
        for prompt, one in zip(prompts, parts, strict=True):
            with stem.share(boundary) if boundary else workspace.sequence() as sequence:
                run(assemble_task(workspace, prompt, one, splice=splice, exact=exact, seam=1, begun=sequence))
                logits = sequence.logits().copy()
                with Sampler(SamplerOptions(temperature=0.0)) as sampler:
                    text = workspace.model.text(sequence.generate(sampler, ANSWER)).strip()
            outcomes.append(Outcome(text, logits))
    return outcomes

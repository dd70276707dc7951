"""Answers of a model to prompts that share all but their question, with the logits of the first token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.sequence import decode, run
from notes_cli.runtime.assemble import assemble, assemble_task
from notes_cli.runtime.prefix_cache import PrefixCache
from notes_cli.runtime.prompt import Prompt, rendered
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
    prompts = [rendered(workspace, replace(prompt, splice=splice, exact=exact)) for prompt in prompts]
    longest = max(len(prompt.tokens[-1]) for prompt in prompts) + ANSWER
    workspace.reserve(len(prompts[0]) + prompts[0].cells + longest, 3)
    boundary = PrefixCache().layout(prompts[0]).boundary
    outcomes = []
    with ExitStack() as stack:
        with assemble(workspace, prompts[0]) as first:
            while not first.divided:
                decode([first])
            stem = stack.enter_context(first.share(boundary) if boundary else workspace.sequence())
        for prompt in prompts:
            with stem.share(boundary) if boundary else workspace.sequence() as sequence:
                run(assemble_task(workspace, prompt, begun=sequence))
                logits = sequence.logits().copy()
                with Sampler(SamplerOptions(temperature=0.0)) as sampler:
                    text = workspace.model.text(sequence.generate(sampler, ANSWER)).strip()
            outcomes.append(Outcome(text, logits))
    return outcomes

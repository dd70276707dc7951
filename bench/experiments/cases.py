"""What experiments have in common: cases as segments and prompts, and how a decision is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.experiments.texts import Case, SkillText
from notes_cli.editing.influence import influence
from notes_cli.engine.decision import Decision
from notes_cli.engine.loop import run
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.thinking import choosing
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

SYSTEM = "You are a helpful assistant."
NEAR = 0.1  # nat
THINK = 256  # tokens of a chain of thought
WAYS = ("direct", "reasoned")


def skill_of(text: str, name: str) -> Skill:
    return parse_skill(text, source=name, default=name)


def segments_of(workspace: Workspace, texts: Sequence[SkillText]) -> list[Segment]:
    """Each text compiled; two organisations of one name are told apart."""
    return [
        compile_skill(workspace, skill_of(text.text, f"s{number}-{text.name}")) for number, text in enumerate(texts, 1)
    ]


def joined(case: Case) -> str:
    """All skills of a case as one text: an ordinary cache, in which what follows a field has seen it."""
    return "\n\n".join(text.text for text in case.skills)


def with_influence(workspace: Workspace, segment: Segment, field: str) -> Segment:
    """The segment with the influence of one field, if this model's rows can be compared."""
    if workspace.context.supports("splice"):
        return segment
    with workspace.scratch() as notebook:
        return replace(segment, influence={field: influence(notebook, segment, field)})


def decided(
    workspace: Workspace, prompt: Prompt, choices: Sequence[str], *, splice: bool = True
) -> tuple[str, Notebook]:
    """The decision of a prompt, after a chain of thought if it asks for one, and its notebook."""
    notebook = assemble(workspace, prompt, splice=splice, room=THINK if prompt.think else 0)
    return decided_in(workspace, notebook, prompt, choices), notebook


def decided_in(workspace: Workspace, notebook: Notebook, prompt: Prompt, choices: Sequence[str]) -> str:
    """The decision at the end of a notebook."""
    return decision_in(workspace, notebook, prompt, choices).choice


def decision_in(workspace: Workspace, notebook: Notebook, prompt: Prompt, choices: Sequence[str]) -> Decision:
    """The same with its probabilities."""
    return run(choosing(workspace, notebook, choices, THINK if prompt.think else 0))


def reread(workspace: Workspace, notebook: Notebook, tokens: Tokens) -> tuple[Notebook, int]:
    """What a prefix cache makes of a notebook for these tokens: rows up to the first token that is another one are
    kept. Also how many are decoded, the last one at least. Another notebook where a model's memory cannot go back."""
    was = notebook.tokens
    shorter = min(len(was), len(tokens) - 1)
    differ = np.flatnonzero(was[:shorter] != tokens[:shorter])
    kept = int(differ[0]) if len(differ) else shorter
    if kept < len(was) and workspace.model.recurrent:
        notebook.close()
        notebook, kept = workspace.notebook(), 0
    notebook.truncate(kept)
    notebook.append(tokens[kept:])
    return notebook, len(tokens) - kept


def near_tie(decision: Decision) -> bool:
    """Whether rounding may turn it: its two most probable choices are within NEAR."""
    first, second, *_ = sorted(decision.probabilities.values(), reverse=True)
    return bool(first < second * math.exp(NEAR))


def error(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Normalised mean squared error of logits."""
    a, b = found.astype(np.float64), reference.astype(np.float64)
    return float(((a - b) ** 2).sum() / (b**2).sum())

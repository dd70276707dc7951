"""Decisions as greedy answers: the whole answer, or the outcome that a chain of thought names last."""

from __future__ import annotations

from bench.experiments.cases import THINK
from bench.protocol.texts import Policies
from notes_cli.engine.notebook import Notebook
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from training.tiny.measure import outcome, said

ANSWER = 24  # tokens of an answer


def room(prompt: Prompt) -> int:
    """Tokens that the answer may take."""
    return THINK if prompt.think else ANSWER


def answer(workspace: Workspace, notebook: Notebook, prompt: Prompt, case: Policies) -> str:
    """The decision; the notebook ends with the answer afterwards. Empty where a chain names no outcome."""
    text = said(workspace, notebook, room(prompt))
    return outcome(text, case.choices) if prompt.think else text

"""A field toggled 28 turns, against a true prefill at every turn: nothing of the turn before is taken over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.experiments import toggles
from bench.experiments.table import Row
from bench.protocol.texts import Next
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import Tokens
from notes_cli.runtime.workspace import Workspace


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    return toggles.toggle(workspace, cases, texts, prefilled)


def prefilled(workspace: Workspace, prompts: Sequence[Tokens]) -> Iterator[Notebook]:
    """Each prompt in a notebook of its own, all of it computed."""
    for tokens in prompts:
        with workspace.notebook() as notebook:
            notebook.append(tokens)
            yield notebook

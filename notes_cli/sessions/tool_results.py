"""Turns in which the results of tools take the place of a question: the model has called them in its last answer."""

from __future__ import annotations

from collections.abc import Sequence

from notes_cli.runtime.workspace import Workspace
from notes_cli.text.messages import results_of
from notes_cli.text.prompt import Chunk, next_turn
from notes_cli.text.template import ChatTemplate

Result = tuple[str, str]  # the name of a tool, and what it has returned


def as_question(results: Sequence[Result]) -> str:
    """What a ledger has as the question of such a turn."""
    return ", ".join(f"{name}: {text}" for name, text in results)


def results_turn(workspace: Workspace, template: ChatTemplate, results: Sequence[Result]) -> list[Chunk]:
    """The chunks after an answer that called these tools, up to the next answer; those of kind "result" are named.

    Raise ModelError if the template has no place for them, NotesError for a name that is none.
    """
    ends = [workspace.model.token_bytes(token, special=True).decode() for token in workspace.model.end_tokens]
    return next_turn(template, results_of(results), ends=ends)

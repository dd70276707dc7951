"""Builds turns that return tool results to the model in place of a question."""

from __future__ import annotations

from collections.abc import Sequence

from notes_cli.runtime.workspace import Workspace
from notes_cli.text.messages import results_of
from notes_cli.text.prompt import Chunk, next_turn
from notes_cli.text.template import ChatTemplate

Result = tuple[str, str]  # name of a tool, and its output


def as_question(results: Sequence[Result]) -> str:
    """Return the text that a ledger records as the question of such a turn."""
    return ", ".join(f"{name}: {text}" for name, text in results)


def results_turn(workspace: Workspace, template: ChatTemplate, results: Sequence[Result]) -> list[Chunk]:
    """Return the prompt chunks from an answer that called these tools to the next answer. Raises ModelError if the chat
    template does not render tool results, NotesError for an invalid tool name."""
    ends = [workspace.model.token_bytes(token, special=True).decode() for token in workspace.model.end_tokens]
    return next_turn(template, results_of(results), ends=ends)

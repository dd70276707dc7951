"""Prepares questions with the prompt of `notes ask` and turns of sessions, before any work on K/V."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from notes_cli.engine.decision import variants_of
from notes_cli.engine.segment import Segment
from notes_cli.errors import Notice
from notes_cli.runtime.answering import max_new_tokens
from notes_cli.runtime.assemble import temporary_cells
from notes_cli.runtime.open_skills import warn_edited
from notes_cli.runtime.prompt import Parts, Prompt, parts_of
from notes_cli.runtime.request import Callbacks, Request
from notes_cli.runtime.resolve import ResolvedRequest, resolve_request
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.kv_budget import TURN, session_tokens
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.prepare import (
    PreparedRequest,
    ServerState,
    check_bias,
    check_request,
    prepare_request,
    single_turn,
)
from notes_cli.sessions.folder import SessionFolder, Sessions


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose settings are resolved, and the cells that it needs."""

    draft: ResolvedRequest
    prompt: Prompt
    parts: Parts
    tokens: int  # cells of the prompt, and temporary ones for edits of it
    first_tokens: int  # generated tokens that have cells at admission
    lookahead: int  # cells to score its longest choice
    notices: list[str]


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """The next turn of a session, which is open and locked."""

    stored: SessionFolder
    request: Request
    tokens: int  # upper bound of the session with this prompt
    first_tokens: int  # generated tokens that have cells at admission
    lookahead: int  # cells to score its longest choice
    notices: list[str]


Prepared = PreparedRequest | Question | PreparedTurn


def prepare(state: ServerState, chat: ChatRequest, resources: ExitStack, *, dry: bool = False) -> Prepared:
    """Prepare any request. Its session stays open and locked until `resources` are closed. `dry`: for /explain, without
    compiling images. Raises NotesError."""
    if chat.notes.session is not None:
        return _prepare_turn(state, chat, chat.notes.session, resources)
    return prepare_request(state, chat, dry=dry) if chat.notes.ask is None else _prepare_question(state, chat, dry)


def _prepare_turn(state: ServerState, chat: ChatRequest, name: str, resources: ExitStack) -> PreparedTurn:
    check_request(state, chat)
    workspace = state.workspace
    stored = resources.enter_context(Sessions(workspace.paths.sessions).locked(name, new=True))
    request = single_turn(state.segment_cache, chat, state.names, state.max_tokens, begun=bool(stored.state.live))
    check_bias(workspace, chat)
    tokens, max_new = session_tokens(workspace, stored.state, request)
    first_tokens, notices = _first_tokens(request, max_new), _edited_notices(workspace, request)
    return PreparedTurn(stored, request, tokens, first_tokens, _lookahead(workspace, request), notices)


def _prepare_question(state: ServerState, chat: ChatRequest, dry: bool) -> Question:
    check_request(state, chat)
    workspace = state.workspace
    request = single_turn(state.segment_cache, chat, state.names, state.max_tokens, begun=False, dry=dry)
    check_bias(workspace, chat)
    notices = _edited_notices(workspace, request)
    callbacks = Callbacks(on_notice=lambda notice: notices.append(str(notice)))
    draft = resolve_request(workspace, request, callbacks, dry=dry)
    prompt = draft.prompt
    parts = parts_of(workspace, prompt)
    tokens = parts.count + temporary_cells(prompt, parts)
    max_new = max_new_tokens(workspace, draft.request, draft.settings.think)
    workspace.check_length(tokens + min(max_new, 1))
    first_tokens = _first_tokens(draft.request, max_new)
    return Question(draft, prompt, parts, tokens, first_tokens, _lookahead(workspace, request), notices)


def _first_tokens(request: Request, max_new: int) -> int:
    """Return how many of a request's `max_new` tokens need cells at admission."""
    return max_new - request.room + min(request.room, TURN)


def _edited_notices(workspace: Workspace, request: Request) -> list[str]:
    """Return a notice for each skill whose text was edited since it was compiled."""
    notices: list[Notice] = []
    for skill in request.splice:
        if isinstance(skill, Segment):
            warn_edited(workspace, skill, notices.append)
    return list(map(str, notices))


def _lookahead(workspace: Workspace, request: Request) -> int:
    """Return the cells to score the longest of the request's choices; 0 without choices."""
    variants = variants_of(workspace.model, request.choices or ()).values()
    return max((len(option) for options in variants for option in options), default=0)

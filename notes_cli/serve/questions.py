"""Preparation of a question with the prompt of `notes ask`, and of the next turn of a session, before it has K/V."""

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
from notes_cli.serve.kv_budget import TURN, turn_of_session
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.prepare import PreparedRequest, ServerState, check_bias, check_request, prepare_request, turn_of
from notes_cli.sessions.folder import SessionFolder, Sessions


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose settings are resolved, and the cells that it takes."""

    draft: ResolvedRequest
    prompt: Prompt
    parts: Parts
    tokens: int  # cells of the prompt, and those that edits of it take meanwhile
    room: int  # tokens to write that there is room for when it begins
    lookahead: int  # cells in which the longest of its choices is scored
    notices: list[str]


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """The next turn of a session, which is open and locked."""

    stored: SessionFolder
    request: Request
    tokens: int  # of the session with its next prompt, at most
    room: int  # tokens to write that there is room for when it begins
    lookahead: int  # cells in which the longest of its choices is scored
    notices: list[str]


Prepared = PreparedRequest | Question | PreparedTurn


def prepare(state: ServerState, chat: ChatRequest, held: ExitStack, *, dry: bool = False) -> Prepared:
    """Prepare any request. `held` keeps its session open and locked. `dry`: it is only to be explained, and nothing is
    compiled for it. Raise NotesError."""
    if chat.notes.session is not None:
        return _turn(state, chat, chat.notes.session, held)
    return prepare_request(state, chat, dry=dry) if chat.notes.ask is None else _question(state, chat, dry)


def _turn(state: ServerState, chat: ChatRequest, name: str, held: ExitStack) -> PreparedTurn:
    check_request(state, chat)
    workspace = state.workspace
    stored = held.enter_context(Sessions(workspace.paths.sessions).locked(name, new=True))
    request = turn_of(state.segment_cache, chat, state.names, state.most, begun=bool(stored.state.live))
    check_bias(workspace, chat)
    tokens, spare = turn_of_session(workspace, stored.state, request)
    room, notices = _first_room(request, spare), _edited_notices(workspace, request)
    return PreparedTurn(stored, request, tokens, room, _lookahead(workspace, request), notices)


def _question(state: ServerState, chat: ChatRequest, dry: bool) -> Question:
    """Open the skills of a request and resolve its settings."""
    check_request(state, chat)
    workspace = state.workspace
    request = turn_of(state.segment_cache, chat, state.names, state.most, begun=False, dry=dry)
    check_bias(workspace, chat)
    notices = _edited_notices(workspace, request)
    callbacks = Callbacks(on_notice=lambda notice: notices.append(str(notice)))
    draft = resolve_request(workspace, request, callbacks, dry=dry)
    prompt = draft.prompt
    parts = parts_of(workspace, prompt)
    tokens = parts.count + temporary_cells(prompt, parts)
    spare = max_new_tokens(workspace, draft.request, draft.settings.think)
    workspace.check_length(tokens + min(spare, 1))
    room = _first_room(draft.request, spare)
    return Question(draft, prompt, parts, tokens, room, _lookahead(workspace, request), notices)


def _first_room(request: Request, spare: int) -> int:
    """Of the `spare` tokens that a request may write those that there must be room for when it begins."""
    return spare - request.room + min(request.room, TURN)


def _edited_notices(workspace: Workspace, request: Request) -> list[str]:
    """A notice for each skill whose text was edited since it was compiled."""
    found: list[Notice] = []
    for one in request.splice:
        if isinstance(one, Segment):
            warn_edited(workspace, one, found.append)
    return list(map(str, found))


def _lookahead(workspace: Workspace, request: Request) -> int:
    """Cells in which the longest of the request's choices is decoded to score it; 0 without choices."""
    variants = variants_of(workspace.model, request.choices or ()).values()
    return max((len(option) for options in variants for option in options), default=0)

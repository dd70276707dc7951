"""Prepares questions with the prompt of `notes ask` and turns of sessions, before any work on K/V."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from notes_cli.engine.segment import Segment
from notes_cli.errors import Notice, SessionError
from notes_cli.runtime import answering
from notes_cli.runtime.answering import max_new_tokens, tokens_of_longest
from notes_cli.runtime.open_skills import warn_edited
from notes_cli.runtime.prefix_cache import Layout
from notes_cli.runtime.prompt import parts_of
from notes_cli.runtime.request import Callbacks, Request
from notes_cli.runtime.token_runs import common_prefix
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.prepare import (
    PreparedRequest,
    ServerState,
    check_bias,
    check_request,
    memory_segment,
    prepare_request,
    single_turn,
)
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import State
from notes_cli.text.names import is_name


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question with the prompt of `notes ask`, and the cells that it needs."""

    question: answering.Question
    tokens: int
    first_tokens: int  # generated tokens that have cells at admission
    lookahead: int  # cells to score its longest choice
    notices: list[str]
    layout: Layout | None = None  # if other questions have the same tokens before `boundary`
    boundary: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """The next turn of a session, which is open and locked."""

    stored: SessionFolder
    request: Request
    tokens: int  # upper bound of the session with this prompt
    first_tokens: int  # generated tokens that have cells at admission
    lookahead: int  # cells to score its longest choice
    notices: list[str]


TURN = 2048  # answer tokens that are reserved at first where an answer cannot be preempted
SPARE = 128  # tokens that bound the template's text in a session's turn
SENTENCE = 32  # tokens that bound the wording around an erratum
Prepared = PreparedRequest | PreparedQuestion | PreparedTurn


def prepare(state: ServerState, chat: ChatRequest, resources: ExitStack, *, dry: bool = False) -> Prepared:
    """Prepare any request. Its session stays open and locked until `resources` are closed. `dry`: for /explain, without
    compiling images. Raises NotesError."""
    chatting = chat.notes.session is None and chat.notes.ask is None  # else as without a server
    if (chat.notes.reuse or (chatting and state.reuse)) == "exact":
        chat = replace(chat, notes=replace(chat.notes, exact=True))
    if chat.notes.session is not None:
        return _prepare_turn(state, chat, chat.notes.session, resources)
    return prepare_request(state, chat, dry=dry) if chat.notes.ask is None else _prepare_question(state, chat, dry)


def _prepare_turn(state: ServerState, chat: ChatRequest, name: str, resources: ExitStack) -> PreparedTurn:
    check_request(state, chat)
    workspace = state.workspace
    stored = resources.enter_context(Sessions(workspace.paths.sessions).locked(name, new=True))
    request = single_turn(state.segment_cache, chat, state.names, state.max_tokens, begun=bool(stored.state.live))
    if request.memory is None and (memory := stored.state.memory):
        if not is_name(memory.reference):
            message = f"the memory of session {name} is a file, which a server does not open"
            raise SessionError(message, "Continue it without a server, or name a compiled skill as its memory")
        request = replace(request, memory=memory_segment(state.segment_cache, memory.reference))
    check_bias(workspace, chat)
    tokens = _session_tokens(workspace, stored.state, request)
    first_tokens = _first_tokens(request, max_new_tokens(workspace, request, request.think))
    lookahead, notices = tokens_of_longest(workspace, request.choices), _edited_notices(workspace, request)
    return PreparedTurn(stored, request, tokens, first_tokens, lookahead, notices)


def _prepare_question(state: ServerState, chat: ChatRequest, dry: bool) -> PreparedQuestion:
    check_request(state, chat)
    workspace = state.workspace
    request = single_turn(state.segment_cache, chat, state.names, state.max_tokens, begun=False, dry=dry)
    check_bias(workspace, chat)
    notices = _edited_notices(workspace, request)
    callbacks = Callbacks(on_notice=lambda notice: notices.append(str(notice)))
    question = answering.prepare(workspace, request, callbacks, dry=dry)
    workspace.check_length(question.tokens + min(question.max_new, 1))
    lookahead, layout, boundary = tokens_of_longest(workspace, request.choices), None, None
    if chat.shared:
        layout = _layout(state, question)
        boundary = layout.begin(common_prefix(layout.tokens, _layout(state, question, chat.shared).tokens))
        layout, boundary = (layout, boundary) if boundary else (None, None)
    first_tokens = _first_tokens(request, question.max_new)
    return PreparedQuestion(question, question.tokens, first_tokens, lookahead, notices, layout, boundary)


def _layout(state: ServerState, question: answering.Question, text: str | None = None) -> Layout:
    """Return the layout of a question's prompt, or of one with another text of the question."""
    how, prompt, parts = question.draft.how, question.prompt, question.parts
    if text is not None:
        prompt = replace(prompt, question=text)
        parts = parts_of(state.workspace, prompt)
    return state.prefixes.layout(prompt, parts, how["seam"], splice=how["splice"], exact=how["exact"])


def _session_tokens(workspace: Workspace, state: State, request: Request) -> int:
    """Return an upper bound of the tokens of a session with its next prompt."""
    texts = [request.question, request.system or "", *request.errata, *request.fields.values()]
    texts += [*request.errata, *request.fields.values()]  # again: cells to edit in place
    tokens = len(state.tokens) + SPARE + sum(len(workspace.model.tokenize(text)) for text in texts)
    tokens += SENTENCE * (len(request.errata) + len(request.fields) + len(state.pending))
    if request.memory is not None:  # a new copy, with the session's values in place, and their errata
        tokens += sum(3 * len(workspace.model.tokenize(value)) + SENTENCE for value in state.fields.values())
    segments = (*request.splice, *request.images, request.memory)
    return tokens + sum(len(item) for item in segments if isinstance(item, Segment))


def _first_tokens(request: Request, max_new: int) -> int:
    """Return how many of a request's `max_new` tokens need cells at admission."""
    return max_new - request.room + min(request.room, TURN)


def _edited_notices(workspace: Workspace, request: Request) -> list[str]:
    """Return a notice for each skill whose text was edited since it was compiled."""
    notices: list[Notice] = []
    for skill in (*request.splice, request.memory):
        if isinstance(skill, Segment):
            warn_edited(workspace, skill, notices.append)
    return list(map(str, notices))

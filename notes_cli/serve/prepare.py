"""Prepares requests without any K/V: skills, errata, chat template, tokens and limits.

Requests are chats, completions, questions with the prompt of `notes ask`, and turns of sessions.

It runs in preparation threads (scheduler.py); only sent images are compiled in the decode thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from notes_cli.editing.methods import FIELD, with_quoted
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import ModelError, Notice, SegmentError, SessionError
from notes_cli.library.global_errata import GlobalErrata
from notes_cli.runtime import answering
from notes_cli.runtime.answering import max_new_tokens, tokens_of_longest
from notes_cli.runtime.generate import ANSWER_RESERVE
from notes_cli.runtime.kv_budget import GRANT
from notes_cli.runtime.open_skills import warn_edited
from notes_cli.runtime.prefix_cache import Layout, Reuse
from notes_cli.runtime.prompt import Prompt, changes_of, rendered, rendered_with_tools
from notes_cli.runtime.request import UNLIMITED, Callbacks, Request, Settings
from notes_cli.runtime.resolve import (
    DEFAULT_PLACE,
    Prepared,
    check_usable,
    choose,
    defaults,
    requests_reasoning,
    with_unique_names,
)
from notes_cli.runtime.scheduler import Scheduler
from notes_cli.runtime.token_runs import common_prefix
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.conversations import Conversations, ConversationState, add_errata, prefix_digests
from notes_cli.serve.learned import LearnedBlocks
from notes_cli.serve.metrics import Metrics
from notes_cli.serve.parsing import DRAWN, ChatRequest
from notes_cli.serve.refusals import Refused, as_refusal, invalid, too_long
from notes_cli.serve.segment_cache import SegmentCache, last_text, match_skills, skill_name
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import State
from notes_cli.text.erratum import MOST_QUOTED, Fielded, language_forms
from notes_cli.text.fields import any_quoted
from notes_cli.text.messages import BETWEEN, Conversation, ImagePart, Message, Part, SkillPart, TextPart
from notes_cli.text.names import is_name
from notes_cli.text.tools import form_of

TURN = 2048  # answer tokens that are reserved at first where an answer cannot be preempted
SPARE = 128  # tokens that bound the template's text in a session's turn
SENTENCE = 32  # most tokens of the template around an erratum, and of a field's name that the wording repeats
QUOTED = 6 * MOST_QUOTED  # most tokens of the words around a value that is named by its text
MOST_ITEMS = 10_000  # messages with their parts and calls, or tools: to parse them takes Python's lock for 0.3 s
MATCHED = ("system", "user", "tool")  # roles of messages in which skills' texts are matched


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `notes serve`."""

    host: str = "127.0.0.1"
    keys: tuple[str, ...] = ()
    token: str = ""  # a key for processes of the same user (client.py)
    origins: tuple[str, ...] = ()  # other origins that may send requests
    body: int = 16 << 20  # bytes of a request
    page: bool = True  # the web page at /
    forms: bool = True  # requests may have a grammar or a schema
    verbose: bool = False  # the access log has also what monitors and pages load
    names: tuple[str, ...] = ()  # further names of the model
    splice: tuple[str, ...] = ()  # skills of requests that name none: names or texts
    errata: tuple[str, ...] = ()  # of requests that send none
    reuse: Reuse = "learned"  # of requests that do not name it
    parallel: int = 16  # sequences in prefill or decode
    queue: int = 128  # waiting requests
    max_tokens: int | None = None  # of an answer; None: until the context is full
    chunk: int = 256  # prompt tokens that are prefilled per step
    cache_ram: int | None = None  # bytes for evicted prefixes and learned blocks; None: a share of the free memory

    @property
    def requests(self) -> int:
        """Most requests that run or wait, each with one prompt."""
        return self.parallel + self.queue


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready for the scheduler: a prompt, or the next turn of a session, which is open and locked."""

    chat: ChatRequest
    request: Request
    tokens: int  # cells of the prompt; for a turn an upper bound of the session's with it
    first_tokens: int  # generated tokens that have cells at admission
    notices: list[Notice]
    prepared: Prepared | None = None  # None for a turn
    session: SessionFolder | None = None
    layout: Layout | None = None  # of a chat or completion; of a question if others have the tokens before `boundary`
    boundary: int | None = None
    max_new: int = 0  # most generated tokens, with reasoning
    reasoning_end: int = 0  # of these, those for the end of the reasoning
    lookahead: int = 0  # cells to score its longest choice
    conversation: ConversationState[Segment] | None = None  # after this turn
    digests: Sequence[bytes] = ()  # of its messages (conversations.py)


def skills_of_alias(model: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the skills in a model's alias, `model@returns+support`; the model's name may have an @, too. Any other
    name is that of the one model, as with llama-server: programs send `gpt-4o` or `default`. `known`: its names."""
    if model in known:
        return ()
    after = (model.removeprefix(f"{name}@") for name in known if model.startswith(f"{name}@"))
    skills = next(after, model.partition("@")[2])
    return tuple(name for name in skills.split("+") if name)


@dataclass
class ServerState:
    """The server's state that preparation reads. Any thread may use it, except the workspace's context."""

    workspace: Workspace
    segment_cache: SegmentCache
    scheduler: Scheduler  # only for the decode thread, but for its prefixes' layouts
    conversations: Conversations[Segment]
    errata: GlobalErrata | None  # None: this library has none
    names: Sequence[str]  # of the model
    longest: int | None  # tokens of a prompt with its answer; None: unlimited
    options: Options
    metrics: Metrics
    learned: LearnedBlocks | None = None


def prepare_request(state: ServerState, request: ChatRequest, *, dry: bool = False) -> PreparedRequest:
    """Prepare a request. `dry`: for /explain, without compiling images. Raises NotesError."""
    check_request(state, request)
    alias_skills = skills_of_alias(request.model, state.names)
    if request.prompt is not None:
        if alias_skills:
            raise Refused(400, "skills are spliced into messages: use /v1/chat/completions", param="model")
        tokens = _prompt_tokens(state.workspace, request.prompt)
        return _with_limits(state, request, Prompt.raw(tokens), Settings(False, "", DEFAULT_PLACE, 0))
    return _prepare_chat(state, request, (*alias_skills, *request.notes.splice), dry=dry)


def check_size(state: ServerState, texts: Sequence[str], param: str) -> None:
    """Raises Refused for texts that cannot fit the context even if all their tokens were the longest one: matching and
    tokenising them would take seconds."""
    if state.longest is None or sum(map(len, texts)) <= state.longest:
        return
    count = sum(len("".join(text.split())) for text in texts)  # templates may strip white space
    longest_token = state.workspace.model.longest_token
    if longest_token is not None and count > state.longest * longest_token:
        raise too_long(state.longest, f"has a text of {count:,} characters", param)


def check_messages(state: ServerState, data: Any) -> None:
    """Raises Refused for more messages in JSON than fit the context, as parsing them may take seconds, too. System
    messages do not count, as blank ones are left out of the prompt; so MOST_ITEMS bounds the whole."""
    lists = {key: _list(data, key) for key in ("messages", "input", "tools")}
    for key, items in lists.items():
        count = sum(1 + len(_list(item, "content")) + len(_list(item, "tool_calls")) for item in items)
        if count > MOST_ITEMS:
            raise invalid(key, f"{key} has {count:,} items, with their parts and calls: {MOST_ITEMS:,} at most")
    messages = lists["messages"]
    roles = [message.get("role") for message in messages if isinstance(message, dict)]
    _check_count(state, sum(role not in ("system", "developer") for role in roles), "messages")


def _list(data: Any, key: str) -> list[Any]:
    """Return the list at a key of JSON; [] if there is none."""
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, list) else []


def _check_count(state: ServerState, count: int, name: str) -> None:
    """Raises Refused for more items, of at least one token each, than fit the context."""
    if state.longest is not None and count > state.longest:
        raise too_long(state.longest, f"has {count:,} {name}", name)


def check_request(state: ServerState, request: ChatRequest) -> None:
    """Raises Refused for a request that cannot fit the context."""
    _check_count(state, len(request.tools), "tools")
    parts = (part for message in request.messages for part in message.parts)
    check_size(state, [part.text for part in parts if isinstance(part, TextPart)], "messages")
    check_size(state, [request.prefill], "messages")
    if isinstance(request.prompt, str):
        check_size(state, [request.prompt], "prompt")
    for choice in (request.notes.ask or {}).get("choices") or ():
        check_size(state, [choice], "notes.choices")
        state.workspace.check_text(choice)


def single_turn(state: ServerState, request: ChatRequest, *, begun: bool, dry: bool = False) -> Request:
    """Convert a chat request to the next turn of a session, or to a single question. `begun`: the session has earlier
    turns. `dry`: do not compile images. Raises Refused for parameters that these do not have."""
    options, messages = request.options, list(request.messages)
    limit, cache = state.options.max_tokens, state.segment_cache
    system = messages.pop(0) if messages[0].role == "system" else None
    if len(messages) != 1 or messages[0].role != "user" or request.tools:
        alone = "a session keeps its messages: send the new message alone, and a system message with the first one"
        single = "notes.ask is for one question: send one message of the user, after a system message or without one"
        raise Refused(400, single if request.notes.session is None else alone, param="messages")
    if system is not None and begun:
        raise Refused(400, "the session has begun: its system message was its first", param="messages")
    if system is not None and any(isinstance(part, ImagePart) for part in system.parts):
        message = "the system message of a session or of notes.ask has no images: send them with a question"
        raise Refused(400, message, param="messages")
    if request.answers > 1:
        raise Refused(400, "n does not go with a session or notes.ask, which have one answer", param="n")
    if options.stops:  # the last token of a stop string may have more text
        raise Refused(400, "stop does not go with a session or notes.ask: answers are whole tokens", param="stop")
    if request.notes.ask is not None and limit is not None and limit < options.max_tokens < UNLIMITED:
        message = f"max_tokens is {options.max_tokens:,}, and an answer of this server has {limit:,} tokens at most"
        raise Refused(400, message, param="max_tokens", code="over_limit")
    seed = time.time_ns() if options.sampling.seed == DRAWN else options.sampling.seed
    names = dict.fromkeys(map(skill_name, (*skills_of_alias(request.model, state.names), *request.notes.splice)))
    pictures = [part.picture for part in messages[0].parts if isinstance(part, ImagePart)]
    return replace(
        options,
        question=_text(messages[0]),
        splice=[cache.segment(name) for name in names],
        errata=request.notes.errata,
        system=None if system is None else _text(system),
        max_tokens=_max_tokens(options, limit),
        sampling=replace(options.sampling, seed=seed & 0xFFFFFFFF),
        recompute=request.notes.recompute,
        exact=request.notes.exact,
        images=[cache.image(picture, private=request.private_images, dry=dry) for picture in pictures],
        memory=memory_segment(cache, request.notes.memory) if request.notes.memory else None,
        **(request.notes.ask or {}),
    )


def memory_segment(segment_cache: SegmentCache, name: str) -> Segment:
    """Return the compiled skill that is a memory. Raises Refused for an unknown one, or one of another model."""
    try:
        return segment_cache.segment(name)
    except SegmentError as error:
        refused = as_refusal(error)
        refused.param = "notes.memory"
        raise refused from error


def _text(message: Message) -> str:
    return BETWEEN.join(part.text for part in message.parts if isinstance(part, TextPart))


def _prepare_chat(
    state: ServerState,
    request: ChatRequest,
    names: Iterable[str],
    *,
    dry: bool,
    roles: Collection[str] = MATCHED,
) -> PreparedRequest:
    """Prepare messages: place the skills of these names, and match skills' texts in messages with these roles."""
    workspace, cache = state.workspace, state.segment_cache
    think = requests_reasoning(workspace, request.options.think, request.options.max_think)
    request = replace(request, messages=workspace.reasoning.without_thoughts(workspace.template, request.messages))
    digests = prefix_digests(request)
    earlier, known = state.conversations.find(request, digests)
    texts_of = [message.parts for message in request.messages if message.role in roles]
    for info in cache.known() if known and request.notes.match else ():
        old = known.get(info.name)  # is replaced if the last text in the messages is the one that is compiled now
        if old is not None and info.text != old.text and last_text(texts_of, (old, info)) == info.text:
            known = {name: segment for name, segment in known.items() if name != info.name}
    named: dict[str, Segment] = {}
    for name in map(skill_name, names):
        segment = known.get(name) or cache.segment(name)
        named.setdefault(segment.name, segment)
    skills, messages, near = dict(named), list(request.messages), list[Notice]()
    if request.notes.match:
        # With a salt, only the conversation's own skills: a client must not learn which texts others have compiled.
        texts: list[Segment] = [*known.values(), *([] if request.notes.private else cache.known())]

        def opened(text: Segment) -> Segment | None:
            return text if text is known.get(text.name) else cache.open(text)

        for number, message in enumerate(messages):
            if message.role in roles:
                messages[number] = replace(message, parts=match_skills(message.parts, skills, texts, opened))
        if others := [text for text in texts if text.name not in skills]:
            near = cache.near_matches([message.parts for message in messages if message.role in roles], others)
    messages = [_with_images(state, request, message, skills, dry=dry) for message in messages]
    settings = defaults(workspace)
    # Skills that the request names, and that no message has: their K/V can get new values in place.
    in_messages = {part.name for message in messages for part in message.parts if isinstance(part, SkillPart)}
    editable = {name for name, segment in skills.items() if name not in in_messages and not segment.media}
    placed = _with_skills(messages, list(map(SkillPart, named)), settings.place)
    global_errata = state.errata.all() if state.errata and skills else ()
    with_fields = {name: segment for name, segment in skills.items() if not segment.is_image}
    errata = request.notes.errata
    if any_quoted(errata):
        errata, _, quoted = with_quoted(state.workspace.model, errata, {}, [*with_fields.values()])
        skills |= (with_fields := {segment.name: segment for segment in quoted})
    given = earlier, placed, with_fields, global_errata, errata, settings.wording
    add = partial(add_errata, *given, head=len(placed) > len(messages))
    messages, now = add(editable=editable)
    prompt = Prompt("", list(skills.values()), think=think, fields=now.in_place, method=FIELD)
    if now.in_place and (earlier is None or now.in_place != earlier.in_place):
        chosen, _ = choose(workspace, list(changes_of(workspace, prompt).values()), stated=True)
        if request.notes.exact or not chosen.edits_rows:
            messages, now = add()
            prompt = replace(prompt, fields=now.in_place)
    try:
        conversation, notes = Conversation(tuple(messages), request.tools, request.prefill), request.notes
        how: dict[str, Any] = {"seam": settings.seam, "splice": not notes.recompute, "exact": notes.exact}
        prompt = replace(prompt, conversation=conversation, **how)
        toolsets = cache.known() if request.tools and not request.notes.private else ()
        prompt = rendered_with_tools(workspace, prompt, toolsets, cache.open)
    except ModelError:
        if "tool" not in roles or not any(message.role == "tool" and _has_skill(message) for message in messages):
            raise
        # A template that encodes tool results cannot have a skill there: their text is decoded.
        other_roles = [role for role in roles if role != "tool"]
        return _prepare_chat(state, request, names, dry=dry, roles=other_roles)
    ready = _with_limits(state, request, prompt, replace(settings, think=think))
    ready.notices.extend(near)
    if request.tools and workspace.template.generic_tools:
        notice = f"{workspace.template.name} has no tools: the prompt describes them in a general form"
        ready.notices.append(Notice(notice))
    return replace(ready, conversation=replace(now, client_errata=request.notes.errata), digests=digests)


def _with_reuse(state: ServerState, request: ChatRequest, layout: Layout) -> Layout:
    """Set what a prompt may reuse, and open the compiled texts for that. Like matching, this shows a client which texts
    are compiled."""
    notes, reuse = request.notes, request.notes.reuse or state.options.reuse
    if notes.exact or notes.recompute or reuse == "exact" or state.workspace.model.recurrent:
        return layout
    compiled = () if notes.private else state.segment_cache.with_runs(layout.tokens, layout.texts)
    layout = replace(layout, reuse=reuse)
    learned = state.learned.with_runs(layout, request.salt) if state.learned else ()
    return replace(layout, compiled=(*compiled, *learned))


def _with_images(
    state: ServerState, request: ChatRequest, message: Message, skills: dict[str, Segment], *, dry: bool
) -> Message:
    """Replace the images in a message by compiled ones, which are added to `skills`."""
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, ImagePart):
            image = state.segment_cache.image(part.picture, private=request.private_images, dry=dry)
            [segment] = with_unique_names([image], skills)  # it may be repeated, or another skill may have its name
            skills[segment.name] = segment
            part = SkillPart(segment.name)
        parts.append(part)
    return replace(message, parts=tuple(parts))


def _has_skill(message: Message) -> bool:
    return any(isinstance(part, SkillPart) for part in message.parts)


def _with_skills(messages: Sequence[Message], skills: list[Part], place: str) -> list[Message]:
    """Return the messages with skills at the end of the system message, or before the first question."""
    placed = [*messages]
    late = [number for number, message in enumerate(messages) if message.role == "user"] if place == "late" else []
    if late:
        placed[late[0]] = replace(messages[late[0]], parts=(*skills, *messages[late[0]].parts))
    elif messages[0].role == "system":
        placed[0] = replace(messages[0], parts=(*messages[0].parts, *skills))
    elif skills:
        placed.insert(0, Message("system", tuple(skills)))
    return placed


def _with_limits(state: ServerState, chat: ChatRequest, prompt: Prompt, settings: Settings) -> PreparedRequest:
    """Check the limits of a request, and compute how many tokens it may generate."""
    workspace, options, tokens = state.workspace, chat.options, len(prompt)
    workspace.check_length(tokens + 1)
    check_params(workspace, chat)
    formed = options.grammar is not None and not options.must_call
    if formed and chat.tools and form_of(workspace.template.tool_source) is None:
        message = "how this model calls tools is not known: with a form of the answer it could call none"
        raise Refused(400, message, param="tools", code="unsupported_value")
    if options.call_grammar is not None and workspace.model.recurrent:
        message = "this model cannot take back the beginning of a call: with allowed_tools it needs the mode required"
        raise Refused(400, message, param="tool_choice", code="unsupported_value")
    max_tokens = _max_tokens(options, state.options.max_tokens)
    request = replace(options, think=settings.think, max_tokens=max_tokens, conversation=prompt.conversation)
    reasons = chat.prompt is None and (settings.think or workspace.reasoning.open)
    reasoning_end = ANSWER_RESERVE if reasons else 0
    max_new = request.max_tokens + (request.max_think + reasoning_end if reasons else 0)
    if workspace.longest is not None:
        max_new = min(max_new, workspace.longest - tokens)
    now = time.perf_counter()
    prepared = Prepared(request, prompt, settings, now, now, request.grammar)
    layout = _with_reuse(state, chat, state.scheduler.prefixes.layout(prompt))
    more: dict[str, Any] = {"layout": layout, "max_new": max_new, "reasoning_end": reasoning_end}
    return PreparedRequest(chat, request, prompt.cells, min(max_new, GRANT), [], prepared, **more)


def _max_tokens(options: Request, limit: int | None) -> int:
    """Return the most tokens of an answer: the requested number, at most `limit`."""
    return options.max_tokens if limit is None else min(options.max_tokens, limit)


def check_params(workspace: Workspace, request: ChatRequest) -> None:
    """Raises Refused for a token that the model does not have, GrammarError for a grammar that it cannot follow. The
    grammars are compiled here, as the decode thread would stop for that."""
    for grammar in (request.options.grammar, request.options.call_grammar):
        if grammar is not None:
            check_usable(workspace, grammar)
    if (unknown := workspace.model.unknown(token for token, _ in request.options.sampling.bias)) is not None:
        raise invalid("logit_bias", f"there is no token {unknown}")


def _prompt_tokens(workspace: Workspace, prompt: str | tuple[int, ...]) -> Tokens:
    """Return the tokens of a raw prompt; the names of control tokens are parsed."""
    if isinstance(prompt, str):
        workspace.check_text(prompt)
        tokens = workspace.with_bos(workspace.model.tokenize(prompt, special=True))
    else:
        tokens = np.array(prompt, np.int32)
    if not len(tokens):
        raise Refused(400, "the prompt is empty", param="prompt")
    if (unknown := workspace.model.unknown(tokens.tolist())) is not None:
        raise Refused(400, f"there is no token {unknown}", param="prompt")
    return tokens


# Questions with the prompt of `notes ask`, and turns of sessions.


def prepare(state: ServerState, chat: ChatRequest, resources: ExitStack, *, dry: bool = False) -> PreparedRequest:
    """Prepare any request. Its session stays open and locked until `resources` are closed. `dry`: for /explain, without
    compiling images. Raises NotesError."""
    chatting = chat.notes.session is None and chat.notes.ask is None  # else as without a server
    if (chat.notes.reuse or (chatting and state.options.reuse)) == "exact":
        chat = replace(chat, notes=replace(chat.notes, exact=True))
    if chat.notes.session is not None:
        return _prepare_turn(state, chat, chat.notes.session, resources)
    return prepare_request(state, chat, dry=dry) if chat.notes.ask is None else _prepare_question(state, chat, dry)


def _prepare_turn(state: ServerState, chat: ChatRequest, name: str, resources: ExitStack) -> PreparedRequest:
    check_request(state, chat)
    workspace = state.workspace
    stored = resources.enter_context(Sessions(workspace.paths.sessions).locked(name, new=True))
    request = single_turn(state, chat, begun=bool(stored.state.turns))
    if request.memory is None and (memory := stored.state.memory):
        if not is_name(memory.reference):
            message = f"the memory of session {name} is a file, which a server does not open"
            raise SessionError(message, "Continue it without a server, or name a compiled skill as its memory")
        request = replace(request, memory=memory_segment(state.segment_cache, memory.reference))
    check_params(workspace, chat)
    tokens = _session_tokens(workspace, stored.state, request)
    first_tokens = _first_tokens(request, max_new_tokens(workspace, request, request.think))
    lookahead, notices = tokens_of_longest(workspace, request.choices), _edited_notices(workspace, request)
    return PreparedRequest(chat, request, tokens, first_tokens, notices, session=stored, lookahead=lookahead)


def _prepare_question(state: ServerState, chat: ChatRequest, dry: bool) -> PreparedRequest:
    check_request(state, chat)
    workspace = state.workspace
    request = single_turn(state, chat, begun=False, dry=dry)
    check_params(workspace, chat)
    notices = _edited_notices(workspace, request)
    callbacks = Callbacks(lambda event: notices.append(event) if isinstance(event, Notice) else None)
    asked = answering.prepare(workspace, request, callbacks, dry=dry)
    tokens, max_new = asked.prompt.cells, max_new_tokens(workspace, asked.request, asked.settings.think)
    workspace.check_length(tokens + min(max_new, 1))
    lookahead, layout, boundary = tokens_of_longest(workspace, request.choices), None, None
    if chat.shared:
        layout = state.scheduler.prefixes.layout(asked.prompt)
        other = state.scheduler.prefixes.layout(rendered(workspace, replace(asked.prompt, question=chat.shared)))
        boundary = layout.begin(common_prefix(layout.tokens, other.tokens))
        layout = replace(layout, states=())  # it has the batches of `notes ask`
        layout, boundary = (layout, boundary) if boundary else (None, None)
    more: dict[str, Any] = {"layout": layout, "boundary": boundary, "lookahead": lookahead}
    return PreparedRequest(chat, request, tokens, _first_tokens(request, max_new), notices, asked, **more)


def _session_tokens(workspace: Workspace, state: State, request: Request) -> int:
    """Return an upper bound of the tokens of a session with its next prompt."""
    texts = [request.question, request.system or "", *request.errata, *request.fields.values()]
    workspace.check_text("".join(texts))
    texts += [*request.errata, *request.fields.values()]  # again: cells to edit in place
    tokens = len(state.tokens) + SPARE + sum(len(workspace.model.tokenize(text)) for text in texts)
    segments = [item for item in (*request.splice, *request.images, request.memory) if isinstance(item, Segment)]
    skills: list[Fielded] = [*state.skills, *segments]
    forms = {form for skill in skills for kind, form in language_forms(skill.text).items() if kind != "words"}
    forms.add(request.wording or defaults(workspace).wording)
    sentence = SENTENCE + max(len(workspace.model.tokenize(form)) for form in forms)
    tokens += sentence * (len(request.errata) + len(request.fields) + len(state.pending))
    named = [*request.errata, *request.fields, *state.corrections.pending]
    tokens += QUOTED * sum("=>" in text or '"' in text for text in named)
    if request.memory is not None:  # a new copy, with the session's values in place, and their errata
        tokens += sum(3 * len(workspace.model.tokenize(value)) + sentence for value in state.fields.values())
    return tokens + sum(map(len, segments))


def _first_tokens(request: Request, max_new: int) -> int:
    """Return how many of a request's `max_new` tokens need cells at admission."""
    return max_new - request.room + min(request.room, TURN)


def _edited_notices(workspace: Workspace, request: Request) -> list[Notice]:
    notices: list[Notice] = []
    for skill in (*request.splice, request.memory):
        if isinstance(skill, Segment):
            warn_edited(workspace, skill, notices.append)
    return notices

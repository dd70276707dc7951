"""Preparation of requests: skills, errata, the chat template, tokens and limits, all that needs no K/V.

It runs in threads of its own (scheduler.py), beside the one that decodes, which compiles images that were sent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import ModelError
from notes_cli.library.global_errata import GlobalErrata
from notes_cli.runtime.generate import ANSWER_RESERVE
from notes_cli.runtime.prefix_cache import Layout, PrefixCache
from notes_cli.runtime.prompt import Prompt, parts_of, with_tools
from notes_cli.runtime.request import UNLIMITED, Request
from notes_cli.runtime.resolve import check_usable, requests_reasoning, with_unique_names
from notes_cli.runtime.settings import UNMEASURED, defaults
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.conversations import Conversations, Copy, Talk, keys_of, told
from notes_cli.serve.parsing import DRAWN, ChatRequest, GenerationParams
from notes_cli.serve.refusals import Refused, too_long
from notes_cli.serve.segment_cache import SegmentCache, Text, called, matched, read_last
from notes_cli.text.messages import BETWEEN, Conversation, ErratumPart, ImagePart, Message, Part, SkillPart, TextPart
from notes_cli.text.tools import form_of

WHOLE = ("gpt2", "llama", "rwkv")  # tokenizers that leave nothing of a text out
MATCHED = ("system", "user", "tool")  # messages in which texts of skills are looked for


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request, ready to be read and answered."""

    request: ChatRequest
    layout: Layout
    think: bool
    max_tokens: int  # tokens of the answer
    room: int  # tokens that are written at most, a chain of thought and all
    kept: int  # of them, for the end of the chain
    notices: tuple[str, ...] = ()
    talk: Talk | None = None  # the conversation after this turn
    keys: Sequence[bytes] = ()  # of its messages (conversations.py)


def model_of(model: str, known: Sequence[str]) -> tuple[str, ...]:
    """The skills that a model's alias names, `model@returns+support`; its own name may have an @, too. Raise Refused
    for another model."""
    if model in known or not model:
        return ()
    skills = next((model.removeprefix(f"{one}@") for one in known if model.startswith(f"{one}@")), None)
    if skills is None:
        raise Refused(
            404, f"The model '{model[:80]}' does not exist. There is {known[0]}", param="model", code="model_not_found"
        )
    return tuple(name for name in skills.split("+") if name)


@dataclass
class ServerState:
    """State of the server that preparation reads. Any thread may use it, but for the context of the workspace."""

    workspace: Workspace
    segment_cache: SegmentCache
    prefixes: PrefixCache
    conversations: Conversations
    errata: GlobalErrata | None  # None: this library keeps none
    names: Sequence[str]  # of the model
    most: int | None  # tokens of an answer; None: until the context ends
    longest: int | None  # tokens that a prompt and its answer may have; None: any number

    @cached_property
    def longest_token(self) -> int | None:
        """Bytes of the longest token; None where texts may have fewer tokens than that tells."""
        model = self.workspace.model
        if model.metadata("tokenizer.ggml.model") not in WHOLE:
            return None
        return max(len(model.token_bytes(token, special=True)) for token in range(model.n_vocab))


def prepare_request(state: ServerState, request: ChatRequest, *, dry: bool = False) -> PreparedRequest:
    """Prepare a request. `dry`: it is only to be explained, and nothing is compiled for it. Raise NotesError."""
    check_request(state, request)
    named = model_of(request.model, state.names)
    if request.prompt is not None:
        if named:
            raise Refused(400, "skills are spliced into messages: use /v1/chat/completions", param="model")
        return _finished(state, request, state.prefixes.raw(_raw(state.workspace, request.prompt)), False)
    return _prepare_chat(state, request, (*named, *request.notes.splice), dry=dry)


def check_size(state: ServerState, texts: Sequence[str], param: str) -> None:
    """Raise Refused for texts that are certain not to fit the context: even if all their tokens were the longest one.
    To look for skills in them and to tokenise them would take seconds."""
    if state.longest is None or sum(map(len, texts)) <= state.longest:
        return
    count = sum(len("".join(text.split())) for text in texts)  # blanks may come to nothing
    if state.longest_token is not None and count > state.longest * state.longest_token:
        raise too_long(state.longest, f"has a text of {count:,} characters", param)


def check_messages(state: ServerState, data: Any) -> None:
    """The same for the messages of a chat request in JSON, before it is parsed: that may take seconds, too. Those of
    the system do not count, as blank ones are left out of the prompt."""
    messages = data.get("messages") if isinstance(data, dict) else None
    roles = [one.get("role") for one in (messages if isinstance(messages, list) else ()) if isinstance(one, dict)]
    _check_count(state, sum(role not in ("system", "developer") for role in roles), "messages")


def _check_count(state: ServerState, count: int, name: str) -> None:
    """Raise Refused for so many parts of a prompt, each of which has a token at least."""
    if state.longest is not None and count > state.longest:
        raise too_long(state.longest, f"has {count:,} {name}", name)


def check_request(state: ServerState, request: ChatRequest) -> None:
    """The same for a request."""
    _check_count(state, len(request.tools), "tools")
    parts = (part for message in request.messages for part in message.parts)
    check_size(state, [part.text for part in parts if isinstance(part, TextPart)], "messages")
    if isinstance(request.prompt, str):
        check_size(state, [request.prompt], "prompt")
    for choice in (request.notes.ask or {}).get("choices") or ():
        check_size(state, [choice], "notes.choices")


def _sent_newer(
    segment_cache: SegmentCache, known: Mapping[str, Segment], request: ChatRequest, roles: Collection[str]
) -> list[str]:
    """Of the skills that a conversation has, those of which a text that was compiled since is read last. An older one
    may come back so, of which the conversation has copies from before."""
    if not known or not request.notes.match:
        return []
    newer = [info for info in segment_cache.known() if info.name in known and info.text != known[info.name].text]
    said = [one.parts for one in request.messages if one.role in roles]
    return [info.name for info in newer if read_last(said, (known[info.name], info)) == info.text]


def turn_of(
    segment_cache: SegmentCache,
    request: ChatRequest,
    known: Sequence[str],
    most: int | None,
    *,
    begun: bool,
    dry: bool = False,
) -> Request:
    """The next turn of a session, or a question alone. `begun`: it is not the first turn. `dry`: images are not
    compiled. Raise Refused for what neither can take."""
    wanted, messages = request.params, list(request.messages)
    system = messages.pop(0) if messages[0].role == "system" else None
    if len(messages) != 1 or messages[0].role != "user" or request.tools:
        what = "a session keeps its messages: send the new message alone, and a system message with the first one"
        if request.notes.session is None:
            what = "notes.ask is for one question: send one message of the user, after a system message or without one"
        raise Refused(400, what, param="messages")
    if system is not None and begun:
        raise Refused(400, "the session has begun: its system message was its first", param="messages")
    if system is not None and any(isinstance(part, ImagePart) for part in system.parts):
        raise Refused(
            400,
            "the system message of a session or of notes.ask has no images: send them with a question",
            param="messages",
        )
    if wanted.choices > 1:
        raise Refused(400, "n does not go with a session or notes.ask, which have one answer", param="n")
    if wanted.stops:  # the token that a stop is found in may have more than the stop
        raise Refused(400, "stop does not go with a session or notes.ask: answers are whole tokens", param="stop")
    if request.notes.ask is not None and most is not None and (wanted.max_tokens or 0) > most:
        what = f"max_tokens is {wanted.max_tokens:,}, and an answer of this server has {most:,} tokens at most"
        raise Refused(400, what, param="max_tokens", code="over_limit")
    seed = time.time_ns() if wanted.sampling.seed == DRAWN else wanted.sampling.seed
    names = dict.fromkeys(map(called, (*model_of(request.model, known), *request.notes.splice)))
    pictures = [part.picture for part in messages[0].parts if isinstance(part, ImagePart)]
    return Request(
        _words(messages[0]),
        [segment_cache.segment(name) for name in names],
        request.notes.errata,
        system=None if system is None else _words(system),
        think=wanted.think,
        max_think=wanted.max_think,
        max_tokens=_most(wanted, most),
        sampling=replace(wanted.sampling, seed=seed & 0xFFFFFFFF),
        grammar=wanted.grammar,
        recompute=request.notes.recompute,
        exact=request.notes.exact,
        images=[segment_cache.image(picture, private=request.notes.private, dry=dry) for picture in pictures],
        **(request.notes.ask or {}),
    )


def _words(message: Message) -> str:
    """The texts of a message, as it would be read without a session."""
    return BETWEEN.join(part.text for part in message.parts if isinstance(part, TextPart))


def _prepare_chat(
    state: ServerState,
    request: ChatRequest,
    names: Iterable[str],
    *,
    dry: bool,
    roles: Collection[str] = MATCHED,
) -> PreparedRequest:
    """Arrange messages, with the skills of these names in the system message and those that are matched where they are.
    `roles`: of the messages in which texts are looked for."""
    workspace, wanted = state.workspace, request.params
    think = requests_reasoning(workspace, wanted.think, wanted.max_think)
    keys = keys_of(request)
    talk, known = state.conversations.find(request, keys)
    for name in _sent_newer(state.segment_cache, known, request, roles):
        talk, known = talk and talk.without(name), {one: segment for one, segment in known.items() if one != name}
    named: dict[str, Segment] = {}
    for name in map(called, names):
        segment = known.get(name) or state.segment_cache.segment(name)
        named.setdefault(segment.name, segment)
    found, messages = dict(named), list(request.messages)
    if request.notes.match:
        # Whoever has a salt learns nothing of what others have compiled.
        texts: list[Text] = [*known.values(), *([] if request.notes.private else state.segment_cache.known())]
        messages = [
            replace(one, parts=matched(one.parts, found, texts, state.segment_cache.open)) if one.role in roles else one
            for one in messages
        ]
    messages = [_with_images(state, request, one, found, dry=dry) for one in messages]
    settings = defaults(workspace, think=think) if found else UNMEASURED
    question = _question(messages)
    standing = state.errata.all() if state.errata and found else ()
    calling = any(one.role == "assistant" for one in messages[question:])
    result = len(messages) - 1 if calling else None
    copies = _copies(messages, named, settings.place)
    now = told(talk, found, copies, standing, request.notes.errata, question, settings.wording, result)
    messages = [_corrected(one, number, now) for number, one in enumerate(messages)]
    messages = _placed(messages, list(map(SkillPart, named)), settings.place)
    try:
        conversation = Conversation(tuple(messages), request.tools)
        prompt = Prompt("", list(found.values()), think=think, conversation=conversation)
        sets = state.segment_cache.known() if request.tools and not request.notes.private else ()
        prompt, chunks = with_tools(workspace, prompt, sets, state.segment_cache.open)
        parts = parts_of(workspace, prompt, chunks)
    except ModelError:
        if "tool" not in roles or not any(messages[copy.message].role == "tool" for copy in copies):
            raise
        # A template that encodes results of tools has no place for a skill there: the text goes as it is.
        rest = [role for role in roles if role != "tool"]
        return _prepare_chat(state, request, names, dry=dry, roles=rest)
    how = request.notes
    layout = state.prefixes.layout(prompt, parts, settings.seam, splice=not how.recompute, exact=how.exact)
    return replace(_finished(state, request, layout, think), talk=now, keys=keys)


def _with_images(
    state: ServerState, request: ChatRequest, message: Message, found: dict[str, Segment], *, dry: bool
) -> Message:
    """The message with a compiled image in the place of each that was sent, which `found` has then, too."""
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, ImagePart):
            image = state.segment_cache.image(part.picture, private=request.notes.private, dry=dry)
            [segment] = with_unique_names([image], found)  # it was sent before, or something else is called so
            found[segment.name] = segment
            part = SkillPart(segment.name)
        parts.append(part)
    return replace(message, parts=tuple(parts))


def _question(messages: Sequence[Message]) -> int:
    """The number of the message that the turn begins with: the last one of the user, or a system message that comes in
    the place of one, after an answer."""
    for number, one in reversed([*enumerate(messages)]):
        said = messages[number - 1] if number else None
        if one.role == "user" or (one.role == "system" and said and said.role == "assistant" and not said.tool_calls):
            return number
    return len(messages) - 1


def _copies(messages: Sequence[Message], named: Iterable[str], place: str) -> list[Copy]:
    """The places that have skills, in the order of the prompt."""
    copies = [copy for number, message in enumerate(messages) for _, copy in _parts(message, number) if copy]
    late = _late(messages, place)
    before = sum(copy.message < (int(messages[0].role == "system") if late is None else late) for copy in copies)
    return [*copies[:before], *map(Copy, named), *copies[before:]]


def _corrected(message: Message, number: int, talk: Talk) -> Message:
    """A message with its errata: at its beginning, and after skills in it."""
    parts: list[Part] = list(map(ErratumPart, talk.before.get(number, ())))
    for part, copy in _parts(message, number):
        parts += [part, *map(ErratumPart, talk.with_copy.get(copy, ()) if copy else ())]
    return replace(message, parts=tuple(parts))


def _parts(message: Message, number: int) -> Iterator[tuple[Part, Copy | None]]:
    """The parts of a message, and of which copy each skill among them is."""
    nth: Counter[str] = Counter()
    for part in message.parts:
        if isinstance(part, SkillPart):
            yield part, Copy(part.name, number, nth[part.name])
            nth[part.name] += 1
        else:
            yield part, None


def _late(messages: Sequence[Message], place: str) -> int | None:
    """The number of the message that skills are placed at the beginning of, if they are placed late."""
    if place != "late":
        return None
    return next((number for number, one in enumerate(messages) if one.role == "user"), None)


def _placed(messages: list[Message], given: list[Part], place: str) -> list[Message]:
    """The messages with skills at the end of the system message, or before the first question."""
    if not given:
        return messages
    if (late := _late(messages, place)) is not None:
        messages[late] = replace(messages[late], parts=(*given, *messages[late].parts))
    elif messages[0].role == "system":
        messages[0] = replace(messages[0], parts=(*messages[0].parts, *given))
    else:
        messages.insert(0, Message("system", tuple(given)))
    return messages


def _finished(state: ServerState, request: ChatRequest, layout: Layout, think: bool) -> PreparedRequest:
    """With how much may be written."""
    workspace, writing, most = state.workspace, request.params, state.most
    workspace.check_length(len(layout) + 1)
    check_bias(workspace, request)
    if writing.grammar is not None:
        check_usable(workspace, writing.grammar)
        if request.tools and not writing.must_call and form_of(workspace.model.chat_template or "") is None:
            what = "how this model calls tools is not known: with a form of the answer it could call none"
            raise Refused(400, what, param="tools", code="unsupported_value")
    max_tokens = _most(writing, most)
    thinks = request.prompt is None and (think or workspace.reasoning.open)
    kept = ANSWER_RESERVE if thinks else 0
    room = max_tokens + (writing.max_think + kept if thinks else 0)
    if workspace.longest is not None:
        room = min(room, workspace.longest - len(layout))
    return PreparedRequest(request, layout, think, max_tokens, room, kept)


def _most(params: GenerationParams, most: int | None) -> int:
    """Tokens of an answer: those that were asked for, and no more than `most`. ENDLESS where neither bounds them."""
    return min(given for given in (params.max_tokens, most, UNLIMITED) if given is not None)


def check_bias(workspace: Workspace, request: ChatRequest) -> None:
    """Raise Refused for a token that the model does not have."""
    if (strange := workspace.model.unknown(token for token, _ in request.params.sampling.bias)) is not None:
        raise Refused(400, f"there is no token {strange}", param="logit_bias", code="invalid_value")


def _raw(workspace: Workspace, prompt: str | tuple[int, ...]) -> Tokens:
    """The tokens of a raw prompt, in which control tokens are such."""
    if isinstance(prompt, str):
        tokens = workspace.with_bos(workspace.model.tokenize(prompt, special=True))
    else:
        tokens = np.array(prompt, np.int32)
    if not len(tokens):
        raise Refused(400, "the prompt is empty", param="prompt")
    if (strange := workspace.model.unknown(tokens.tolist())) is not None:
        raise Refused(400, f"there is no token {strange}", param="prompt")
    return tokens

"""From what is asked to a prompt in pieces: which skills it has and where, what is said of them, how it is answered."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import ModelError
from notes_cli.library.standing import StandingErrata
from notes_cli.runtime.asking import ENDLESS, Request
from notes_cli.runtime.prefixes import Layout, Prefixes
from notes_cli.runtime.prompt import Prompt, parts_of, with_tools
from notes_cli.runtime.settings import UNMEASURED, defaults
from notes_cli.runtime.settling import check_usable, named_apart, thinks
from notes_cli.runtime.thinking import ROOM
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.conversations import Conversations, Copy, Talk, told
from notes_cli.serve.parsing import DRAWN, Asked, Writing
from notes_cli.serve.refusals import Refused
from notes_cli.serve.shelf import Shelf, Text, called, matched, read_last
from notes_cli.text.messages import BETWEEN, Conversation, ErratumPart, ImagePart, Message, Part, SkillPart, TextPart
from notes_cli.text.tools import form_of

MATCHED = ("system", "user", "tool")  # messages in which texts of skills are looked for


@dataclass(frozen=True, slots=True)
class Arranged:
    """A request, ready to be read and answered."""

    asked: Asked
    layout: Layout
    think: bool
    max_tokens: int  # tokens of the answer
    room: int  # tokens that are written at most, a chain of thought and all
    kept: int  # of them, for the end of the chain
    notices: tuple[str, ...] = ()
    talk: Talk | None = None  # what the conversation has been told with this turn


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


@dataclass(slots=True)
class Desk:
    """What requests are arranged with."""

    workspace: Workspace
    shelf: Shelf
    prefixes: Prefixes
    conversations: Conversations
    errata: StandingErrata | None  # None: this library keeps none
    names: Sequence[str]  # of the model
    most: int | None  # tokens of an answer; None: until the context ends


def arrange(desk: Desk, asked: Asked, *, dry: bool = False) -> Arranged:
    """Arrange a request. `dry`: it is only to be explained, and nothing is compiled for it. Raise NotesError."""
    named = model_of(asked.model, desk.names)
    if asked.prompt is not None:
        if named:
            raise Refused(400, "skills are spliced into messages: use /v1/chat/completions", param="model")
        return _finished(desk, asked, desk.prefixes.raw(_raw(desk.workspace, asked.prompt)), False)
    return _arranged(desk, asked, (*named, *asked.notes.splice), dry=dry)


def _sent_newer(shelf: Shelf, known: Mapping[str, Segment], asked: Asked, roles: Collection[str]) -> list[str]:
    """Of the skills that a conversation has, those of which a text that was compiled since is read last. An older one
    may come back so, of which the conversation has copies from before."""
    if not known or not asked.notes.match:
        return []
    newer = [info for info in shelf.known() if info.name in known and info.text != known[info.name].text]
    said = [one.parts for one in asked.messages if one.role in roles]
    return [info.name for info in newer if read_last(said, (known[info.name], info)) == info.text]


def turn_of(shelf: Shelf, asked: Asked, known: Sequence[str], most: int | None, *, begun: bool) -> Request:
    """The next turn of a session. `begun`: it is not its first one. Raise Refused for what a session cannot take."""
    wanted, messages = asked.writing, list(asked.messages)
    system = messages.pop(0) if messages[0].role == "system" else None
    if len(messages) != 1 or messages[0].role != "user" or asked.tools:
        what = "a session keeps its messages: send the new message alone, and a system message with the first one"
        raise Refused(400, what, param="messages")
    if system is not None and begun:
        raise Refused(400, "the session has begun: its system message was its first", param="messages")
    if system is not None and any(isinstance(part, ImagePart) for part in system.parts):
        raise Refused(400, "a session's system message has no images: send them with a question", param="messages")
    if wanted.choices > 1:
        raise Refused(400, "n does not go with a session, which keeps its one answer", param="n")
    if wanted.stops:  # the token that a stop is found in may have more than the stop
        raise Refused(400, "stop does not go with a session, which keeps whole tokens", param="stop")
    seed = time.time_ns() if wanted.sampling.seed == DRAWN else wanted.sampling.seed
    names = dict.fromkeys(map(called, (*model_of(asked.model, known), *asked.notes.splice)))
    pictures = [part.picture for part in messages[0].parts if isinstance(part, ImagePart)]
    return Request(
        _words(messages[0]),
        [shelf.segment(name) for name in names],
        asked.notes.errata,
        system=None if system is None else _words(system),
        think=wanted.think,
        max_think=wanted.max_think,
        max_tokens=_most(wanted, most),
        sampling=replace(wanted.sampling, seed=seed & 0xFFFFFFFF),
        grammar=wanted.grammar,
        recompute=asked.notes.recompute,
        exact=asked.notes.exact,
        images=[shelf.image(picture, private=asked.notes.private) for picture in pictures],
    )


def _words(message: Message) -> str:
    """The texts of a message, as it would be read without a session."""
    return BETWEEN.join(part.text for part in message.parts if isinstance(part, TextPart))


def _arranged(
    desk: Desk,
    asked: Asked,
    names: Iterable[str],
    *,
    dry: bool,
    roles: Collection[str] = MATCHED,
) -> Arranged:
    """Arrange messages, with the skills of these names in the system message and those that are matched where they are.
    `roles`: of the messages in which texts are looked for."""
    workspace, wanted = desk.workspace, asked.writing
    think = thinks(workspace, wanted.think, wanted.max_think)
    talk, known = desk.conversations.find(asked)
    for name in _sent_newer(desk.shelf, known, asked, roles):
        talk, known = talk and talk.without(name), {one: segment for one, segment in known.items() if one != name}
    named: dict[str, Segment] = {}
    for name in map(called, names):
        segment = known.get(name) or desk.shelf.segment(name)
        named.setdefault(segment.name, segment)
    found, messages = dict(named), list(asked.messages)
    if asked.notes.match:
        # Whoever has a salt learns nothing of what others have compiled.
        texts: list[Text] = [*known.values(), *([] if asked.notes.private else desk.shelf.known())]
        messages = [
            replace(one, parts=matched(one.parts, found, texts, desk.shelf.open)) if one.role in roles else one
            for one in messages
        ]
    messages = [_with_images(desk, asked, one, found, dry=dry) for one in messages]
    settings = defaults(workspace, think=think) if found else UNMEASURED
    question = _question(messages)
    standing = desk.errata.all() if desk.errata and found else ()
    calling = any(one.role == "assistant" for one in messages[question:])
    result = len(messages) - 1 if calling else None
    copies = _copies(messages, named, settings.place)
    now = told(talk, found, copies, standing, asked.notes.errata, question, settings.wording, result)
    messages = [_corrected(one, number, now) for number, one in enumerate(messages)]
    messages = _placed(messages, list(map(SkillPart, named)), settings.place)
    try:
        conversation = Conversation(tuple(messages), asked.tools)
        prompt = Prompt("", list(found.values()), think=think, conversation=conversation)
        sets = desk.shelf.known() if asked.tools and not asked.notes.private else ()
        prompt, chunks = with_tools(workspace, prompt, sets, desk.shelf.open)
        parts = parts_of(workspace, prompt, chunks)
    except ModelError:
        if "tool" not in roles or not any(messages[copy.message].role == "tool" for copy in copies):
            raise
        # A template that encodes results of tools has no place for a skill there: the text goes as it is.
        rest = [role for role in roles if role != "tool"]
        return _arranged(desk, asked, names, dry=dry, roles=rest)
    how = asked.notes
    layout = desk.prefixes.layout(prompt, parts, settings.seam, splice=not how.recompute, exact=how.exact)
    return replace(_finished(desk, asked, layout, think), talk=now)


def _with_images(desk: Desk, asked: Asked, message: Message, found: dict[str, Segment], *, dry: bool) -> Message:
    """The message with a compiled image in the place of each that was sent, which `found` has then, too."""
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, ImagePart):
            image = desk.shelf.image(part.picture, private=asked.notes.private, dry=dry)
            [segment] = named_apart([image], found)  # it was sent before, or something else is called so
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


def _finished(desk: Desk, asked: Asked, layout: Layout, think: bool) -> Arranged:
    """With how much may be written."""
    workspace, writing, most = desk.workspace, asked.writing, desk.most
    workspace.check_length(len(layout) + 1)
    check_bias(workspace, asked)
    if writing.grammar is not None:
        check_usable(workspace, writing.grammar)
        if asked.tools and not writing.must_call and form_of(workspace.model.chat_template or "") is None:
            what = "how this model calls tools is not known: with a form of the answer it could call none"
            raise Refused(400, what, param="tools", code="unsupported_value")
    max_tokens = _most(writing, most)
    thinks = asked.prompt is None and (think or workspace.reasoning.open)
    kept = ROOM if thinks else 0
    room = max_tokens + (writing.max_think + kept if thinks else 0)
    if workspace.longest is not None:
        room = min(room, workspace.longest - len(layout))
    return Arranged(asked, layout, think, max_tokens, room, kept)


def _most(writing: Writing, most: int | None) -> int:
    """Tokens of an answer: those that were asked for, and no more than `most`. ENDLESS where neither bounds them."""
    return min(given for given in (writing.max_tokens, most, ENDLESS) if given is not None)


def check_bias(workspace: Workspace, asked: Asked) -> None:
    """Raise Refused for a token that the model does not have."""
    if (strange := workspace.model.unknown(token for token, _ in asked.writing.sampling.bias)) is not None:
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

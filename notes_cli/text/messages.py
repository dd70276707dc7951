"""Conversations as data: messages made of parts, tool calls and their results, the tools a model may call.

Strings of users are marked before a template renders them, and found again in what it prints.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from notes_cli.errors import NotesError
from notes_cli.images import Picture

# A secret, so that nobody can write a mark. Letters and digits only, so that no template escapes it or takes it apart.
_SECRET = os.urandom(6).hex()
OPEN, CLOSE = f"NOTES{_SECRET}open", f"NOTES{_SECRET}shut"
MAX_DEPTH = 64

# Vocabularies spell control tokens with brackets, bars or unusual characters such as U+2581.
_DOUBTFUL = re.compile(r"[^\w\s!-/:;=?@\\^_`~]")
_NOT_OPENING = re.compile(r"[^\w\s!-/:;=?@\\^_`~<]")
_MARKED = re.compile(f"({OPEN}|{CLOSE})")
_AROUND = re.compile(rf"NOTES{_SECRET}(?:open|shut|(?:begin|end)\d+x)")
_MARKER = re.compile(rf"NOTES{_SECRET}[a-z]+\d+x")
_NO_TEXT = re.compile(rf"(?:NOTES{_SECRET}text\d+x|\s)*")
_SEAL = "\ue000"  # what is kept in the place of the secret, in private use: nothing else may be that


def marker(number: int, kind: str = "text") -> str:
    """What takes the place of a text, or of another kind of value, while a template renders."""
    return f"NOTES{_SECRET}{kind}{number:03d}x"


def markers_in(text: str) -> Counter[str]:
    """How often each marker is in a rendered text, which is looked through once."""
    return Counter(_MARKER.findall(text))


def places_of_markers(text: str) -> dict[str, int]:
    """Where each marker is in a rendered text for the first time."""
    return {found[0]: found.start() for found in reversed([*_MARKER.finditer(text)])}


Way = Callable[[Any], Any]  # how a JSON value is passed to a template


def as_given(value: Any) -> Any:
    """A JSON value as it is.

    Raise NotesError for what JSON does not have, and for more than MAX_DEPTH levels.
    """
    return _passed(value, lambda text: text)


def marked(value: Any) -> Any:
    """A JSON value with marks around each string, also each key, that may spell a control token."""
    return _passed(value, lambda text: between(text, OPEN, CLOSE))


def neutral(value: Any) -> Any:
    """As `marked`, with _ in the place of each character that a control token may be spelled with, except for <, which
    some templates look for, and with which no control token ends."""
    return _passed(value, lambda text: between(_NOT_OPENING.sub("_", text), OPEN, CLOSE))


def unmarked(value: Any) -> Any:
    """As `as_given`; only the ends of results are marked."""
    return _passed(value, lambda text: text)


def blurred(value: Any) -> Any:
    """As `unmarked`, with _ in the place of each character that a control token may be spelled with."""
    return _passed(value, lambda text: _DOUBTFUL.sub("_", text))


def marked_where_different(text: str, other: str) -> str | None:
    """A rendered text with marks around what is different in another one of the same length, what is rendered of
    `blurred` values: these are the characters of users that a control token may be spelled with. None where the
    lengths differ, so that it is not known which these are."""
    if len(text) != len(other):
        return None
    found, at, end = [], 0, 0  # what is marked begins at `at` and ends at `end`
    for place, (one, another) in enumerate(zip(text, other, strict=True)):
        if one == another:
            continue
        if end and not _DOUBTFUL.search(text, end, place) and not _AROUND.search(text, end, place):
            end = place + 1
            continue
        found += [text[at:end], CLOSE] if end else []
        found += [text[end:place], OPEN]
        at, end = place, place + 1
    return "".join([*found, text[at:end], CLOSE, text[end:]]) if end else text


def _passed(value: Any, doubtful: Callable[[str], str], depth: int = 0) -> Any:
    """The value with strings that may spell a control token replaced."""
    if depth > MAX_DEPTH:
        raise NotesError(f"a tool's definition or arguments are nested more than {MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        check_unicode(value)
        return doubtful(value) if _DOUBTFUL.search(value) else value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise NotesError("a tool's definition or arguments have a key that is not a text, which JSON does not have")
        return {_passed(key, doubtful, depth + 1): _passed(one, doubtful, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_passed(one, doubtful, depth + 1) for one in value]
    raise NotesError(f"a tool's definition or arguments hold {type(value).__name__}, which JSON does not have")


def between(text: str, first: str, last: str) -> str:
    """The text between two marks; white space at its ends stays outside, where a template may trim it."""
    core = text.strip()
    before, _, after = text.partition(core) if core else ("", "", text)
    return f"{before}{first}{core}{last}{after}"


def check_unicode(text: str) -> None:
    """Raise NotesError for half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NotesError(f"{text[error.start]!a} in {text[:40]!a} is half of a UTF-16 surrogate pair") from None


def without_marks(text: str) -> str:
    """The text without marks, and without the markers at both ends of a text ("begin" and "end")."""
    return _AROUND.sub("", text)


def stretches(text: str) -> list[tuple[str, bool]] | None:
    """A rendered text without the marks, as (stretch, whether the template wrote it); None if marks do not match."""
    found: list[tuple[str, bool]] = []
    own = True
    for part in _MARKED.split(text):
        if part in (OPEN, CLOSE):
            if own is (part == CLOSE):
                return None
            own = not own
        elif part:
            found.append((part, own))
    return found if own else None


def is_left(text: str) -> bool:
    """Whether a part of a mark or of a marker is left in a text without them."""
    return _SECRET in text


def no_text(content: object) -> bool:
    """Whether this is nothing but markers of texts."""
    return isinstance(content, str) and _NO_TEXT.fullmatch(content) is not None


def sealed(text: str) -> str | None:
    """The text with its marks as any process would know them; None where they could not be told from the rest."""
    return None if _SEAL in text else text.replace(_SECRET, _SEAL)


def unsealed(text: str) -> str:
    """What was sealed, with marks of this process."""
    return text.replace(_SEAL, _SECRET)


ROLES = ("system", "user", "assistant", "tool")
PLACES = ("early", "late")  # of skills: in the system message, or right before the question
BETWEEN = "\n\n"  # the parts of one message
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # of a tool that may be called
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}  # of a tool that takes no arguments


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a user, a tool or the model."""

    text: str


@dataclass(frozen=True, slots=True)
class SkillPart:
    """A compiled skill, by its name: its tokens come from a segment."""

    name: str


@dataclass(frozen=True, slots=True)
class ErratumPart:
    """A correction of something that comes before it."""

    sentence: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image that somebody sent. Whoever has a model puts a compiled one in its place, a SkillPart."""

    picture: Picture


Part = TextPart | SkillPart | ErratumPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An assistant's call of a tool. `arguments` are JSON values by name; the result refers to the call by its `id`."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """One message. The assistant's may call tools; a tool's is the result of one call."""

    role: str
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""  # of the tool; taken from the call if it is empty

    @property
    def text(self) -> str:
        """The words of its text parts."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def empty(self) -> bool:
        """Whether it has nothing but blank texts."""
        return all(isinstance(part, TextPart) and not part.text.strip() for part in self.parts)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages up to the one to be answered, and the tools that may be called.

    `tools` are functions as OpenAI's and Hugging Face's interfaces take them, with or without the outer
    `{"type": "function", "function": ...}`. Raise NotesError for a conversation that no model could answer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", checked(self.messages))
        object.__setattr__(self, "tools", checked_tools(self.tools))
        if self.messages[-1].role == "assistant":
            raise NotesError("the last message is the assistant's: there is nothing to answer")


def user_message(question: str, *, skills: Sequence[str] = (), errata: Sequence[str] = ()) -> Message:
    """A question, with skills and errata before it. Raise NotesError for a skill that is named twice."""
    check_once(skills)
    return Message("user", (*map(SkillPart, skills), *map(ErratumPart, errata), TextPart(question)))


def results_of(results: Sequence[tuple[str, str]]) -> list[Message]:
    """A message that calls tools, and what each has returned: pairs of a tool's name and a text. The calls are as the
    model wrote them, so here they have names only."""
    ids = [f"call{number:05d}" for number in range(len(results))]  # of a form that every template takes
    calls = tuple(ToolCall(key, name) for key, (name, _) in zip(ids, results, strict=True))
    given = [Message("tool", (TextPart(text),), (), key, name) for key, (name, text) in zip(ids, results, strict=True)]
    return [Message("assistant", tool_calls=calls), *given]


def asking(
    question: str,
    *,
    system: str | None = None,
    skills: Sequence[str] = (),
    after_skills: Sequence[str] = (),
    before_question: Sequence[str] = (),
    turns: Sequence[tuple[str, str]] = (),
    place: str = "early",
    images: Sequence[str] = (),
    tools: Iterable[Mapping[str, Any]] = (),
) -> Conversation:
    """The usual conversation: a system message, earlier (question, answer) pairs, and a question.

    `skills` are names: in the system message, or, at the place "late", in the user message of `question`. `images` are
    names, too, of images that come with the question, in its message. `after_skills` and `before_question` are errata:
    the former of fields whose KV entries have the new value, the latter where the text still has the old one
    (docs/findings.md has figures of both places). Raise NotesError for another place, and for a skill that is named
    twice.
    """
    check_once((*skills, *images))
    if place not in PLACES:
        raise NotesError(f"no place {place!r}", f"Choose {' or '.join(PLACES)}")
    given: tuple[Part, ...] = (*map(SkillPart, skills), *map(ErratumPart, after_skills))
    early: tuple[Part, ...] = () if place == "late" else given
    late: tuple[Part, ...] = given if place == "late" else ()
    last = (*late, *map(SkillPart, images), *map(ErratumPart, before_question), TextPart(question))
    words = [TextPart(system)] if system and system.strip() else []
    head = Message("system", (*words, *early))
    earlier = [
        message
        for asked, answer in turns
        for message in (user_message(asked), Message("assistant", (TextPart(answer),)))
    ]
    messages = [*([head] if head.parts else []), *earlier, Message("user", last)]
    return Conversation(tuple(messages), tuple(tools))


def check_once(names: Sequence[str]) -> None:
    """Raise NotesError for a skill that is named twice."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise NotesError(f"the same skill is spliced twice: {twice[0]}", "Name each skill once")


def checked(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages, with an id in each call and the name of the tool in each result, and without blank system messages.
    Whether they may come in this order is for the template to say (prompt.py).

    A call may lack its result and a result its call, as in a history that an agent has shortened. A call without an id
    gets one by its number, and a result without one belongs to the first call that has no result yet. Raise NotesError
    for an unknown role and for a part that a role cannot have.
    """
    found: list[Message] = []
    waiting: list[ToolCall] = []  # calls without a result yet
    numbers = count()
    for number, message in enumerate(messages, 1):
        _check_role(number, message)
        if message.role == "tool":
            message = _with_call(number, message, waiting)
        elif message.tool_calls:
            calls = tuple(_with_id(number, call, next(numbers)) for call in message.tool_calls)
            message = replace(message, tool_calls=calls)
            waiting = [*calls, *waiting]
        for part in message.parts:
            if isinstance(part, ImagePart):
                raise NotesError(f"message {number} has an image that was not compiled: {part.picture.source}")
            if not isinstance(part, SkillPart):
                check_unicode(part.text if isinstance(part, TextPart) else part.sentence)
        if message.role != "system" or not message.empty:
            found.append(message)
    if not found:
        raise NotesError("the conversation is empty: there is nothing to answer")
    return tuple(found)


def _with_call(number: int, message: Message, waiting: list[ToolCall]) -> Message:
    """A result with the id and the name of its call, which is taken from those that wait. Raise NotesError where it
    names another tool."""
    call = next((one for one in waiting if message.tool_call_id in ("", one.id)), None)
    if call is None:
        return message
    waiting.remove(call)
    if message.name not in ("", call.name):
        raise NotesError(f"message {number} is a result of {message.name!r}, but {call.name!r} was called")
    return replace(message, name=call.name, tool_call_id=call.id)


def _with_id(number: int, call: ToolCall, nth: int) -> ToolCall:
    """A call with an id of its own if it has none: nine letters and digits, which every template takes. Raise
    NotesError for one without a name."""
    if not call.name:
        raise NotesError(f"message {number} calls a tool without a name")
    if not isinstance(call.arguments, Mapping):
        raise NotesError(f"message {number}: the arguments of {call.name} must be an object")
    return call if call.id else replace(call, id=f"call{nth:05d}")


def _check_role(number: int, message: Message) -> None:
    role = message.role
    if role not in ROLES:
        raise NotesError(f"message {number} has an unknown role {role!r}", f"Choose among {', '.join(ROLES)}")
    if role == "assistant" and any(not isinstance(part, TextPart) for part in message.parts):
        raise NotesError(f"message {number} is the assistant's, which holds text and tool calls only")
    if message.tool_calls and role != "assistant":
        raise NotesError(f"message {number} calls a tool, which only the assistant can do")
    if role != "tool" and (message.tool_call_id or message.name):
        raise NotesError(f"message {number} names a tool, so its role must be tool, not {role}")


def checked_tools(tools: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Tool definitions, each `{"type": "function", "function": {...}}` with a name, a description and parameters.

    Taken are OpenAI's form, with the outer object or without, MCP's (`inputSchema`) and Anthropic's (`input_schema`).
    Raise NotesError for one without a plain name, and for a name that is there twice.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools, 1):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise NotesError(f"tool {number} is not a function with a name")
        if (kind := tool.get("type", "function")) not in ("function", "custom"):
            raise NotesError(f"tool {number} is of the type {kind!r}: only functions can be called")
        if not NAME.fullmatch(name):
            raise NotesError(f"tool {number}: its name must be letters, digits, _ - . : or /, not {name[:80]!r}")
        if name in found:
            raise NotesError(f"there are two tools of the name {name}")
        found[name] = {"type": "function", "function": _function(function)}
    return tuple(found.values())


def _function(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function as templates take it: all of them may read its description and its parameters. What is meant for the
    program that sends it is left out."""
    schema = next((key for key in ("inputSchema", "input_schema") if key in given), "parameters")
    left_out = ("type", "strict") if schema == "parameters" else {*given} - {"name", "description"}
    found = {key: value for key, value in given.items() if value is not None and key not in left_out}
    found.setdefault("description", "")
    found["parameters"] = given.get(schema) or NO_PARAMETERS
    return found

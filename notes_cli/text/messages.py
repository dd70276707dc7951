"""Conversations as data: messages made of parts, tool calls and their results, the tools a model may call.

The form is that of chat templates: each message has a role, tools are JSON schemas. A skill is only named here; its
tokens come from a segment. Another kind of part needs a class here and a case in prompt.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from notes_cli.errors import NotesError
from notes_cli.images import Picture
from notes_cli.text.untrusted import check_unicode

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

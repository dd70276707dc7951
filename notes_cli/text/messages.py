"""Conversations as data: messages made of parts, tool calls and their results, the tools a model may call.

The form is that of chat templates: each message has a role, tools are JSON schemas. A skill is only named here; its
tokens come from a segment. Another kind of part needs a class here and a case in prompt.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from notes_cli.classes import dataclass
from notes_cli.errors import NotesError
from notes_cli.expressions import expression
from notes_cli.images import Picture
from notes_cli.text.untrusted import check_unicode

ROLES = ("system", "user", "assistant", "tool")
PLACES = ("early", "late")  # of skills: in the system message, or right before the question
BETWEEN = "\n\n"  # the parts of one message
NAME = expression(r"[A-Za-z0-9_.:/-]{1,128}")  # of tools, and ids of calls: templates print them as they are


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
    """The messages, with the name of the tool in each result, and without blank system messages. Whether they may come
    in this order is for the template to say (prompt.py).

    Raise NotesError for an unknown role, a part that a role cannot have, and calls and results that do not match.
    """
    found: list[Message] = []
    waiting: dict[str, str] = {}  # the tools of calls without a result yet, by the id of the call
    for number, message in enumerate(messages, 1):
        _check_role(number, message)
        if message.role == "tool":
            if message.tool_call_id not in waiting:
                raise NotesError(f"message {number} is the result of a call {message.tool_call_id!r} that was not made")
            called = waiting.pop(message.tool_call_id)
            if message.name not in ("", called):
                raise NotesError(f"message {number} is a result of {message.name!r}, but {called!r} was called")
            message = replace(message, name=called)
        elif waiting:
            raise NotesError(f"the call of {', '.join(waiting.values())} has no result before message {number}")
        waiting |= {call.id: call.name for call in _calls(number, message)}
        for part in message.parts:
            if isinstance(part, ImagePart):
                raise NotesError(f"message {number} has an image that was not compiled: {part.picture.source}")
            if not isinstance(part, SkillPart):
                check_unicode(part.text if isinstance(part, TextPart) else part.sentence)
        if message.role != "system" or not message.empty:
            found.append(message)
    if not found:
        raise NotesError("the conversation is empty: there is nothing to answer")
    if waiting and found[-1].role == "tool":
        raise NotesError(f"the call of {', '.join(waiting.values())} has no result")
    return tuple(found)


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


def _calls(number: int, message: Message) -> tuple[ToolCall, ...]:
    """Its calls. Raise NotesError for a name or an id that is not plain, and for an id that is there twice."""
    ids = Counter(call.id for call in message.tool_calls)
    for call in message.tool_calls:
        for what, name in (("id", call.id), ("name", call.name)):
            if not NAME.fullmatch(name):
                raise NotesError(
                    f"message {number}: the {what} of a tool call must be letters, digits, _ - . : or /, not {name!r}"
                )
        if ids[call.id] > 1:
            raise NotesError(f"message {number} has two tool calls of the id {call.id!r}")
        if not isinstance(call.arguments, Mapping):
            raise NotesError(f"message {number}: the arguments of {call.name} must be an object")
    return message.tool_calls


def checked_tools(tools: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Tool definitions, each `{"type": "function", "function": {...}}`. Raise NotesError for one without a plain name,
    and for a name that is there twice."""
    found: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools, 1):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise NotesError(f"tool {number} is not a function with a name")
        if not NAME.fullmatch(name):
            raise NotesError(f"tool {number}: its name must be letters, digits, _ - . : or /, not {name[:80]!r}")
        if name in found:
            raise NotesError(f"there are two tools of the name {name}")
        found[name] = tool if "function" in tool else {"type": "function", "function": tool}
    return tuple(found.values())

"""Defines conversations as data: messages of parts, tool calls with their results, and tool definitions.

Strings of users are marked before a template renders them, so that they are known in its output.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from notes_cli.errors import NotesError

if TYPE_CHECKING:
    from notes_cli.images import Picture

# A secret, so that users cannot write marks; letters and digits only, so that templates do not escape or split it.
_SECRET = os.urandom(6).hex()
OPEN, CLOSE = f"NOTES{_SECRET}open", f"NOTES{_SECRET}shut"
MAX_DEPTH = 64

# Vocabularies spell control tokens with brackets, bars or unusual characters such as U+2581.
_DOUBTFUL = re.compile(r"[^\w\s!-/:;=?@\\^_`~]")
_NOT_OPENING = re.compile(r"[^\w\s!-/:;=?@\\^_`~<]")
_MARKED = re.compile(f"({OPEN}|{CLOSE})")
_MARKS_AND_ENDS = re.compile(rf"NOTES{_SECRET}(?:open|shut|(?:begin|end)\d+x)")
_MARKER = re.compile(rf"NOTES{_SECRET}[a-z]+\d+x")


def marker(number: int, kind: str = "text") -> str:
    """Return the placeholder of a text, or of another kind of value, while a template renders."""
    return f"NOTES{_SECRET}{kind}{number:03d}x"


def count_markers(text: str) -> Counter[str]:
    """Count each marker in a rendered text, in one pass."""
    return Counter(_MARKER.findall(text))


def marker_positions(text: str) -> dict[str, int]:
    """Return the first position of each marker in a rendered text."""
    return {match[0]: match.start() for match in reversed([*_MARKER.finditer(text)])}


Encode = Callable[[Any], Any]  # encodes JSON values for a template


def as_given(value: Any) -> Any:
    """Return a JSON value unchanged. Raises NotesError for values that JSON lacks, and beyond MAX_DEPTH levels."""
    return _encoded(value, lambda text: text)


def marked(value: Any) -> Any:
    """Put marks around each string of a JSON value, keys included, that may spell a control token."""
    return _encoded(value, lambda text: enclose(text, OPEN, CLOSE))


def marked_neutral(value: Any) -> Any:
    """As `marked`, with _ for each character that may spell a control token, except <: some templates look for it, and
    no control token ends with it."""
    return _encoded(value, lambda text: enclose(_NOT_OPENING.sub("_", text), OPEN, CLOSE))


def unmarked(value: Any) -> Any:
    """As `as_given`; only the ends of results are marked."""
    return _encoded(value, lambda text: text)


def unmarked_neutral(value: Any) -> Any:
    """As `unmarked`, with _ for each character that may spell a control token."""
    return _encoded(value, lambda text: _DOUBTFUL.sub("_", text))


def marked_where_different(text: str, other: str) -> str | None:
    """Put marks around the characters of a rendered text that differ in `other`, the same text rendered of
    `unmarked_neutral` values: characters of users that may spell a control token. Returns None if the lengths differ.
    """
    if len(text) != len(other):
        return None
    parts, at, end = [], 0, 0  # the marked part is [at, end)
    for place, (a, b) in enumerate(zip(text, other, strict=True)):
        if a == b:
            continue
        if end and not _DOUBTFUL.search(text, end, place) and not _MARKS_AND_ENDS.search(text, end, place):
            end = place + 1
            continue
        parts += [text[at:end], CLOSE] if end else []
        parts += [text[end:place], OPEN]
        at, end = place, place + 1
    return "".join([*parts, text[at:end], CLOSE, text[end:]]) if end else text


def _encoded(value: Any, encode: Callable[[str], str], depth: int = 0) -> Any:
    """Replace strings that may spell a control token."""
    if depth > MAX_DEPTH:
        raise NotesError(f"a tool's definition or arguments are nested more than {MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        check_unicode(value)
        return encode(value) if _DOUBTFUL.search(value) else value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise NotesError("a tool's definition or arguments have a key that is not a text, which JSON does not have")
        return {_encoded(key, encode, depth + 1): _encoded(part, encode, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(part, encode, depth + 1) for part in value]
    raise NotesError(f"a tool's definition or arguments hold {type(value).__name__}, which JSON does not have")


def enclose(text: str, first: str, last: str) -> str:
    """Put a text between two marks; white space at its ends stays outside, as a template may trim it."""
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
    """Remove marks, and the "begin" and "end" markers, from a text."""
    return _MARKS_AND_ENDS.sub("", text)


def split_marked(text: str) -> list[tuple[str, bool]] | None:
    """Split a rendered text at its marks into (part, True if it is the template's own); None if marks do not match."""
    parts: list[tuple[str, bool]] = []
    from_template = True
    for part in _MARKED.split(text):
        if part in (OPEN, CLOSE):
            if from_template is (part == CLOSE):
                return None
            from_template = not from_template
        elif part:
            parts.append((part, from_template))
    return parts if from_template else None


def has_mark_remains(text: str) -> bool:
    """Return True if a text without marks still has parts of a mark or marker."""
    return _SECRET in text


ROLES = ("system", "user", "assistant", "tool")
PLACES = ("early", "late")  # of skills: in the system message, or before the question
BETWEEN = "\n\n"  # between parts of a message
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # of a tool
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}  # of a tool that takes no arguments


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a user, a tool or the model."""

    text: str


@dataclass(frozen=True, slots=True)
class SkillPart:
    """A compiled skill, by name: its tokens come from a segment."""

    name: str


@dataclass(frozen=True, slots=True)
class ErratumPart:
    """A correction of an earlier part: of a field by `skill.field`, whose new value it states, or as free text."""

    sentence: str
    key: str = ""
    value: str = ""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image from a client, to be replaced by a compiled one, a SkillPart."""

    picture: Picture


Part = TextPart | SkillPart | ErratumPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The assistant's call of a tool. `arguments`: JSON values by name; the result refers to the call by `id`. `cut`:
    the beginning of their JSON, where the answer ended in it."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cut: str | None = None

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON, as far as they go."""
        return json.dumps(self.arguments, ensure_ascii=False) if self.cut is None else self.cut


@dataclass(frozen=True, slots=True)
class Message:
    """A message. An assistant message may call tools; a tool message is the result of one call."""

    role: str
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""  # of the tool; empty: that of the call

    @property
    def text(self) -> str:
        """Concatenated text parts."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def empty(self) -> bool:
        """True if it has only blank texts."""
        return all(isinstance(part, TextPart) and not part.text.strip() for part in self.parts)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages up to the next answer, and the tools that may be called.

    `tools`: functions in the format of OpenAI and Hugging Face, with or without the outer `{"type": "function",
    "function": ...}`. `prefill`: the beginning of the answer. Raises NotesError for a conversation that has no next
    answer or is invalid.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    prefill: str = ""

    def __post_init__(self) -> None:
        check_unicode(self.prefill)
        object.__setattr__(self, "messages", check_messages(self.messages))
        object.__setattr__(self, "tools", normalize_tools(self.tools))
        if self.messages[-1].role == "assistant":
            raise NotesError("the last message is the assistant's: there is nothing to answer")


def user_message(question: str, *, skills: Sequence[str] = (), errata: Sequence[str] = ()) -> Message:
    """Return a question after skills and errata. Raises NotesError for a skill that is named twice."""
    check_once(skills)
    return Message("user", (*map(SkillPart, skills), *map(ErratumPart, errata), TextPart(question)))


def results_of(results: Sequence[tuple[str, str]]) -> list[Message]:
    """Return a message that calls tools, and each tool's result, from pairs of a tool's name and its result. The
    sequence has the calls as generated, so here they have names only."""
    ids = [f"call{number:05d}" for number in range(len(results))]  # accepted by every template
    calls = tuple(ToolCall(key, name) for key, (name, _) in zip(ids, results, strict=True))
    returned = [
        Message("tool", (TextPart(text),), (), key, name) for key, (name, text) in zip(ids, results, strict=True)
    ]
    return [Message("assistant", tool_calls=calls), *returned]


def asking(
    question: str,
    *,
    system: str | None = None,
    skills: Sequence[str] = (),
    turns: Sequence[tuple[str, str]] = (),
    place: str = "early",
    images: Sequence[str] = (),
) -> Conversation:
    """Return the usual conversation: a system message, earlier (question, answer) pairs, and a question.

    `skills`: names, in the system message, or at the place "late" in the user message of `question`. `images`: names of
    images that come with the question, in its message. Raises NotesError for another place, and for a skill that is
    named twice.
    """
    head = [Message("system", (TextPart(system),))] if system and system.strip() else []
    earlier = [
        message
        for asked, answer in turns
        for message in (user_message(asked), Message("assistant", (TextPart(answer),)))
    ]
    messages = (*head, *earlier, user_message(question))
    return Conversation(with_skills(messages, skills, place=place, images=images))


def with_skills(
    messages: Sequence[Message], skills: Sequence[str], *, place: str = "early", images: Sequence[str] = ()
) -> tuple[Message, ...]:
    """Return the messages with skills and images, as in `asking`; the question is the last message of the user. Raises
    NotesError without one, too."""
    check_once((*skills, *images))
    if place not in PLACES:
        raise NotesError(f"no place {place!r}", f"Choose {' or '.join(PLACES)}")
    early, late = (skills, ()) if place == "early" else ((), skills)
    head = [messages[0]] if messages[0].role == "system" else []
    rest = [*messages[len(head) :]]
    at = question_at(rest)
    rest[at] = replace(rest[at], parts=(*map(SkillPart, (*late, *images)), *rest[at].parts))
    if early:
        head = [Message("system", (*(part for message in head for part in message.parts), *map(SkillPart, early)))]
    return (*head, *rest)


def question_at(messages: Sequence[Message]) -> int:
    """Return the place of the user's last message. Raises NotesError without one."""
    places = [number for number, message in enumerate(messages) if message.role == "user"]
    if not places:
        raise NotesError("the messages have no question: none of them is the user's")
    return places[-1]


def message_of(data: Mapping[str, Any]) -> Message:
    """Return a message of texts and tool calls from its form in OpenAI's API. Raises NotesError."""
    try:
        content, calls = data.get("content") or "", []
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        for call in data.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append(ToolCall(call["id"], call["function"]["name"], arguments))
        parts = tuple(map(TextPart, texts))
        return Message(data["role"], parts, tuple(calls), data.get("tool_call_id", ""))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{data!r:.80} is no message of texts and tool calls as OpenAI's API has them"
        raise NotesError(what, "Write {'role': 'user', 'content': '...'}") from error


def check_once(names: Sequence[str]) -> None:
    """Raise NotesError for a skill that is named twice."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise NotesError(f"the same skill is spliced twice: {twice[0]}", "Name each skill once")


def check_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with ids in all calls, tool names in all results, and no blank system messages. Their order
    is checked by the template (prompt.py).

    A call may lack its result and a result its call, as in a history that an agent has shortened. A call without an id
    gets one by its number, and a result without one belongs to the first call without a result. Raises NotesError for
    an unknown role and for a part that a role cannot have.
    """
    result: list[Message] = []
    waiting: list[ToolCall] = []  # calls without a result yet
    numbers = count()
    for number, message in enumerate(messages, 1):
        _check_role(number, message)
        if message.role == "tool":
            message = _match_call(number, message, waiting)
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
            result.append(message)
    if not result:
        raise NotesError("the conversation is empty: there is nothing to answer")
    return tuple(result)


def _match_call(number: int, message: Message, waiting: list[ToolCall]) -> Message:
    """Return a result with id and name of its call, which is removed from `waiting`. Raises NotesError if it names
    another tool."""
    call = next((candidate for candidate in waiting if message.tool_call_id in ("", candidate.id)), None)
    if call is None:
        return message
    waiting.remove(call)
    if message.name not in ("", call.name):
        raise NotesError(f"message {number} is a result of {message.name!r}, but {call.name!r} was called")
    return replace(message, name=call.name, tool_call_id=call.id)


def _with_id(number: int, call: ToolCall, nth: int) -> ToolCall:
    """Return a call with an id, if missing of nine letters and digits, which every template takes. Raises NotesError
    for one without a name."""
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


def normalize_tools(tools: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return tool definitions as `{"type": "function", "function": {...}}` with name, description and parameters.

    Accepts the formats of OpenAI, with or without the outer object, MCP (`inputSchema`) and Anthropic (`input_schema`).
    Raises NotesError for a missing or invalid name, and for a duplicate.
    """
    result: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools, 1):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise NotesError(f"tool {number} is not a function with a name")
        if (kind := tool.get("type", "function")) not in ("function", "custom"):
            raise NotesError(f"tool {number} is of the type {kind!r}: only functions can be called")
        if not NAME.fullmatch(name):
            raise NotesError(f"tool {number}: its name must be letters, digits, _ - . : or /, not {name[:80]!r}")
        if name in result:
            raise NotesError(f"there are two tools of the name {name}")
        result[name] = {"type": "function", "function": _function(function)}
    return tuple(result.values())


def _function(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function with the members that templates read, first name, description and parameters in the order that
    models were trained with, whatever the client's; without those for the client."""
    schema = next((key for key in ("inputSchema", "input_schema") if key in definition), "parameters")
    left_out = ("type", "strict") if schema == "parameters" else {*definition} - {"name", "description"}
    function = {"name": definition["name"], "description": definition.get("description") or ""}
    function["parameters"] = definition.get(schema) or NO_PARAMETERS
    others = definition.keys() - function.keys() - {*left_out}
    return function | {key: value for key, value in definition.items() if key in others and value is not None}

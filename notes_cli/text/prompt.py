"""The order of a prompt: messages become chunks, each of them tokenised apart.

    system opening | skill | "\\n\\n" | skill | "\\n\\n" erratum | user opening, question, assistant opening

Placed late, skills and errata are in the user message of the question instead, right before it.

It knows neither tokens nor K/V: a splice is only named. The form is exact, for the model that ships with
notes was trained on it, and because a recompute must see the very tokens of a splice.

The answers of earlier turns follow the generation prompt that they were written after, so a conversation that is built
from its messages equals one that grew turn by turn. Calls of tools and their results have the form that the template
gives them, and so has what is in no usual place: a later system message, and what the assistant says unasked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

from notes_cli.errors import ModelError, NotesError
from notes_cli.text.messages import (
    BETWEEN,
    Conversation,
    ErratumPart,
    Message,
    SkillPart,
    TextPart,
    as_given,
    check_messages,
    has_mark_remains,
    marker,
    split_marked,
)
from notes_cli.text.slots import Slot, Slots, cut, cut_after_calls, shows_calls
from notes_cli.text.template import ChatTemplate, LeftOutError

TOOLS = "You can call these tools:"  # before their definitions, where the template does not show them
Kind = Literal["text", "splice", "erratum", "question", "call", "result"]


class Run(NamedTuple):
    """A stretch of text. Only in the template's own words (`special`) are special tokens read as such."""

    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt. A splice has a name and no runs: its tokens come from a segment."""

    kind: Kind
    runs: tuple[Run, ...] = ()
    name: str = ""

    @property
    def text(self) -> str:
        """All runs in one, for people and for comparisons."""
        return "".join(run.text for run in self.runs)


def build(template: ChatTemplate, conversation: Conversation) -> list[Chunk]:
    """The chunks of a prompt, up to where the model's answer begins.

    Texts are stripped, except answers and results of tools. Raise NotesError for tools that are not valid, and
    ModelError if the model's template has no place for a message, a tool or a call.
    """
    template, conversation = _with_tools(template, conversation)
    messages = [replace(message) for message in conversation.messages]  # each another object, to know it again
    turns: list[list[Message]] = [[]]
    answers: list[Message] = []
    for message in messages:
        if _is_answer(message, turns[-1], later=bool(answers)):
            answers.append(message)
            turns.append([])
        else:
            turns[-1].append(message)
    unusual = any(_is_unusual(message, messages) for turn in turns for message in turn)
    earlier = template.earlier if answers else template
    chunks: list[Chunk] = []
    opened: dict[int, str] = {}
    rendered: ChatTemplate | None = None
    for number, turn in enumerate(turns):
        own = earlier if number + 1 < len(turns) else template
        if unusual and own is not rendered:  # first: a template that refuses it says why
            opened, rendered = {id(slot.message): slot.before for slot in cut(own, messages).slots}, own
        found = cut(own, turn, later=number > 0)
        if unusual:
            _check_alike(own, opened, found)
        chunks += _chunks(own, found)
        for answer in answers[number : number + 1]:
            chunks += _text(Run(answer.text, False))
    return chunks


def _with_tools(template: ChatTemplate, conversation: Conversation) -> tuple[ChatTemplate, Conversation]:
    """The template with the tools. One that shows calls and leaves it to the system message to tell of tools (DeepSeek
    V3.1's) is as it is: then the system message ends with them, as JSON, a line each."""
    try:
        return template.with_tools(conversation.tools), conversation
    except LeftOutError:
        if not shows_calls(template):
            raise
    tools = [as_given(tool["function"]) for tool in conversation.tools]
    part = TextPart("\n".join([TOOLS, *(json.dumps(tool, ensure_ascii=False) for tool in tools)]))
    head, *rest = conversation.messages
    if head.role != "system":
        head, rest = Message("system"), [head, *rest]
    messages = (replace(head, parts=(*head.parts, part)), *rest)
    return template.for_calls(), replace(conversation, messages=messages)


def _is_answer(message: Message, turn: Sequence[Message], *, later: bool) -> bool:
    """Whether a message was written after the generation prompt that follows these. `later`: they follow an answer."""
    if message.role != "assistant" or message.tool_calls or not turn or turn[-1].role == "assistant":
        return False
    return later or any(one.role == "user" for one in turn)


def _is_unusual(message: Message, messages: Sequence[Message]) -> bool:
    """Whether a message of a turn is one that not every template has a place for."""
    if message.role == "assistant":
        return not message.tool_calls
    return message.role == "system" and message is not messages[0]


def _check_alike(template: ChatTemplate, opened: Mapping[int, str], turn: Slots) -> None:
    """Raise ModelError where the messages of a turn are not opened as in the whole conversation, `opened` by id."""
    for slot in turn.slots:
        if opened.get(id(slot.message)) != slot.before:
            raise ModelError(f"{template.name} does not take a message of the role {slot.message.role} there")


def next_turn(
    template: ChatTemplate,
    messages: Iterable[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    ends: Sequence[str] = (),
) -> list[Chunk]:
    """The chunks after the model's answer: its end, and the messages that follow, up to the next answer.

    `messages` is a user message, or, if the model called tools, its message with the calls, then the result of each.
    The calls are not repeated: what the model wrote is in the sequence. `ends` are the texts of the tokens that end an
    answer, if there are others than the end-of-sequence token. Raise NotesError and ModelError as `build` does, and
    NotesError for messages that cannot follow an answer.
    """
    given = check_messages(messages)
    if given[-1].role == "assistant":
        raise NotesError("the last message is the assistant's: there is nothing to answer")
    if any(message.role == "system" for message in given):
        raise NotesError("a system message belongs to the first turn")
    if given[0].role == "tool":
        raise NotesError("a result of a tool follows the message with its call")
    template = template.with_tools(tools)
    if given[0].role == "assistant":
        if not given[0].tool_calls or any(message.role == "assistant" for message in given[1:]):
            raise NotesError("an answer can only be followed by a user message, or by its calls with their results")
        return _chunks(template, cut_after_calls(template, given, ends or [template.eos]))
    return _chunks(template, cut(template, given, later=True))


def at_question(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks with the last one cut where the words of the question begin: what precedes them is the same whatever
    is asked. The tokens are the same, too, as runs are tokenised apart."""
    *before, last = chunks
    words = next((index for index, run in enumerate(last.runs) if not run.special), 0)
    parts = [last] if not words else [replace(last, runs=last.runs[:words]), replace(last, runs=last.runs[words:])]
    return [*before, *parts]


def left_context(template: ChatTemplate) -> str:
    """The text before a skill that comes first in the system message: skills are compiled after it."""
    return template.cut([_message("system", 0), _message("user", 1)], [marker(0), marker(1)])[0]


def generation_prompt(template: ChatTemplate) -> str:
    """The text between a question and the answer."""
    return template.cut([_message("user", 0)], [marker(0)])[1]


def _message(role: str, number: int) -> dict[str, str]:
    return {"role": role, "content": marker(number)}


def _chunks(template: ChatTemplate, found: Slots) -> list[Chunk]:
    """The slots filled in, the template's words around them."""
    chunks: list[Chunk] = []
    asked = max((i for i, slot in enumerate(found.slots) if slot.message.role == "user"), default=-1)
    for number, slot in enumerate(found.slots):
        opening = _own(template, slot.before)
        content = _content(slot, template.cue if number == asked else "")
        if slot.calls:
            chunks += [Chunk("call", opening)] if opening else []
        elif content and content[0].kind in ("question", "result"):
            content[0] = replace(content[0], runs=(*opening, *content[0].runs))
        else:
            chunks += [Chunk("text", opening)] if opening else []
        chunks += content
    closing = _own(template, found.closing)
    if chunks and chunks[-1].kind in ("question", "result"):
        chunks[-1] = replace(chunks[-1], runs=(*chunks[-1].runs, *closing))
    elif closing:
        chunks.append(Chunk("text", closing))
    return _joined(chunks)


def _own(template: ChatTemplate, text: str) -> tuple[Run, ...]:
    """The runs of what the template printed: its own words, except for marked strings of tools and calls."""
    found = split_marked(text)
    if found is None or any(has_mark_remains(stretch) for stretch, _ in found):
        raise ModelError(f"{template.name} takes apart what is in messages, tools or calls")
    return _runs(*(Run(stretch, own) for stretch, own in found))


def _content(slot: Slot, cue: str) -> list[Chunk]:
    """The content of one message: its parts, with empty lines between."""
    message = slot.message
    if slot.result is not None:
        return [Chunk("result", _runs(Run(slot.result, False)))]
    if message.role == "assistant":
        return _text(Run(message.text if message.tool_calls else message.text.strip(), False))
    chunks: list[Chunk] = []
    for number, part in enumerate(message.parts, 1):
        between = BETWEEN if chunks else ""
        match part:
            case SkillPart():
                chunks += [*_text(Run(between, False)), Chunk("splice", name=part.name)]
            case ErratumPart():
                chunks.append(Chunk("erratum", _runs(Run(between + part.sentence.strip(), False))))
            case TextPart() if message.role == "tool":
                chunks.append(Chunk("result", _runs(Run(between + part.text, False))))
            case TextPart() if message.role == "user" and number == len(message.parts):
                asked = part.text.strip()
                asked += "" if asked.endswith(cue.strip()) else cue  # the user may have written it already
                chunks.append(Chunk("question", _runs(Run(between + asked, False))))
            case TextPart() if part.text.strip():
                chunks += _text(Run(between + part.text.strip(), False))
    return chunks


def _runs(*runs: Run) -> tuple[Run, ...]:
    return tuple(run for run in runs if run.text)


def _text(run: Run) -> list[Chunk]:
    """A text chunk; none for an empty text."""
    return [Chunk("text", (run,))] if run.text else []


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks with neighbouring texts joined: what no splice separates is tokenised together."""
    joined: list[Chunk] = []
    for kind, group in groupby(chunks, key=lambda chunk: chunk.kind):
        if kind == "text":
            runs = groupby((run for chunk in group for run in chunk.runs), key=lambda run: run.special)
            texts = tuple(Run("".join(run.text for run in alike), special) for special, alike in runs)
            joined.append(Chunk("text", texts))
        else:
            joined += group
    return joined

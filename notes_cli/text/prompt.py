"""Builds the chunks of a prompt from a conversation; each chunk is tokenised separately.

    system opening | skill | "\\n\\n" | skill | "\\n\\n" erratum | user opening, question, assistant opening

At the place "late", skills and errata are in the user message of the question instead, before it. A splice has only its
name here. The form is fixed: the shipped model was trained on it, and a recompute must use the exact tokens of a
splice.

Answers of earlier turns follow the generation prompt after which they were generated, so that a conversation built from
its messages equals one that grew by turns. The template formats tool calls and their results, and messages in unusual
places: later system messages, and assistant messages without a question.
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

TOOLS = "You can call these tools:"  # precedes their definitions, where the template does not show them
Kind = Literal["text", "splice", "erratum", "question", "call", "result"]


class Run(NamedTuple):
    """A part of a text. Special tokens are parsed only in the template's own text (`special`)."""

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
        """Concatenated runs, for display and comparison."""
        return "".join(run.text for run in self.runs)


def build(template: ChatTemplate, conversation: Conversation) -> list[Chunk]:
    """Return the chunks of a prompt, up to where the answer begins.

    Texts are stripped, except answers and results of tools. Raises NotesError for invalid tools, and ModelError if the
    template has no place for a message, a tool or a call.
    """
    template, conversation = _with_tools(template, conversation)
    messages = [replace(message) for message in conversation.messages]  # distinct objects, identified by id
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
        if unusual and own is not rendered:  # before the turns: a refusal has the template's reason
            opened, rendered = {id(slot.message): slot.before for slot in cut(own, messages).slots}, own
        slots = cut(own, turn, later=number > 0)
        if unusual:
            _check_openings(own, opened, slots)
        chunks += _chunks(own, slots)
        for answer in answers[number : number + 1]:
            chunks += _text(Run(answer.text, False))
    return chunks


def _with_tools(template: ChatTemplate, conversation: Conversation) -> tuple[ChatTemplate, Conversation]:
    """Return the template with the tools. If it shows calls but no tools (DeepSeek V3.1's), they end the system message
    instead, as JSON, a line each."""
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
    """Return True if a message was generated after the generation prompt that follows `turn`. `later`: the turn follows
    an answer."""
    if message.role != "assistant" or message.tool_calls or not turn or turn[-1].role == "assistant":
        return False
    return later or any(earlier.role == "user" for earlier in turn)


def _is_unusual(message: Message, messages: Sequence[Message]) -> bool:
    """Return True if not every template has a place for a message of a turn."""
    if message.role == "assistant":
        return not message.tool_calls
    return message.role == "system" and message is not messages[0]


def _check_openings(template: ChatTemplate, opened: Mapping[int, str], turn: Slots) -> None:
    """Raise ModelError if messages of a turn open differently than in the whole conversation; `opened`: openings there
    by id."""
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
    """Return the chunks after the model's answer: its end, and the messages that follow, up to the next answer.

    `messages`: a user message, or, if the model called tools, its message with the calls, then the result of each. The
    calls are not repeated: the sequence has them as generated. `ends`: the texts of the tokens that end an answer, if
    there are others than the end-of-sequence token. Raises NotesError and ModelError as `build` does, and NotesError
    for messages that cannot follow an answer.
    """
    turn = check_messages(messages)
    if turn[-1].role == "assistant":
        raise NotesError("the last message is the assistant's: there is nothing to answer")
    if any(message.role == "system" for message in turn):
        raise NotesError("a system message belongs to the first turn")
    if turn[0].role == "tool":
        raise NotesError("a result of a tool follows the message with its call")
    template = template.with_tools(tools)
    if turn[0].role == "assistant":
        if not turn[0].tool_calls or any(message.role == "assistant" for message in turn[1:]):
            raise NotesError("an answer can only be followed by a user message, or by its calls with their results")
        return _chunks(template, cut_after_calls(template, turn, ends or [template.eos]))
    return _chunks(template, cut(template, turn, later=True))


def left_context(template: ChatTemplate) -> str:
    """Return the text before a skill that comes first in the system message: skills are compiled after it."""
    return template.cut([_message("system", 0), _message("user", 1)], [marker(0), marker(1)])[0]


def generation_prompt(template: ChatTemplate) -> str:
    """Return the text between a question and the answer."""
    return template.cut([_message("user", 0)], [marker(0)])[1]


def _message(role: str, number: int) -> dict[str, str]:
    return {"role": role, "content": marker(number)}


def _chunks(template: ChatTemplate, slots: Slots) -> list[Chunk]:
    """Fill the slots, with the template's text around them."""
    chunks: list[Chunk] = []
    question = max((i for i, slot in enumerate(slots.slots) if slot.message.role == "user"), default=-1)
    for number, slot in enumerate(slots.slots):
        opening = _template_runs(template, slot.before)
        content = _content(slot, template.cue if number == question else "")
        if slot.calls:
            chunks += [Chunk("call", opening)] if opening else []
        elif content and content[0].kind in ("question", "result"):
            content[0] = replace(content[0], runs=(*opening, *content[0].runs))
        else:
            chunks += [Chunk("text", opening)] if opening else []
        chunks += content
    closing = _template_runs(template, slots.closing)
    if chunks and chunks[-1].kind in ("question", "result"):
        chunks[-1] = replace(chunks[-1], runs=(*chunks[-1].runs, *closing))
    elif closing:
        chunks.append(Chunk("text", closing))
    return _join_texts(chunks)


def _template_runs(template: ChatTemplate, text: str) -> tuple[Run, ...]:
    """Return the runs of a template's text, special except for marked strings of tools and calls."""
    parts = split_marked(text)
    if parts is None or any(has_mark_remains(stretch) for stretch, _ in parts):
        raise ModelError(f"{template.name} takes apart what is in messages, tools or calls")
    return _runs(*(Run(stretch, special) for stretch, special in parts))


def _content(slot: Slot, cue: str) -> list[Chunk]:
    """Return the content of a message: its parts, with empty lines between."""
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
                question = part.text.strip()
                question += "" if question.endswith(cue.strip()) else cue  # unless the user wrote it
                chunks.append(Chunk("question", _runs(Run(between + question, False))))
            case TextPart() if part.text.strip():
                chunks += _text(Run(between + part.text.strip(), False))
    return chunks


def _runs(*runs: Run) -> tuple[Run, ...]:
    return tuple(run for run in runs if run.text)


def _text(run: Run) -> list[Chunk]:
    """Return a text chunk; none for an empty text."""
    return [Chunk("text", (run,))] if run.text else []


def _join_texts(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Join neighbouring texts, which are tokenised together if no splice separates them."""
    joined: list[Chunk] = []
    for kind, group in groupby(chunks, key=lambda chunk: chunk.kind):
        if kind == "text":
            runs = groupby((run for chunk in group for run in chunk.runs), key=lambda run: run.special)
            texts = tuple(Run("".join(run.text for run in alike), special) for special, alike in runs)
            joined.append(Chunk("text", texts))
        else:
            joined += group
    return joined

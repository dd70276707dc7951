"""Builds the chunks of a prompt from a conversation; each chunk is tokenised separately.

    system opening | skill | "\\n\\n" | skill | "\\n\\n" erratum | user opening, question, assistant opening

At the place "late", skills and errata are in the user message of the question instead, before it. A splice has only its
name here. The form is fixed: the shipped model was trained on it, and a recompute must use the exact tokens of a
splice.

Answers of earlier turns follow the generation prompt after which they were generated, so that a conversation built from
its messages equals one that grew by turns. The template formats tool calls and their results, and messages in unusual
places: later system messages, and assistant messages without a question.

A marker replaces each text while the template renders; the slots are the places of the markers in its output. Results
of tools are passed themselves, between two markers, as a template may encode them. Calls are passed in the first format
with which the template shows every call: no format suits all templates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from notes_cli.errors import ModelError, NotesError
from notes_cli.text.messages import (
    BETWEEN,
    Conversation,
    Encode,
    ErratumPart,
    Message,
    SkillPart,
    TextPart,
    ToolCall,
    as_given,
    check_messages,
    count_markers,
    enclose,
    has_mark_remains,
    marked,
    marker,
    marker_positions,
    split_marked,
    without_marks,
)
from notes_cli.text.template import ChatTemplate, LeftOutError, Rendered

_KEY = "notesKey"  # key of arguments that are a marker


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of the content of a message."""

    message: Message
    before: str  # the template's text before it, including calls since the last slot
    calls: bool  # True if there are any
    result: str | None  # of a tool, as the template prints it; None for other contents


Slots = tuple[list[Slot], str]  # of a text in order, and the template's text after the last


class _Form(NamedTuple):
    """A format of calls and results."""

    no_text: str | None = ""  # the content of a message that has calls but no text
    as_text: bool = False  # the arguments as a JSON text, else as an object
    short_ids: bool = False  # ids of nine letters and digits, as Mistral's templates demand
    apart: bool = False  # each call in a message of its own, with its result after it
    in_content: bool = False  # calls as part of the text
    as_user: bool = False  # results as messages of the user


_WAYS = [_Form(no_text, as_text) for no_text in ("", None) for as_text in (False, True)]
_TOGETHER = [*_WAYS, *[form._replace(short_ids=True) for form in _WAYS]]
_FORMS = (
    *(*_TOGETHER, *[form._replace(apart=True) for form in _TOGETHER]),
    *(*[form._replace(as_user=True) for form in _WAYS], _Form(in_content=True), _Form(in_content=True, as_user=True)),
)
_TALK = (  # precedes messages that continue a conversation
    Message("system", (TextPart("s"),)),
    Message("user", (TextPart("u"),)),
    Message("assistant", (TextPart("a"),)),
)


def cut(template: ChatTemplate, messages: Sequence[Message], *, later: bool = False) -> Slots:
    """Render messages up to the next answer and return their slots. `later`: they follow an answer without calls.

    Raises ModelError if the template fails, if it drops, changes, repeats or reorders a text, or leaves out a call.
    """
    all_messages = [*(_TALK if later else ()), *messages]
    if any(message.tool_calls or message.role == "tool" for message in all_messages):
        form, talk = _find_form(template, all_messages)
        rendered = template.render_marked(lambda encode: [*_to_template(talk, form, encode)])
    else:
        talk = all_messages
        plain = [{"role": message.role, "content": marker(number)} for number, message in enumerate(talk)]
        rendered = template.render_marked(lambda _: plain)
    slots, closing = _slots(template, talk, rendered)
    return slots[3 if later else 0 :], closing


def cut_after_calls(template: ChatTemplate, messages: Sequence[Message], ends: Sequence[str]) -> Slots:
    """Return the slots after a message that calls tools (the first, which the model generated), from where generation
    ended.

    `ends`: the texts of the tokens that end an answer: if a message with calls does not end like one without,
    generation ended at the first of them. Raises ModelError as `cut` does, and if there is none of them.
    """
    called = replace(messages[0], parts=())
    form, talk = _find_form(template, [*_TALK[:2], called, *messages[1:]], _TOGETHER)
    slots, closing = _slots(template, talk, template.render([*_to_template(talk, form, None)]))
    first, *others = slots[2:]
    last_call = marker(len(called.tool_calls) - 1, "call")
    after_call = first.before.rpartition(last_call)[2]
    first = replace(first, before=_from_end(template, after_call, messages[1:], ends), calls=False)
    return [first, *others], closing


def _from_end(template: ChatTemplate, rest: str, messages: Sequence[Message], ends: Sequence[str]) -> str:
    """Return the part of the text after a call that begins where generation ended."""
    try:
        (slot, *_), _ = cut(template, messages, later=True)
        after_text = slot.before
    except ModelError:
        after_text = ""
    if after_text and rest.endswith(after_text):
        return after_text
    places = [place for end in ends if end and (place := rest.find(end)) >= 0]
    if not places:
        raise ModelError(f"{template.name} does not show where the call of a tool ends")
    return rest[min(places) :]


def shows_calls(template: ChatTemplate) -> bool:
    """Return True if the template shows earlier calls: its model was trained to call tools."""
    calls = Message("assistant", (), (ToolCall("abcdefgh1", "look"),))
    try:
        _find_form(template, [*_TALK[:2], calls, Message("tool", (TextPart("r"),), (), "abcdefgh1", "look")], _TOGETHER)
    except ModelError:
        return False
    return True


def _find_form(
    template: ChatTemplate, talk: Sequence[Message], forms: Sequence[_Form] = _FORMS
) -> tuple[_Form, Sequence[Message]]:
    """Return the first format with which the template shows every call and every result, and the messages in it. Raises
    ModelError if none shows the calls."""
    calls = [call.name for message in talk for call in message.tool_calls]
    fault: ModelError | None = None
    hidden: list[str] = []
    with_calls: tuple[_Form, Sequence[Message]] | None = None  # shows the calls, but not every result
    for form in forms:
        in_form = talk
        if form.in_content:
            in_form = [_with_calls_as_text(message) if message.tool_calls else message for message in talk]
        elif form.apart:
            in_form = [*_split_calls(talk)]
        try:
            rendered = template.render([*_to_template(in_form, form, None)])
        except ModelError as error:
            fault = fault or error
            continue
        counts = count_markers(rendered)
        missing = [name for number, name in enumerate(calls) if marker(number, "call") not in counts]
        if any(mark in rendered for mark in (f"'{_KEY}'", f'\\"{_KEY}')):  # Python's, or encoded twice
            missing = calls
        if missing and not form.in_content:
            hidden = hidden or missing
            continue
        results = [_content(number, message)[1] for number, message in enumerate(in_form) if message.role == "tool"]
        if all(marks[0] in counts for marks in results if len(marks) == 2):
            return form, in_form
        with_calls = with_calls or (form, in_form)
    if with_calls:
        return with_calls
    if fault and not hidden:
        raise fault
    raise ModelError(f"{template.name} does not show what tools were called (left out: {', '.join(hidden)})")


def _split_calls(talk: Sequence[Message]) -> Iterator[Message]:
    """Split messages with several calls, each call followed by its result, if any."""
    head, waiting = Message("assistant"), list[ToolCall]()  # with the text of the calls; calls without a result
    for message in [*talk, None]:
        if message is not None and message.role == "tool":
            ready = [call for call in waiting if call.id == message.tool_call_id][:1]
        else:
            ready = [*waiting]
        for call in ready:
            yield replace(head, tool_calls=(call,))
            head = Message("assistant")
            waiting.remove(call)
        if message is not None and len(message.tool_calls) > 1:
            head, waiting = message, [*message.tool_calls]
        elif message is not None:
            yield message


def _with_calls_as_text(message: Message) -> Message:
    calls = [{"name": call.name, "arguments": as_given(call.arguments)} for call in message.tool_calls]
    words = [json.dumps(call, ensure_ascii=False) for call in calls]
    return replace(message, parts=(TextPart("\n".join([*filter(None, [message.text]), *words])),), tool_calls=())


def _to_template(talk: Sequence[Message], form: _Form, encode: Encode | None) -> Iterator[Rendered]:
    """Yield messages in the format of templates, strings of calls and results encoded by `encode`; None: calls are
    markers."""
    calls = 0
    for number, message in enumerate(talk):
        rendered: dict[str, Any] = {"role": message.role, "content": _content(number, message, encode or marked)[0]}
        if message.role == "tool" and form.as_user:
            rendered["role"] = "user"
        elif message.role == "tool":
            key = _call_id(message.tool_call_id, form)
            rendered |= {"name": (encode or marked)(message.name), "tool_call_id": (encode or marked)(key)}
        if message.tool_calls:
            rendered["content"] = rendered["content"] if message.text else form.no_text
            rendered["tool_calls"] = [
                _call_to_template(call, form, encode or marked, None if encode else {_KEY: marker(number, "call")})
                for number, call in enumerate(message.tool_calls, calls)
            ]
            calls += len(message.tool_calls)
        yield rendered


def _call_to_template(call: ToolCall, form: _Form, encode: Encode, arguments: Any) -> dict[str, Any]:
    arguments = encode(call.arguments) if arguments is None else arguments
    passed = json.dumps(arguments, ensure_ascii=False) if form.as_text else arguments
    return {
        "type": "function",
        "id": encode(_call_id(call.id, form)),
        "function": {"name": encode(call.name), "arguments": passed},
    }


def _call_id(key: str, form: _Form) -> str:
    """Return the id of a call, or nine letters and digits derived from it."""
    short = len(key) == 9 and key.isascii() and key.isalnum()
    return key if short or not form.short_ids else hashlib.sha256(key.encode(errors="replace")).hexdigest()[:9]


def _content(number: int, message: Message, encode: Encode = marked) -> tuple[str, list[str]]:
    """Return the content of a message for the template, and the markers in it."""
    mark = marker(number)
    if message.role != "tool":
        return mark, [mark]
    parts = [part for part in message.parts if isinstance(part, TextPart | ErratumPart)]
    if len(parts) < len(message.parts):
        mark += '"'  # a template that encodes results changes this marker, which refuses a skill there
        return mark, [mark]
    text = BETWEEN.join(part.text if isinstance(part, TextPart) else part.sentence for part in parts)
    if encode is as_given:
        return text, []
    ends = [marker(number, "begin"), marker(number, "end")]
    return enclose(encode(text), *ends), ends


def _slots(template: ChatTemplate, talk: Sequence[Message], rendered: str) -> Slots:
    """Split the rendered text at the contents. The content of a message with calls may be missing: some templates drop
    it, print it after the results, or print the results in the order of the calls."""
    marks = [_content(number, message)[1] for number, message in enumerate(talk)]
    places = marker_positions(rendered)
    for number, message in enumerate(talk):
        if message.tool_calls and not (message.text and marks[number][0] in places):
            marks[number] = []
    groups = [*accumulate(message.role != "tool" for message in talk)]  # a message and the results after it
    order = sorted(
        (number for number in range(len(talk)) if marks[number]),
        key=lambda number: (groups[number], places.get(marks[number][0], -1)),
    )
    texts = iter(template.cut_text(rendered, [mark for number in order for mark in marks[number]]))
    slots, before, shown = [], next(texts), 0  # messages whose calls are in the text already
    for number in order:
        result = without_marks(next(texts)) if len(marks[number]) == 2 else None
        slots.append(Slot(talk[number], before, any(message.tool_calls for message in talk[shown:number]), result))
        before, shown = next(texts), max(shown, number)
    return slots, before


# Chunks.

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

    A prefilled answer follows what opens an answer without calls, as the answers of earlier turns do, and what a model
    of this template generates before its text, such as its recipient.
    Texts are stripped, except answers and results of tools. Raises NotesError for invalid tools, and ModelError if the
    template has no place for a message, a tool or a call.
    """
    opening = template.reply
    template, conversation = _with_tools(template, conversation)
    if conversation.prefill:
        template = template.opening(opening)
    messages = [replace(message) for message in conversation.messages]  # distinct objects, identified by id
    turns: list[list[Message]] = [[]]
    answers: list[Message] = []
    for message in messages:
        if _is_answer(message, turns[-1], later=bool(answers)):
            answers.append(message)
            turns.append([])
        else:
            turns[-1].append(message)
    # Not every template has a place for an assistant message in a turn, and for a later system message.
    unusual = any(
        (message.role == "assistant" and not message.tool_calls)
        or (message.role == "system" and message is not messages[0])
        for turn in turns
        for message in turn
    )
    earlier = template.earlier if answers else template
    chunks: list[Chunk] = []
    opened: dict[int, str] = {}
    rendered: ChatTemplate | None = None
    for number, turn in enumerate(turns):
        own = earlier if number + 1 < len(turns) else template
        if unusual and own is not rendered:  # before the turns: a refusal has the template's reason
            opened, rendered = {id(slot.message): slot.before for slot in cut(own, messages)[0]}, own
        slots, closing = cut(own, turn, later=number > 0)
        if unusual:
            _check_openings(own, opened, slots)
        chunks += _chunks(own, slots, closing)
        for answer in answers[number : number + 1]:
            chunks += _text(answer.text)
    if conversation.prefill:
        before = _before_text(template, turns[-1], later=len(turns) > 1)
        chunks.append(Chunk("text", (*_template_runs(template, before), *_plain(conversation.prefill))))
    return chunks


def _before_text(template: ChatTemplate, turn: Sequence[Message], *, later: bool) -> str:
    """Return the template's text between the generation prompt and the text of an answer, usually none."""
    _, prompt = cut(template, turn, later=later)
    try:
        answered, _ = cut(template, [*turn, Message("assistant", (TextPart("a"),))], later=later)
    except ModelError:  # it has no place for an answer that is the last message
        return ""
    opening = answered[-1].before
    return opening.removeprefix(prompt) if opening.startswith(prompt) else ""


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


def _check_openings(template: ChatTemplate, opened: Mapping[int, str], turn: Sequence[Slot]) -> None:
    """Raise ModelError if messages of a turn open differently than in the whole conversation; `opened`: openings there
    by id."""
    for slot in turn:
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
        return _chunks(template, *cut_after_calls(template, turn, ends or [template.eos]))
    return _chunks(template, *cut(template, turn, later=True))


def left_context(template: ChatTemplate) -> str:
    """Return the text before a skill that comes first in the system message: skills are compiled after it."""
    marks = [marker(0), marker(1)]
    return template.cut([{"role": "system", "content": marks[0]}, {"role": "user", "content": marks[1]}], marks)[0]


def generation_prompt(template: ChatTemplate) -> str:
    """Return the text between a question and the answer."""
    return template.cut([{"role": "user", "content": marker(0)}], [marker(0)])[1]


def _chunks(template: ChatTemplate, slots: Sequence[Slot], closing: str) -> list[Chunk]:
    """Fill the slots, with the template's text around them."""
    chunks: list[Chunk] = []
    question = max((i for i, slot in enumerate(slots) if slot.message.role == "user"), default=-1)
    for number, slot in enumerate(slots):
        opening = _template_runs(template, slot.before)
        content = _content_chunks(slot.message, slot.result, template.cue if number == question else "")
        if slot.calls:
            chunks += [Chunk("call", opening)] if opening else []
        elif content and content[0].kind in ("question", "result"):
            content[0] = replace(content[0], runs=(*opening, *content[0].runs))
        else:
            chunks += [Chunk("text", opening)] if opening else []
        chunks += content
    after = _template_runs(template, closing)
    if chunks and chunks[-1].kind in ("question", "result"):
        chunks[-1] = replace(chunks[-1], runs=(*chunks[-1].runs, *after))
    elif after:
        chunks.append(Chunk("text", after))
    return _join_texts(chunks)


def _template_runs(template: ChatTemplate, text: str) -> tuple[Run, ...]:
    """Return the runs of a template's text, special except for marked strings of tools and calls."""
    parts = split_marked(text)
    if parts is None or any(has_mark_remains(stretch) for stretch, _ in parts):
        raise ModelError(f"{template.name} takes apart what is in messages, tools or calls")
    return tuple([Run(stretch, special) for stretch, special in parts])


def _content_chunks(message: Message, result: str | None, cue: str) -> list[Chunk]:
    """Return the content of a message: its parts, with empty lines between; `result`: of a tool, as in `Slot`."""
    if result is not None:
        return [Chunk("result", _plain(result))]
    if message.role == "assistant":
        return _text(message.text if message.tool_calls else message.text.strip())
    chunks: list[Chunk] = []
    for number, part in enumerate(message.parts, 1):
        between = BETWEEN if chunks else ""
        match part:
            case SkillPart():
                chunks += [*_text(between), Chunk("splice", name=part.name)]
            case ErratumPart():
                chunks.append(Chunk("erratum", _plain(between + part.sentence.strip())))
            case TextPart() if message.role == "tool":
                chunks.append(Chunk("result", _plain(between + part.text)))
            case TextPart() if message.role == "user" and number == len(message.parts):
                question = part.text.strip()
                question += "" if question.endswith(cue.strip()) else cue  # unless the user wrote it
                chunks.append(Chunk("question", _plain(between + question)))
            case TextPart() if part.text.strip():
                chunks += _text(between + part.text.strip())
    return chunks


def _plain(text: str) -> tuple[Run, ...]:
    """Return the run of a text that is not the template's; none for an empty one."""
    return (Run(text, False),) if text else ()


def _text(text: str) -> list[Chunk]:
    """Return a chunk of a message's text; none for an empty text."""
    return [Chunk("text", _plain(text))] if text else []


def _join_texts(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Join neighbouring texts, which are tokenised together if no splice separates them."""
    joined: list[Chunk] = []
    for kind, group in groupby(chunks, key=lambda chunk: chunk.kind):
        if kind == "text":
            runs = groupby([run for chunk in group for run in chunk.runs], key=attrgetter("special"))
            texts = [Run("".join([run.text for run in alike]), special) for special, alike in runs]
            joined.append(Chunk("text", tuple(texts)))
        else:
            joined += group
    return joined

"""Converts messages to the format of chat templates, and finds the slots of their texts in the rendered prompt.

A marker replaces each text while a template renders. Results of tools are passed themselves, between two markers, as a
template may encode them. Calls are passed in the first format with which the template shows every call: no format suits
all templates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from notes_cli.errors import ModelError
from notes_cli.text.messages import (
    BETWEEN,
    Encode,
    ErratumPart,
    Message,
    TextPart,
    ToolCall,
    as_given,
    count_markers,
    enclose,
    marked,
    marker,
    marker_positions,
    without_marks,
)
from notes_cli.text.template import ChatTemplate, Rendered

_KEY = "notesKey"  # key of arguments that are a marker


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of the content of a message."""

    message: Message
    before: str  # the template's text before it, including calls since the last slot
    calls: bool  # True if there are any
    result: str | None  # of a tool, as the template prints it; None for other contents


class Slots(NamedTuple):
    """The slots of a text in order, and the template's text after the last."""

    slots: list[Slot]
    closing: str


class _Form(NamedTuple):
    """A format of calls and results."""

    no_text: str | None = ""  # the content of a message that has calls but no text
    as_text: bool = False  # the arguments as a JSON text, else as an object
    short_ids: bool = False  # ids of nine letters and digits, as Mistral's templates demand
    apart: bool = False  # each call in a message of its own, with its result after it
    in_content: bool = False  # calls as part of the text
    as_user: bool = False  # results as messages of the user


_WAYS = tuple(_Form(no_text, as_text) for no_text in ("", None) for as_text in (False, True))
_TOGETHER = (*_WAYS, *(form._replace(short_ids=True) for form in _WAYS))
_FORMS = (
    *(*_TOGETHER, *(form._replace(apart=True) for form in _TOGETHER)),
    *(*(form._replace(as_user=True) for form in _WAYS), _Form(in_content=True), _Form(in_content=True, as_user=True)),
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
    form = _find_form(template, all_messages)
    talk = _apply_form(all_messages, form)
    rendered = template.render_marked(lambda encode: [*_to_template(talk, form, encode)])
    slots = _slots(template, talk, rendered)
    return Slots(slots.slots[3:], slots.closing) if later else slots


def cut_after_calls(template: ChatTemplate, messages: Sequence[Message], ends: Sequence[str]) -> Slots:
    """Return the slots after a message that calls tools (the first, which the model generated), from where generation
    ended.

    `ends`: the texts of the tokens that end an answer: if a message with calls does not end like one without,
    generation ended at the first of them. Raises ModelError as `cut` does, and if there is none of them.
    """
    called = replace(messages[0], parts=())
    talk = [*_TALK[:2], called, *messages[1:]]
    form = _find_form(template, talk, _TOGETHER)
    slots = _slots(template, talk, template.render([*_to_template(talk, form, None)]))
    first, *others = slots.slots[2:]
    last_call = marker(len(called.tool_calls) - 1, "call")
    after_call = first.before.rpartition(last_call)[2]
    first = replace(first, before=_from_end(template, after_call, messages[1:], ends), calls=False)
    return Slots([first, *others], slots.closing)


def _from_end(template: ChatTemplate, rest: str, messages: Sequence[Message], ends: Sequence[str]) -> str:
    """Return the part of the text after a call that begins where generation ended."""
    try:
        after_text = cut(template, messages, later=True).slots[0].before
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


def _find_form(template: ChatTemplate, talk: Sequence[Message], forms: Sequence[_Form] = _FORMS) -> _Form:
    """Return the first format with which the template shows every call and every result. Raises ModelError if none
    shows the calls."""
    calls = [call.name for message in talk for call in message.tool_calls]
    if not any(message.tool_calls or message.role == "tool" for message in talk):
        return forms[0]
    fault: ModelError | None = None
    hidden: list[str] = []
    with_calls: _Form | None = None  # shows the calls, but not every result
    for form in forms:
        in_form = _apply_form(talk, form)
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
            return form
        with_calls = with_calls or form
    if with_calls:
        return with_calls
    if fault and not hidden:
        raise fault
    raise ModelError(f"{template.name} does not show what tools were called (left out: {', '.join(hidden)})")


def _apply_form(talk: Sequence[Message], form: _Form) -> Sequence[Message]:
    """Move calls to separate messages, or into the text, if the format does so."""
    if form.in_content:
        return [_with_calls_as_text(message) if message.tool_calls else message for message in talk]
    return [*_split_calls(talk)] if form.apart else talk


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
    """Return a message with its calls as JSON after its text."""
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
    """Return a call in the format of templates; `arguments` replace its own."""
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
    return Slots(slots, before)

"""Messages in the form that chat templates take, and the slots of their texts in what a template renders.

A marker takes the place of each text. Two things are different. A template may encode the result of a tool, so the text
itself is passed, with a marker at each end. And there is no form of calls that all templates take, so the first form is
used with which the template shows every call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from notes_cli.classes import dataclass
from notes_cli.errors import ModelError
from notes_cli.text.messages import BETWEEN, ErratumPart, Message, TextPart, ToolCall
from notes_cli.text.template import ChatTemplate, Rendered
from notes_cli.text.untrusted import Way, as_given, between, marked, marker, markers_in, without_marks

_KEY = "notesKey"  # an argument's name


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the content of one message is."""

    message: Message
    before: str  # the template's own words before it, with the calls that were made since the last slot
    calls: bool  # whether there are any
    result: str | None  # the result of a tool, as the template prints it; None for a text of ours


class Slots(NamedTuple):
    """All slots of a text in order, and the template's words after the last one."""

    slots: list[Slot]
    closing: str


class _Form(NamedTuple):
    """A form of calls."""

    no_text: str | None  # the content of a message that has calls but no text
    as_text: bool  # the arguments as a JSON text, else as an object


_FORMS = (_Form("", False), _Form("", True), _Form(None, False), _Form(None, True))
_TALK = (  # comes before messages that continue a conversation
    Message("system", (TextPart("s"),)),
    Message("user", (TextPart("u"),)),
    Message("assistant", (TextPart("a"),)),
)


def cut(template: ChatTemplate, messages: Sequence[Message], *, later: bool = False) -> Slots:
    """The slots of these messages, up to the model's answer. `later`: they follow an answer without calls.

    Raise ModelError if the template fails, if it drops, changes, repeats or reorders a text, or leaves out a call.
    """
    talk = [*(_TALK if later else ()), *messages]
    form = _form(template, talk)
    rendered = template.render_marked(lambda way: [*_rendered(talk, form, way)])
    found = _slots(template, talk, rendered)
    return Slots(found.slots[3:], found.closing) if later else found


def cut_after_calls(template: ChatTemplate, messages: Sequence[Message], ends: Sequence[str]) -> Slots:
    """The slots after a message that calls tools (the first one, which the model wrote), from where the model stopped.

    `ends` are the texts of the tokens that end an answer: if a message with calls does not end like one without, the
    model stopped at the first of them. Raise ModelError as `cut` does, and if there is none of them.
    """
    called = replace(messages[0], parts=())
    talk = [*_TALK[:2], called, *messages[1:]]
    found = _slots(template, talk, template.render([*_rendered(talk, _form(template, talk), None)]))
    first, *others = found.slots[2:]
    last_call = marker(len(called.tool_calls) - 1, "call")
    rest = first.before.rpartition(last_call)[2]
    first = replace(first, before=_from_end(template, rest, messages[1:], ends), calls=False)
    return Slots([first, *others], found.closing)


def _from_end(template: ChatTemplate, rest: str, messages: Sequence[Message], ends: Sequence[str]) -> str:
    """The part of the text after a call that begins where the model stopped."""
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


def _form(template: ChatTemplate, talk: Sequence[Message]) -> _Form:
    """The first form with which the template shows every call. Raise ModelError if there is none."""
    calls = [call.name for message in talk for call in message.tool_calls]
    if not calls:
        return _FORMS[0]
    fault: ModelError | None = None
    hidden: list[str] = []
    for form in _FORMS:
        try:
            shown = template.render([*_rendered(talk, form, None)])
        except ModelError as error:
            fault = fault or error
            continue
        there = markers_in(shown)
        missing = [name for number, name in enumerate(calls) if marker(number, "call") not in there]
        if not missing and not any(mark in shown for mark in (f"'{_KEY}'", f'\\"{_KEY}')):  # Python's, or encoded twice
            return form
        hidden = hidden or missing or calls
    if fault and not hidden:
        raise fault
    raise ModelError(f"{template.name} does not show what tools were called (left out: {', '.join(hidden)})")


def _rendered(talk: Sequence[Message], form: _Form, way: Way | None) -> Iterator[Rendered]:
    """The messages as templates take them, strings of calls and results passed this way; None: calls are markers."""
    calls = 0
    for number, message in enumerate(talk):
        rendered: dict[str, Any] = {"role": message.role, "content": _content(number, message, way or marked)[0]}
        if message.role == "tool":
            rendered |= {"name": message.name, "tool_call_id": message.tool_call_id}
        if message.tool_calls:
            rendered["content"] = rendered["content"] if message.text else form.no_text
            rendered["tool_calls"] = [
                _call(call, way(call.arguments) if way else {_KEY: marker(number, "call")}, form)
                for number, call in enumerate(message.tool_calls, calls)
            ]
            calls += len(message.tool_calls)
        yield rendered


def _call(call: ToolCall, arguments: Any, form: _Form) -> dict[str, Any]:
    given = json.dumps(arguments, ensure_ascii=False) if form.as_text else arguments
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": given}}


def _content(number: int, message: Message, way: Way = marked) -> tuple[str, list[str]]:
    """What is passed as the content of a message, and the markers in it."""
    mark = marker(number)
    if message.role != "tool":
        return mark, [mark]
    parts = [part for part in message.parts if isinstance(part, TextPart | ErratumPart)]
    if len(parts) < len(message.parts):
        mark += '"'  # a template that encodes results changes this marker: no skill can be put there
        return mark, [mark]
    text = BETWEEN.join(part.text if isinstance(part, TextPart) else part.sentence for part in parts)
    if way is as_given:
        return text, []
    ends = [marker(number, "begin"), marker(number, "end")]
    return between(way(text), *ends), ends


def _slots(template: ChatTemplate, talk: Sequence[Message], rendered: str) -> Slots:
    """The rendered text, cut at the contents. That of a message with calls may be missing: some templates drop it."""
    marks = [_content(number, message)[1] for number, message in enumerate(talk)]
    there = markers_in(rendered)
    for number, message in enumerate(talk):
        if message.tool_calls and not (message.text and marks[number][0] in there):
            marks[number] = []
    texts = iter(template.cut_text(rendered, [mark for found in marks for mark in found]))
    slots, before, calls = [], next(texts), False
    for message, found in zip(talk, marks, strict=True):
        if found:
            result = without_marks(next(texts)) if len(found) == 2 else None
            slots.append(Slot(message, before, calls, result))
            before, calls = next(texts), False
        calls = calls or bool(message.tool_calls)
    return Slots(slots, before)

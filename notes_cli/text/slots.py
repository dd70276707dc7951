"""Messages in the form that chat templates take, and the slots of their texts in what a template renders.

A marker takes the place of each text. Two things are different. A template may encode the result of a tool, so the text
itself is passed, with a marker at each end. And there is no form of calls that all templates take, so the first form is
used with which the template shows every call.
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
    ErratumPart,
    Message,
    TextPart,
    ToolCall,
    Way,
    as_given,
    between,
    marked,
    marker,
    markers_in,
    places_of_markers,
    without_marks,
)
from notes_cli.text.template import ChatTemplate, Rendered

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
    """A form of calls and results."""

    no_text: str | None = ""  # the content of a message that has calls but no text
    as_text: bool = False  # the arguments as a JSON text, else as an object
    short_ids: bool = False  # ids of nine letters and digits, as Mistral's templates demand
    apart: bool = False  # each call in a message of its own, with its result after it
    in_content: bool = False  # calls as a part of the text
    as_user: bool = False  # results as messages of the user


_WAYS = tuple(_Form(no_text, as_text) for no_text in ("", None) for as_text in (False, True))
_TOGETHER = (*_WAYS, *(form._replace(short_ids=True) for form in _WAYS))
_FORMS = (
    *(*_TOGETHER, *(form._replace(apart=True) for form in _TOGETHER)),
    *(*(form._replace(as_user=True) for form in _WAYS), _Form(in_content=True), _Form(in_content=True, as_user=True)),
)
_TALK = (  # comes before messages that continue a conversation
    Message("system", (TextPart("s"),)),
    Message("user", (TextPart("u"),)),
    Message("assistant", (TextPart("a"),)),
)


def cut(template: ChatTemplate, messages: Sequence[Message], *, later: bool = False) -> Slots:
    """The slots of these messages, up to the model's answer. `later`: they follow an answer without calls.

    Raise ModelError if the template fails, if it drops, changes, repeats or reorders a text, or leaves out a call.
    """
    given = [*(_TALK if later else ()), *messages]
    form = _form(template, given)
    talk = _in_form(given, form)
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
    form = _form(template, talk, _TOGETHER)
    found = _slots(template, talk, template.render([*_rendered(talk, form, None)]))
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


def shows_calls(template: ChatTemplate) -> bool:
    """True if the template shows earlier calls: its model was trained to call tools."""
    calls = Message("assistant", (), (ToolCall("abcdefgh1", "look"),))
    try:
        _form(template, [*_TALK[:2], calls, Message("tool", (TextPart("r"),), (), "abcdefgh1", "look")], _TOGETHER)
    except ModelError:
        return False
    return True


def _form(template: ChatTemplate, talk: Sequence[Message], forms: Sequence[_Form] = _FORMS) -> _Form:
    """The first form with which the template shows every call and every result. Raise ModelError if it shows a call in
    none."""
    calls = [call.name for message in talk for call in message.tool_calls]
    if not any(message.tool_calls or message.role == "tool" for message in talk):
        return forms[0]
    fault: ModelError | None = None
    hidden: list[str] = []
    with_calls: _Form | None = None  # one that shows the calls, but not every result
    for form in forms:
        in_form = _in_form(talk, form)
        try:
            shown = template.render([*_rendered(in_form, form, None)])
        except ModelError as error:
            fault = fault or error
            continue
        there = markers_in(shown)
        missing = [name for number, name in enumerate(calls) if marker(number, "call") not in there]
        if any(mark in shown for mark in (f"'{_KEY}'", f'\\"{_KEY}')):  # Python's, or encoded twice
            missing = calls
        if missing and not form.in_content:
            hidden = hidden or missing
            continue
        results = [_content(number, one)[1] for number, one in enumerate(in_form) if one.role == "tool"]
        if all(marks[0] in there for marks in results if len(marks) == 2):
            return form
        with_calls = with_calls or form
    if with_calls:
        return with_calls
    if fault and not hidden:
        raise fault
    raise ModelError(f"{template.name} does not show what tools were called (left out: {', '.join(hidden)})")


def _in_form(talk: Sequence[Message], form: _Form) -> Sequence[Message]:
    """The messages, with calls in messages of their own or as texts, where the form has them so."""
    if form.in_content:
        return [_in_words(message) if message.tool_calls else message for message in talk]
    return [*_apart(talk)] if form.apart else talk


def _apart(talk: Sequence[Message]) -> Iterator[Message]:
    """The messages, of which none has several calls: each is followed by its result, if there is one."""
    head, waiting = Message("assistant"), list[ToolCall]()  # the text beside the calls; calls without a result
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


def _in_words(message: Message) -> Message:
    """A message with its calls as JSON after its text."""
    calls = [{"name": call.name, "arguments": as_given(call.arguments)} for call in message.tool_calls]
    words = [json.dumps(call, ensure_ascii=False) for call in calls]
    return replace(message, parts=(TextPart("\n".join([*filter(None, [message.text]), *words])),), tool_calls=())


def _rendered(talk: Sequence[Message], form: _Form, way: Way | None) -> Iterator[Rendered]:
    """The messages as templates take them, strings of calls and results passed this way; None: calls are markers."""
    calls = 0
    for number, message in enumerate(talk):
        rendered: dict[str, Any] = {"role": message.role, "content": _content(number, message, way or marked)[0]}
        if message.role == "tool" and form.as_user:
            rendered["role"] = "user"
        elif message.role == "tool":
            key = _id(message.tool_call_id, form)
            rendered |= {"name": (way or marked)(message.name), "tool_call_id": (way or marked)(key)}
        if message.tool_calls:
            rendered["content"] = rendered["content"] if message.text else form.no_text
            rendered["tool_calls"] = [
                _call(call, form, way or marked, None if way else {_KEY: marker(number, "call")})
                for number, call in enumerate(message.tool_calls, calls)
            ]
            calls += len(message.tool_calls)
        yield rendered


def _call(call: ToolCall, form: _Form, way: Way, arguments: Any) -> dict[str, Any]:
    """A call as templates take it. `arguments`: those in the place of its own."""
    arguments = way(call.arguments) if arguments is None else arguments
    given = json.dumps(arguments, ensure_ascii=False) if form.as_text else arguments
    return {"type": "function", "id": way(_id(call.id, form)), "function": {"name": way(call.name), "arguments": given}}


def _id(key: str, form: _Form) -> str:
    """The id of a call, or one of nine letters and digits that is always the same for it."""
    short = len(key) == 9 and key.isascii() and key.isalnum()
    return key if short or not form.short_ids else hashlib.sha256(key.encode(errors="replace")).hexdigest()[:9]


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
    """The rendered text, cut at the contents. That of a message with calls may be missing: some templates drop it, and
    some print it after the results, or these in the order of the calls."""
    marks = [_content(number, message)[1] for number, message in enumerate(talk)]
    places = places_of_markers(rendered)
    for number, message in enumerate(talk):
        if message.tool_calls and not (message.text and marks[number][0] in places):
            marks[number] = []
    groups = [*accumulate(message.role != "tool" for message in talk)]  # a message with the results after it
    order = sorted(
        (number for number in range(len(talk)) if marks[number]),
        key=lambda number: (groups[number], places.get(marks[number][0], -1)),
    )
    texts = iter(template.cut_text(rendered, [mark for number in order for mark in marks[number]]))
    slots, before, shown = [], next(texts), 0  # of so many messages the calls are in the text already
    for number in order:
        result = without_marks(next(texts)) if len(marks[number]) == 2 else None
        slots.append(Slot(talk[number], before, any(one.tool_calls for one in talk[shown:number]), result))
        before, shown = next(texts), max(shown, number)
    return Slots(slots, before)

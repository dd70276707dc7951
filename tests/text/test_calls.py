"""Tests parsing tool calls as each template prints them; answers without calls stay text."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from notes_cli.text.messages import Conversation, Message, TextPart, ToolCall, user_message
from notes_cli.text.prompt import build
from notes_cli.text.template import GENERIC_TOOLS
from notes_cli.text.tools import FORCED, ParsedAnswer, ToolCallFormat, ToolCallStream, calls_in, form_of, may_call

from .test_tools import IN_SYSTEM, KNOWS, NO_CALLS, NO_TOOLS, ONE_CALL, SOURCES, UNREAD, function, template_of

PROPERTIES = {
    name: {"type": kind, "description": "It.", "additionalProperties": True}
    for name, kind in {"city": "string", "code": "string", "days": "integer", "on": "boolean", "deep": "object"}.items()
}
TOOLS = (
    function("get_weather", "The weather.", properties=PROPERTIES, required=["city"]),
    function("get_time", "The time."),
)
DEEP = {"a": [1, {"b": "c, d: e"}], "z": "it's"}
GIVEN = {"city": 'São <b>Paulo</b> "x"\n[1]', "days": 3, "deep": DEEP, "on": True, "code": "12"}
FIRST, SECOND = ToolCall("abcdefgh1", "get_weather", GIVEN), ToolCall("abcdefgh2", "get_time")


@cache
def written(name: str, first: bool = True, second: bool = False) -> str:
    """Return the model's part of these calls as the template prints them: from their beginning to the first result."""
    calls, form = (*[FIRST] * first, *[SECOND] * second), form_of(SOURCES[name])
    results = [Message("tool", (TextPart("R!"),), tool_call_id=call.id) for call in calls]
    talk = (user_message("Q?"), Message("assistant", (), calls), *results)
    text = "".join(chunk.text for chunk in build(template_of(name), Conversation(talk, TOOLS)))
    text = text.partition("Q?")[2].partition("R!")[0]
    assert form
    if form.bare and (match := re.search(form.bare, text)):
        return text[match.start() :]
    return text[text.index(form.begin) :]


@pytest.mark.parametrize("name", sorted([*KNOWS, *IN_SYSTEM]))
def test_what_a_template_shows_is_read_back(name: str) -> None:
    """Two calls, or one if the template has no more, keep names and arguments with any characters."""
    calls = (FIRST,) if name in ONE_CALL else (FIRST, SECOND)
    text = written(name, second=len(calls) > 1)
    said = calls_in(text, form_of(SOURCES[name]), TOOLS)
    assert [(call.name, call.arguments) for call in said.calls] == [(call.name, call.arguments) for call in calls]
    assert len({call.id for call in said.calls}) == len(calls)
    assert not said.text


# Forms whose arguments are no JSON, or are a text in it: they come at the end.
WHOLE = re.compile(
    "DeepSeek-V(3.2|4)|GLM|Laguna|Spark|ling|Hy3|Coder|Qwen3.5|Nemotron-3|StepFun|Seed|MiniCPM|K3|MiniMax-M[23]"
    "|gemma|LFM|Apertus|muse"
)


def streamed(text: str, form: ToolCallFormat, size: int) -> tuple[dict[str, str], ToolCallStream]:
    """Return the arguments by call of an answer that comes in pieces."""
    found: dict[str, str] = {}
    stream = ToolCallStream(form, TOOLS)
    for at in range(0, len(text), size):
        stream.feed(text[at : at + size])
        for call, part in stream.arguments():
            assert (call.id in found) == (part != "")
            found[call.id] = found.get(call.id, "") + part
    return found, stream


@pytest.mark.parametrize("name", sorted([*KNOWS, *IN_SYSTEM]))
def test_arguments_come_in_parts(name: str) -> None:
    """Where they are JSON, in any pieces; the calls at the end are these, also of an answer that is cut anywhere."""
    form = form_of(SOURCES[name])
    assert form
    text = written(name, second=name not in ONE_CALL)
    for size in (1, 7, len(text)):
        found, stream = streamed(text, form, size)
        _, calls = stream.end()
        assert [call.arguments for call in calls] == [call.arguments for call in calls_in(text, form, TOOLS).calls]
        assert {key: json.loads(part) for key, part in found.items()} == {
            call.id: call.arguments for call in calls if call.id in found
        }
        assert bool(found) is not bool(WHOLE.search(name)), found
    for end in range(len(text)):
        found, stream = streamed(text[:end], form, 5)
        _, calls = stream.end(cut=True)
        assert {call.id: call.arguments_json for call in calls if call.id in found and call.cut} == {
            key: part for key, part in found.items() if not is_json(part)
        }
        assert all(call.arguments.items() <= GIVEN.items() or call.cut for call in calls)


def is_json(text: str) -> bool:
    try:
        return bool(json.loads(text)) or True
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": 1, "b": "x\\"y', {"a": 1, "b": 'x"y'}),
        ('{"a": [1, {"b": tr', {"a": [1, {}]}),
        *(('{"a": {"b": 1}, "c', {"a": {"b": 1}}), ('{"a": 1, "b": "x\\', {"a": 1, "b": "x"}), ("{", {}), ("", {})),
        ('{"a": "{[", "b": NaN', {"a": "{["}),
    ],
)
def test_a_call_that_is_cut_has_what_was_generated(text: str, arguments: object) -> None:
    _, stream = streamed(f'{{"name": "get_time", "arguments": {text}', FORCED, 3)
    _, (call,) = stream.end(cut=True)
    assert (call.arguments_json, call.arguments) == (text.removesuffix("\\"), arguments)


def test_arguments_that_break_off_stay_a_call() -> None:
    """They were passed on. A name of no tool, or one within the arguments, begins none."""
    form = form_of(SOURCES["Qwen-Qwen3-0.6B"])
    assert form
    begin = '<tool_call>\n{"name": "get_time", "arguments": '
    found, stream = streamed(f"{begin}{{x}}}}\n</tool_call>", form, 4)
    assert [*found.values()] == ["{x}"] and [call.cut for call in stream.end()[1]] == ["{x}"]
    inner = f'{begin}{{"x": {{"name": "get_weather", "arguments": {{}}}}}}}}'
    assert len(streamed(inner, form, 4)[0]) == 1
    for other in (begin.replace("get_time", "fly") + "{}}", begin + '"{}"}', begin + "null}"):
        found, stream = streamed(other, form, 4)
        assert not found and not any(call.cut for call in stream.end()[1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(('"get_time"', value) for value in ("1e999", "NaN", '"\\ud800"', '{"\\udc00": 1}')),
        *((name, "1") for name in ('["get_time"]', "3", "null", '{"get_time": 1}')),
    ],
)
def test_what_is_no_call(name: str, value: str) -> None:
    """With arguments that JSON cannot hold, or a name that is no text, the answer is a text."""
    text = f'<tool_call>\n{{"name": {name}, "arguments": {{"x": {value}}}}}\n</tool_call>'
    assert calls_in(text, form_of(GENERIC_TOOLS), TOOLS) == ParsedAnswer(text)
    plain = text.replace(value, "1").replace(name, '"get_time"')
    assert [dict(call.arguments) for call in calls_in(plain, form_of(GENERIC_TOOLS), TOOLS).calls] == [{"x": 1}]


@pytest.mark.parametrize("name", KNOWS)
def test_an_answer_without_calls_is_a_text(name: str) -> None:
    """So is one that begins with a brace, is cut short, or calls an unknown tool. A stream shows no part of a call:
    text is emitted as far as it is certain, and only grows."""
    form = form_of(SOURCES[name])
    assert form
    call, later = written(name), written(name, first=False, second=True)
    for text in ("It is warm.", "{1, 2} is a set.", f"{form.begin}", f"{form.begin}x", call.partition("Paulo")[0]):
        said = calls_in(text, form, TOOLS)
        assert said.calls == () and (said.text == text or form.drop), text
    other = [{"type": "function", "function": {"name": "other"}}]
    assert calls_in(later, form, other).calls == calls_in(later, form, []).calls == ()
    text = ("" if form.bare else "I'll look. ") + call
    sure = [may_call(text[:count], form) for count in range(len(text) + 1)]
    assert sure == sorted(sure) and sure[-1] <= text.index(call)
    plain = "It is warm, and the rest of the week, too."
    assert may_call(plain, form) == len(plain)


@pytest.mark.parametrize(
    ("name", "answer", "text"),
    [
        ("openai-gpt-oss-120b", "<|channel|>final<|message|>It is warm.", "It is warm."),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "<|START_RESPONSE|>Warm.", "Warm."),
        ("upstage-Solar-Open-100B", "<|content|>Warm.", "Warm."),
        ("upstage-Solar-Open-100B", "<|begin|>assistant<|content|>Warm.", "Warm."),
        *(("meetkai-functionary-medium-v3.2", "all\nWarm.", "Warm."), ("Qwen-Qwen3-0.6B", "Warm.", "Warm.")),
    ],
)
def test_a_form_has_words_around_a_text(name: str, answer: str, text: str) -> None:
    """The format's frame is no part of the text."""
    assert calls_in(answer, form_of(SOURCES[name]), TOOLS).text == text


def test_other_spellings_of_models() -> None:
    names = ("Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b", "upstage-Solar-Open-100B")
    qwen, llama, oss, solar = (form_of(SOURCES[name]) for name in names)
    call = "<|tool_calls|><|tool_call:begin|>x<|tool_call:name|>get_time<|tool_call:args|>{}<|tool_call:end|>"
    for form, text in (
        (qwen, '<tool_call>{"name": "get_time", "arguments": "{}"}</tool_call>'),
        (qwen, '<tool_call>\n{"arguments": {}, "name": "get_time"}'),
        (llama, '<|python_tag|>{"name": "get_time", "parameters": {}}'),
        (llama, '{"type": "function", "name": "get_time", "parameters": {}}'),
        (llama, '{"name": "get_time", "parameters": {}}; {"name": "get_time", "parameters": {}}'),
        *((oss, "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}"), (solar, call)),
        (solar, f"<|begin|>assistant{call}"),
    ):
        found = calls_in(text, form, TOOLS).calls
        assert found and {call.name for call in found} == {"get_time"} and found[0].arguments == {}, text
    assert solar and not any(may_call(begun, solar) for begun in ("<|begin|>", "<|begin|>assistant"))
    assert may_call("<|begin|>assistant<|content|>", solar)


@pytest.mark.parametrize("given", ["null", '""', '" "', '"null"', "{}", '"{}"'])
def test_a_call_without_arguments(given: str) -> None:
    qwen, kimi, llama = (
        form_of(SOURCES[name]) for name in ("Qwen-Qwen3-0.6B", "moonshotai-Kimi-K2", "meta-llama-Llama-3.1-8B-Instruct")
    )
    for form, text in (
        (qwen, f'<tool_call>\n{{"name": "get_time", "arguments": {given}}}\n</tool_call>'),
        (llama, f'{{"name": "get_time", "parameters": {given}}}'),
        (FORCED, f'{{"name": "get_time", "arguments": {given}}}'),
    ):
        assert [(call.name, call.arguments) for call in calls_in(text, form, TOOLS).calls] == [("get_time", {})], text
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>null"
    assert calls_in(section, kimi, TOOLS).calls[0].arguments == {}
    assert calls_in(section.removesuffix("null") + "<|tool_call_end|>", kimi, TOOLS).calls[0].arguments == {}
    assert not calls_in(section.removesuffix("null"), kimi, TOOLS).calls  # it was cut


def test_the_documents_list_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "answers.md").read_text()
    listed = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text.partition("| form |")[2], re.M))
    found: dict[str, set[str]] = {}
    for name in (*KNOWS, *IN_SYSTEM):
        form = form_of(SOURCES[name])
        assert form
        found.setdefault(form.name, set()).add(name)
    assert {form: {*names.split(", ")} for form, names in listed.items() if form != "---"} == found
    for name in NO_TOOLS | IN_SYSTEM | NO_CALLS | UNREAD:
        assert f"`{name}`" in text, name

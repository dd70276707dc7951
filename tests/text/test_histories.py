"""Tests conversations with tools of other programs in each template: none is refused, no text is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from notes_cli.errors import NotesError
from notes_cli.serve.parsing import parse_chat
from notes_cli.text.messages import Conversation, Message, TextPart
from notes_cli.text.prompt import Chunk, build
from notes_cli.text.reasoning import reasoning_of

from .test_tools import SOURCES, template_of
from .wild import plainly

Json = dict[str, Any]
CODE = 'for x in ["<a>", "b|c"]:\n    print({x: f"{x!r}"})  # 1 < 2 & 3 > 2'
RUN: Json = {"code": CODE, "path": "src/<main>.py", "deep": {"a": [1, None, {"b": "c|d"}]}, "times": 3, "on": True}
TOOLS: list[Json] = [
    {
        "name": "run",
        "description": "Runs <code> in {a} [sandbox] | and prints what it prints.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The <code>."},
                "path": {"type": ["string", "null"], "default": None},
                "times": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
                "kind": {"enum": ["fast", "<slow>"]},
                "deep": {"type": "object", "additionalProperties": True},
                "list": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["code"],
            "additionalProperties": False,
        },
    },
    *({"name": "now", "description": "The time."}, {"name": "files", "parameters": {}}),
    {"name": "ping", "description": "Pings.", "parameters": {"type": "object", "properties": {}}},
]
ASK: Json = {"role": "user", "content": "Which files are there?"}
MORE: Json = {"role": "user", "content": "And the largest?"}
ANSWER: Json = {"role": "assistant", "content": "There are four."}
SYSTEM: Json = {"role": "system", "content": "You work in a repository."}
MISSING = object()  # no id, no arguments, no content
FIRST, SECOND = "abcdefgh1", "abcdefgh2"


def call(key: object, name: str, arguments: object) -> Json:
    function = {"name": name} | ({} if arguments is MISSING else {"arguments": arguments})
    return {"type": "function", "function": function} | ({} if key is MISSING else {"id": key})


def calls(*given: Json, content: object = None) -> Json:
    return {"role": "assistant", "tool_calls": [*given]} | ({} if content is MISSING else {"content": content})


def result(key: object, content: object = '{"out": "<a>\\n[1]"}') -> Json:
    return {"role": "tool", "content": content} | ({} if key is MISSING else {"tool_call_id": key})


def request(*messages: Json, tools: Sequence[Json] = TOOLS, **more: Any) -> Json:
    listed = [{"type": "function", "function": tool} for tool in tools]
    return {"messages": [*messages], **({"tools": listed} if listed else {}), **more}


TEXT = json.dumps(RUN)
FOREIGN, OTHER = "call_8f3-x.Y/9", "toolu_01A09q90qw90lq917835lq9"
HISTORIES: dict[str, Json] = {
    "calls in an earlier turn, and no tools": request(
        SYSTEM, ASK, calls(call(FIRST, "run", TEXT)), result(FIRST), ANSWER, MORE, tools=()
    ),
    'tool_choice "none"': request(ASK, calls(call(FIRST, "run", TEXT)), result(FIRST), MORE, tool_choice="none"),
    "arguments {}, null, empty or missing": request(
        ASK,
        *(calls(call(FIRST, "now", "{}")), result(FIRST)),
        *(calls(call(SECOND, "ping", {})), result(SECOND)),
        *(calls(call("abcdefgh3", "now", None)), result("abcdefgh3")),
        *(calls(call("abcdefgh4", "now", "")), result("abcdefgh4")),
        *(calls(call("abcdefgh5", "ping", MISSING)), result("abcdefgh5")),
    ),
    "no ids": request(ASK, calls(call(MISSING, "run", TEXT)), result(MISSING)),
    "ids of other servers, contents null, missing, in parts": request(
        {"role": "user", "content": [{"type": "text", "text": "Which files"}, {"type": "text", "text": "are there?"}]},
        *(calls(call(FOREIGN, "run", TEXT), content=MISSING), result(FOREIGN, None)),
        *(calls(call(OTHER, "run", RUN), content="I look.\n"), result(OTHER, [{"type": "text", "text": "<a>"}])),
    ),
    "parallel calls, results reversed": request(
        ASK, calls(call(FIRST, "run", TEXT), call(SECOND, "now", "{}")), result(SECOND, "noon"), result(FIRST), MORE
    ),
    "a call without its result, a result without its call": request(
        ASK, calls(call(FIRST, "run", TEXT)), MORE, ANSWER, ASK, result(SECOND)
    ),
    "tools without parameters, one required": request(ASK, tools=TOOLS[1:], tool_choice="required"),
    "system, developer, text beside calls, rounds": request(
        SYSTEM,
        {"role": "developer", "content": "Be <brief>."},
        ASK,
        *(calls(call(FIRST, "run", TEXT), content="I'll <look>."), result(FIRST)),
        *(calls(call(SECOND, "now", "{}"), content=""), result(SECOND, "")),
        *(ANSWER, MORE, calls(call("abcdefgh3", "ping", "{}")), result("abcdefgh3", "pong")),
    ),
}

ENDLESS = {  # a macro of these calls itself for ever where a property has no type
    *("CohereForAI-c4ai-command-r-plus-tool_use", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
}
USERS = re.compile(r"<(main|slow|look|brief)>|<a>\\?\"|b\|c|c\|d|\{x|\{a\}")  # in strings of users only


def prompt_of(name: str, history: str) -> list[Chunk]:
    asked = parse_chat(json.loads(json.dumps(HISTORIES[history])))
    return build(template_of(name), Conversation(asked.messages, asked.tools))


def typed(history: str) -> bool:
    """Return True if all properties of its tools have a type."""
    tools = HISTORIES[history].get("tools", []) if HISTORIES[history].get("tool_choice") != "none" else []
    schemas: list[Any] = [tool["function"].get("parameters") or {} for tool in tools]
    return all("type" in one for schema in schemas for one in schema.get("properties", {}).values())


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_each_history_has_a_prompt(name: str) -> None:
    """It contains the names of called tools, the results and all other texts, none of it read as control tokens."""
    for history, given in HISTORIES.items():
        if name in ENDLESS and not typed(history):
            with pytest.raises(NotesError, match="nested too deeply"):
                prompt_of(name, history)
            continue
        chunks = prompt_of(name, history)
        text = "".join(chunk.text for chunk in chunks)
        for message in given["messages"]:
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in text, history
            if message["role"] == "tool" and isinstance(message["content"], str):
                shown = (message["content"], json.dumps(message["content"]), json.dumps(message["content"])[1:-1])
                assert any(one in text for one in shown), history
        own = [run.text for chunk in chunks for run in chunk.runs if run.special]
        assert not [part for part in own if USERS.search(part)], history


def test_a_turn_does_not_change_what_came_before() -> None:
    """The prompt begins with that of the history without its last question, as a prefix cache requires."""
    for name in ("Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407"):
        for history in [name for name in HISTORIES if re.match("ids|no ids|parallel|arguments", name)]:
            given = HISTORIES[history]
            messages = [one for one in given["messages"] if one.get("content") != "And the largest?"]
            texts = []
            for more in ([], [{"role": "assistant", "content": "A."}, {"role": "user", "content": "And now?"}]):
                asked = parse_chat({**given, "messages": [*messages, *more]})
                chunks = build(template_of(name), Conversation(asked.messages, asked.tools))
                texts.append("".join(chunk.text for chunk in chunks))
            assert texts[1].startswith(texts[0]), (name, history)


THINKERS = sorted(name for name, source in SOURCES.items() if reasoning_of(source, "").open)


@pytest.mark.parametrize("name", THINKERS)
def test_thoughts_in_the_text_of_an_answer(name: str) -> None:
    """Before the last question they are left out if the template leaves them out; behind it they stay."""
    reasoning = reasoning_of(SOURCES[name], "")
    template = reasoning.template(template_of(name), think=False)
    thoughts = f"{reasoning.open}I wonder.{reasoning.close}\n\n"
    given = [ASK, {**ANSWER, "content": thoughts + ANSWER["content"]}, MORE]
    messages = tuple(Message(one["role"], (TextPart(one["content"]),)) for one in given)
    found = reasoning.without_thoughts(template, messages)
    if (plain := plainly(SOURCES[name], given, True, None)) is not None:
        assert ("I wonder." in plain) is ("I wonder." in found[1].text)
    assert found[1].text in (messages[1].text, ANSWER["content"])
    build(template, Conversation(found))
    assert reasoning.without_thoughts(template, messages[:2]) == messages[:2]


def test_each_model_that_leaves_thoughts_out() -> None:
    """So that the table above is not about templates that all keep them."""
    dropped = ("Qwen3-0.6B", "Qwen3.5", "QwQ", "R1", "GLM-4.6", "MiniMax-M2", "Nemotron")
    for model in dropped:
        [name, *_] = [name for name in THINKERS if model in name]
        reasoning = reasoning_of(SOURCES[name], "")
        messages = tuple(Message(role, (TextPart("a</think>\n\nb"),)) for role in ("user", "assistant", "user"))
        assert reasoning.without_thoughts(template_of(name), messages)[1].text == "b"

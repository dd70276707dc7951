"""Tests which conversations are valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from notes_cli.errors import NotesError
from notes_cli.text.messages import Conversation, Message, SkillPart, TextPart, ToolCall, asking, user_message

SYSTEM = Message("system", (TextPart("S"),))
USER = user_message("Q?")
ANSWER = Message("assistant", (TextPart("A"),))
CALL = Message("assistant", (), (ToolCall("1", "look", {"at": "x"}),))
RESULT = Message("tool", (TextPart("R"),), tool_call_id="1")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        *(((), "is empty"), ((Message("system", (TextPart(""),)),), "is empty")),
        ((Message("robot", (TextPart("x"),)),), "message 1 has an unknown role 'robot'"),
        *(((USER, ANSWER), "the last message is the assistant's"), ((USER, CALL), "the last message is the assistant")),
        ((USER, CALL, Message("tool", (), tool_call_id="1", name="find")), "message 3 is .*'find', but 'look'"),
        ((Message("user", tool_calls=CALL.tool_calls),), "message 1 calls a tool, which only the assistant can do"),
        ((Message("user", name="look"),), "message 1 names a tool"),
        ((USER, Message("assistant", (SkillPart("a"),)), USER), "message 2 .* holds text and tool calls only"),
        ((user_message("\ud800"),), "surrogate pair"),
        ((USER, Message("assistant", (), (ToolCall("1", ""),)), RESULT), "message 2 calls a tool without a name"),
        ((USER, Message("assistant", (), (ToolCall("1", "look", ["x"]),)), RESULT), "must be an object"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_answered(messages: tuple[Message, ...], says: str) -> None:
    with pytest.raises(NotesError, match=says) as caught:
        Conversation(messages)
    assert "\n" not in str(caught.value)


def test_results_and_calls() -> None:
    """A result without its call stays one; where ids are counted from 0 it belongs to the latest call."""
    assert Conversation((USER, RESULT)).messages == (USER, RESULT)
    other = Message("assistant", (), (ToolCall("1", "find"),))
    twice = Message("assistant", (), (ToolCall("1", "look"), ToolCall("1", "find")))
    for calls, names in (([CALL], ["look", ""]), ([CALL, other], ["find", "look"]), ([twice], ["look", "find"])):
        found = Conversation((USER, *calls, RESULT, RESULT)).messages
        assert [one.name for one in found[-2:]] == names


def test_tools_as_others_give_them() -> None:
    """OpenAI's, with the outer object and without, MCP's and Anthropic's are the same tool, also without parameters."""
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    whole = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": schema}}
    bare = {"name": "look", "description": "Looks."}
    for given in (
        *(whole, bare | {"parameters": schema}, bare | {"type": "function", "parameters": schema, "strict": True}),
        {**whole, "cache_control": {"type": "ephemeral"}},
        bare | {"inputSchema": schema, "title": "Look", "annotations": {"readOnlyHint": True}, "outputSchema": {}},
        bare | {"type": "custom", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
    ):
        assert Conversation((USER,), (given,)).tools == (whole,), given
    empty = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    for none in ({}, {"parameters": None}, {"parameters": {}}, {"inputSchema": {}}):
        [tool] = Conversation((USER,), ({"name": "now", "description": None, **none},)).tools
        assert tool["function"] == empty


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        *((({},), "tool 1 is not a function"), (("look",), "tool 1 is not a function")),
        (({"name": "a"}, {"type": "function", "function": {"name": 3}}), "tool 2 is not a function"),
        (({"name": "search", "type": "web_search_20250305"},), "of the type 'web_search_20250305'"),
        (({"name": "look up"},), "tool 1: its name must be .* not 'look up'"),
        (({"name": "a"}, {"name": "a"}), "two tools of the name a"),
    ],
)
def test_tools_that_are_none(tools: tuple[Mapping[str, Any], ...], says: str) -> None:
    with pytest.raises(NotesError, match=says):
        Conversation((USER,), tools)


def test_a_skill_that_is_named_twice() -> None:
    """Functions that take names of skills refuse it; messages may repeat the text of a skill."""
    for twice in (lambda: user_message("Q?", skills=["a", "a"]), lambda: asking("Q?", skills=["a", "b"], images=["b"])):
        with pytest.raises(NotesError, match=r"spliced twice: [ab]"):
            twice()
    Conversation((Message("system", (SkillPart("a"), SkillPart("a"))), user_message("Q?", skills=["a"])))

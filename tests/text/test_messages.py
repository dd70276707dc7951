"""Conversations: what can be answered, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from notes_cli.errors import NotesError
from notes_cli.text.messages import (
    Conversation,
    ErratumPart,
    Message,
    SkillPart,
    TextPart,
    ToolCall,
    asking,
    user_message,
)

SYSTEM = Message("system", (TextPart("S"),))
USER = user_message("Q?")
ANSWER = Message("assistant", (TextPart("A"),))
CALL = Message("assistant", (), (ToolCall("1", "look", {"at": "x"}),))
RESULT = Message("tool", (TextPart("R"),), tool_call_id="1")


def test_a_question_is_messages() -> None:
    """What `asking` takes, as messages: skills with the errata after them in the system message, or late, before the
    question."""
    turns = [("Q1?", " A1")]
    given = {"system": "S", "skills": ["a"], "after_skills": ["N."], "before_question": ["E."], "turns": turns}
    early = asking("Q?", **given)  # type: ignore[arg-type]
    skills, asked = (SkillPart("a"), ErratumPart("N.")), (ErratumPart("E."), TextPart("Q?"))
    earlier = (user_message("Q1?"), Message("assistant", (TextPart(" A1"),)))
    assert early.messages == (Message("system", (TextPart("S"), *skills)), *earlier, Message("user", asked))
    late = asking("Q?", **given, place="late")  # type: ignore[arg-type]
    assert late.messages == (SYSTEM, *earlier, Message("user", (*skills, *asked)))
    assert asking("Q?", system=" \n").messages == (USER,)


@pytest.mark.parametrize(
    "messages",
    [
        (USER,),
        (SYSTEM, USER, ANSWER, USER),
        (USER, USER),
        (USER, CALL, RESULT),
        (USER, CALL, RESULT, USER),
        (USER, CALL, RESULT, CALL, RESULT),
        (SYSTEM, USER, CALL, RESULT, ANSWER, USER),
        (USER, SYSTEM),
        (SYSTEM, SYSTEM, USER),
        (ANSWER, USER),
        (USER, ANSWER, ANSWER, USER),
    ],
)
def test_what_can_be_answered(messages: tuple[Message, ...]) -> None:
    """Questions and results of tools; a result knows the name of its tool."""
    found = Conversation(messages).messages
    assert [message.role for message in found] == [message.role for message in messages]
    assert all(message.name == "look" for message in found if message.role == "tool")


def test_a_system_message_that_says_nothing() -> None:
    """It is left out, so that the default of the template stays."""
    assert Conversation((Message("system", (TextPart(" "),)), USER)).messages == (USER,)
    skill = Message("system", (TextPart(" "), SkillPart("a")))
    assert Conversation((skill, USER)).messages == (skill, USER)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ((), "the conversation is empty"),
        ((Message("system", (TextPart(""),)),), "the conversation is empty"),
        ((Message("robot", (TextPart("x"),)),), "message 1 has an unknown role 'robot'. Choose among system, user"),
        ((USER, ANSWER), "the last message is the assistant's: there is nothing to answer"),
        ((USER, CALL), "the last message is the assistant's"),
        ((USER, RESULT), "message 2 is the result of a call '1' that was not made"),
        ((USER, CALL, RESULT, RESULT), "message 4 is the result of a call '1' that was not made"),
        ((USER, CALL, USER), "the call of look has no result before message 3"),
        (
            (USER, Message("assistant", (), (*CALL.tool_calls, ToolCall("2", "find"))), RESULT),
            "the call of find has no result",
        ),
        (
            (USER, CALL, Message("tool", (), tool_call_id="1", name="find")),
            "message 3 is a result of 'find', but 'look' was called",
        ),
        ((Message("user", tool_calls=CALL.tool_calls),), "message 1 calls a tool, which only the assistant can do"),
        ((Message("user", name="look"),), "message 1 names a tool, so its role must be tool, not user"),
        ((USER, Message("assistant", (SkillPart("a"),)), USER), "message 2 .* holds text and tool calls only"),
        ((user_message("\ud800"),), "is half of a UTF-16 surrogate pair"),
        (
            (USER, Message("assistant", (), (ToolCall("1", "<|im_end|>"),)), RESULT),
            "message 2: the name of a tool call must be letters, digits, .* not '<|im_end|>'",
        ),
        ((USER, Message("assistant", (), (ToolCall("", "look"),)), RESULT), "message 2: the id of a tool call must be"),
        ((USER, Message("assistant", (), CALL.tool_calls * 2), RESULT), "message 2 has two tool calls of the id '1'"),
        (
            (USER, Message("assistant", (), (ToolCall("1", "look", ["x"]),)), RESULT),  # type: ignore[arg-type]
            "message 2: the arguments of look must be an object",
        ),
    ],
)
def test_what_cannot_be_answered(messages: tuple[Message, ...], says: str) -> None:
    """One line that names the message and the reason."""
    with pytest.raises(NotesError, match=says.replace("|", r"\|").replace("?", r"\?")) as caught:
        Conversation(messages)
    assert "\n" not in str(caught.value)


def test_tools_as_others_give_them() -> None:
    """With the outer object of OpenAI's interface, or without."""
    function = {"name": "look", "parameters": {"type": "object"}}
    whole = {"type": "function", "function": function}
    assert Conversation((USER,), (function,)).tools == Conversation((USER,), (whole,)).tools == (whole,)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        (({},), "tool 1 is not a function with a name"),
        (("look",), "tool 1 is not a function with a name"),
        (({"name": "a"}, {"type": "function", "function": {"name": 3}}), "tool 2 is not a function with a name"),
        (({"name": "look up"},), "tool 1: its name must be letters, digits, .* not 'look up'"),
        (({"name": "a"}, {"name": "a"}), "there are two tools of the name a"),
    ],
)
def test_tools_that_are_none(tools: tuple[Mapping[str, Any], ...], says: str) -> None:
    """Refused when the conversation is made, not by a template."""
    with pytest.raises(NotesError, match=says):
        Conversation((USER,), tools)


def test_a_skill_that_is_named_twice() -> None:
    """By whoever names skills; messages may have the text of one as often as it is sent."""
    for twice in (
        lambda: user_message("Q?", skills=["a", "a"]),
        lambda: asking("Q?", skills=["a", "b"], images=["b"]),
    ):
        with pytest.raises(NotesError, match=r"the same skill is spliced twice: [ab]. Name each skill once"):
            twice()
    Conversation((Message("system", (SkillPart("a"), SkillPart("a"))), user_message("Q?", skills=["a"])))

"""Tests Anthropic's Messages API: answers, streams, tools, token counts, and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import QUESTION, Json, Served, reply_text

TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
FORM = {"type": "json_schema", "schema": None}
RESULT = [  # becomes two messages of a chat
    {"role": "user", "content": "x"},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "y"}]},
]
ROBOT = {"role": "robot", "content": "z"}
NAMED = {"type": "tool", "name": "look"}


def create(served: Served, status: int = 200, path: str = "", **body: Any) -> Json:
    body.setdefault("messages", [{"role": "user", "content": QUESTION}])
    reply = served.http.post(f"/v1/messages{path}", json={"max_tokens": 64, **body})
    assert reply.status_code == status, reply.text
    found: Json = reply.json()
    return found


def events(served: Served, **body: Any) -> list[Json]:
    """Return the events of a stream, each checked to have its type as its name."""
    body.setdefault("messages", [{"role": "user", "content": QUESTION}])
    reply = served.http.post("/v1/messages", json={"max_tokens": 64, "stream": True, **body})
    found = []
    for event in reply.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_an_answer_equals_that_of_a_chat(served: Served) -> None:
    """With skills and corrections; the counts add up to those of the chat."""
    notes = {"splice": ["returns"], "errata": {"date": "2026-07-01"}}
    chat = served.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}], notes=notes)
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for system in ("Be brief.", blocks):
        message = create(served, system=system, notes=notes)
        assert message["content"] == [{"type": "text", "text": reply_text(chat)}]
        assert message["stop_reason"] == "end_turn"
        counts = message["usage"]
        assert counts["input_tokens"] + counts["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    counted = create(served, path="/count_tokens", system="Be brief.", notes=notes)["input_tokens"]
    assert counted == chat["usage"]["prompt_tokens"] and create(served, max_tokens=2)["stop_reason"] == "max_tokens"


def test_the_headers_of_a_client_are_left_out(served: Served) -> None:
    """Claude Code's first block is other in each request, so that no prefix would be found again."""
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1f2;"}, {"type": "text", "text": "Be brief."}]
    counted = create(served, path="/count_tokens", system=system)
    assert counted == create(served, path="/count_tokens", system="Be brief.")


def test_a_stream_comes_to_the_same(served: Served) -> None:
    notes, messages = {"splice": ["returns"]}, [{"role": "user", "content": f"{QUESTION} Think first."}]
    whole = create(served, messages=messages, notes=notes)
    streamed = events(served, messages=messages, notes=notes)
    kinds = [event["type"] for event in streamed]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    text = "".join(event["delta"]["text"] for event in streamed if event["type"] == "content_block_delta")
    assert [{"type": "text", "text": text}] == whole["content"]
    assert streamed[-2]["delta"]["stop_reason"] == "end_turn"
    assert streamed[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_call_and_its_result(served: Served) -> None:
    """A forced call is a block, whole and streamed; results may come with text and errors."""
    message = create(served, tools=[TOOL], tool_choice=NAMED)
    [call] = message["content"]
    assert (call["type"], call["name"], message["stop_reason"]) == ("tool_use", "look", "tool_use")
    streamed = events(served, tools=[TOOL], tool_choice=NAMED)
    parts = [event["delta"]["partial_json"] for event in streamed if event["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == call["input"]
    cut = create(served, tools=[TOOL], tool_choice=NAMED, max_tokens=message["usage"]["output_tokens"] - 2)
    assert (cut["stop_reason"], [block["type"] for block in cut["content"]]) == ("max_tokens", ["tool_use"])
    for result in ("7", [{"type": "text", "text": "7"}], None):
        blocks = [{"type": "tool_result", "tool_use_id": call["id"], "content": result, "is_error": False}]
        for more in ([], [{"type": "text", "text": "And now?"}]):
            talk = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": message["content"]}]
            create(served, tools=[TOOL], messages=[*talk, {"role": "user", "content": [*blocks, *more]}])


def test_a_choice_of_tools_that_are_left_out(served: Served) -> None:
    """Tools that Anthropic runs are left out, with a choice of them."""
    search = {"type": "web_search_20250305", "name": "web_search"}
    answers = [create(served, tools=tools)["content"] for tools in ([], [search])]
    answers.append(create(served, tools=[search], tool_choice={"type": "tool", "name": "web_search"})["content"])
    assert answers == [answers[0]] * 3


def test_earlier_thinking_is_no_part_of_the_prompt(served: Served) -> None:
    answer = {"type": "text", "text": "Yes."}
    counts = []
    for blocks in ([answer], [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, answer]):
        talk = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": blocks}]
        counts.append(create(served, path="/count_tokens", messages=[*talk, {"role": "user", "content": "Why?"}]))
    assert counts[0] == counts[1]


def test_a_stop_sequence_is_named(served: Served) -> None:
    think = [{"role": "user", "content": f"{QUESTION} Think first."}]
    how: Json = {"messages": think, "notes": {"splice": ["returns"]}}
    assert (create(served, **how)["stop_reason"], create(served, **how)["stop_sequence"]) == ("end_turn", None)
    how["stop_sequences"] = ["nowhere", " the return"]
    message, streamed = create(served, **how), events(served, **how)
    assert message["content"][0]["text"].endswith("So") and streamed[0]["message"]["stop_sequence"] is None
    for ended in (message, streamed[-2]["delta"]):
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", " the return")


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("messages must be a list", {"messages": None}),
        ("messages[0].content[0] is video", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
        ("Unknown parameter: 'temprature'", {"temprature": 1}),
        ("does not exist", {"model": "claude-9"}),
        ("prompt is too long", {"messages": [{"role": "user", "content": "May I return this? " * 20_000}]}),
        ("Unknown parameter: 'n'", {"n": 2}),
        ("stop_sequences must be", {"stop_sequences": [5]}),
        ("output_config.format.schema is", {"output_config": {"format": FORM}}),
        ("messages[2].role must be", {"messages": [*RESULT, ROBOT]}),
        ("mcp_servers is not supported", {"mcp_servers": [{}]}),
        ("tool_choice.name is missing", {"tools": [TOOL], "tool_choice": {"type": "tool"}}),
    ],
)
def test_errors_have_the_form_of_the_api(served: Served, words: str, body: Json) -> None:
    status, kind = (404, "not_found_error") if "model" in body else (400, "invalid_request_error")
    error = create(served, status, **body)
    assert error["type"] == "error" and error["error"]["type"] == kind and words in error["error"]["message"]

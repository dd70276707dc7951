"""Tests OpenAI's Responses API with its client: answers, streams, tools, stored responses, and errors."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from notes_cli.runtime.request import Answer, Counts, Settings, Text
from notes_cli.serve.responses_api import ResponsesReply, parse_responses
from notes_cli.text.messages import ToolCall

from .conftest import QUESTION, Json, Served, reply_text

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
NAMED = {"type": "function", "name": "look"}
LATE = {"notes": {"splice": ["returns"], "errata": {"date": "2026-07-01"}, "explain": True}}


def test_an_answer_equals_that_of_a_chat(served: Served) -> None:
    """With skills and corrections; instructions are the system message."""
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = served.chat(asked, notes=LATE["notes"])
    response = served.client.responses.create(model="tiny", input=QUESTION, instructions="Be brief.", extra_body=LATE)
    assert response.output_text == reply_text(chat) and response.status == "completed"
    assert response.usage and response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.usage.input_tokens_details.cached_tokens > 100
    assert (response.model_extra or {})["notes"]["counts"]["total"] == chat["notes"]["counts"]["total"]


def test_a_stream_comes_to_the_same(served: Served) -> None:
    """Its events are numbered, each delta is between the begin and the end of its part, and the last has it all."""
    question, extra = f"{QUESTION} Think first.", {"notes": {"splice": ["returns"]}}
    whole = served.client.responses.create(model="tiny", input=question, extra_body=extra)
    events = list(served.client.responses.create(model="tiny", input=question, stream=True, extra_body=extra))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == text == whole.output_text


def test_a_call_and_its_result(served: Served) -> None:
    """A forced call is an item of the output; its result continues the response by its id, or by all items."""
    create: Any = served.client.responses.create
    response = create(model="tiny", input="Look.", tools=[TOOL], tool_choice=NAMED)
    [call] = response.output
    assert (call.type, call.name, call.status) == ("function_call", "look", "completed")
    assert isinstance(json.loads(call.arguments), dict) and response.usage
    most = response.usage.output_tokens - 2
    [cut] = create(model="tiny", input="Look.", tools=[TOOL], tool_choice=NAMED, max_output_tokens=most).output
    assert (cut.type, cut.status) == ("function_call", "incomplete") and cut.arguments.startswith('{"x"')
    result: Json = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    items: list[Any] = [{"role": "user", "content": "Look."}, call.model_dump(), result]
    by_items = create(model="tiny", input=items, tools=[TOOL])
    by_id = create(model="tiny", input=[result], tools=[TOOL], previous_response_id=response.id)
    events = [*create(model="tiny", input="Look.", tools=[TOOL], tool_choice=NAMED, stream=True)]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    calls = events[-1].response.output
    assert [(one.name, one.arguments) for one in done] == [(item.name, item.arguments) for item in calls]
    assert by_id.output_text == by_items.output_text
    assert by_id.usage and by_items.usage and by_id.usage.input_tokens == by_items.usage.input_tokens


def test_only_the_item_that_was_cut_is_incomplete() -> None:
    """Reasoning before a call that was cut is whole."""
    asked = parse_responses({"input": "Look.", "tools": [TOOL]}, list)
    reply = ResponsesReply(asked.chat, "tiny", asked=asked)
    counts, settings = Counts(0, 0, 0, 0, 0, 0), Settings(True, "now", "early", 1)
    done = Answer("", 2, settings, counts, (), stopped="length", calls=(ToolCall("1", "look", cut='{"x'),))
    for event in (Text("Hm.", reasoning=True), done):
        reply.add(event)
    assert [item["status"] for item in reply.whole()["output"]] == ["completed", "incomplete"]


def test_a_tool_of_free_text(served: Served) -> None:
    """A custom tool is a function with one argument for the model, and a custom call for the client."""
    tool = {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "start: X"}}
    body = {"input": "Patch.", "tools": [tool], "tool_choice": {"type": "custom", "name": "patch"}}
    response = served.http.post("/v1/responses", json=body).json()
    [call] = response["output"]
    assert call["type"] == "custom_tool_call" and isinstance(call["input"], str)
    items = [{"role": "user", "content": "Patch."}, call]
    items.append({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"})
    assert served.http.post("/v1/responses", json={"input": items, "tools": [tool]}).status_code == 200


def test_a_tool_of_a_namespace(served: Served) -> None:
    """Its call has the tool's own name and its namespace; tools of two namespaces may have one name."""
    spaces = [{"type": "namespace", "name": name, "tools": [TOOL]} for name in ("a", "b")]
    body = {"input": "Look.", "tools": spaces, "tool_choice": {"type": "function", "name": "b__look"}}
    [call] = served.http.post("/v1/responses", json=body).json()["output"]
    assert (call["name"], call["namespace"]) == ("look", "b")
    items = [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}]
    assert served.http.post("/v1/responses", json={"input": items, "tools": spaces}).status_code == 200


def test_allowed_tools(served: Served) -> None:
    """Only they are called, and the prompt is that of all tools."""
    body: Json = {"input": "Look.", "tools": [TOOL, {**TOOL, "name": "listen"}]}
    every = served.http.post("/v1/responses", json={**body, "max_output_tokens": 1}).json()["usage"]
    for names, mode in ((["listen"], "required"), (["look"], "required"), (["look"], "auto")):
        tools = [{"type": "function", "name": name} for name in names]
        choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
        found = served.http.post("/v1/responses", json={**body, "tool_choice": choice}).json()
        assert found["usage"]["input_tokens"] == every["input_tokens"] and found["tool_choice"] == choice
        calls = [item["name"] for item in found["output"] if item["type"] == "function_call"]
        assert calls == (names if mode == "required" else [])
    choice["tools"] = [{"type": "function", "name": "fly"}]
    error = served.http.post("/v1/responses", json={**body, "tool_choice": choice}).json()["error"]
    assert error["param"] == "tool_choice" and "none of the tools" in error["message"]


def test_a_form_of_the_answer(served: Served) -> None:
    """`text.format` holds the answer to a schema; a cut answer is incomplete."""
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    response = served.client.responses.create(model="tiny", input="Seven?", text=form)  # type: ignore[call-overload]
    assert json.loads(response.output_text) == {"a": 7}
    cut = served.client.responses.create(model="tiny", input="Seven?", text=form, max_output_tokens=2)  # type: ignore[call-overload]
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_errors_count_items(served: Served) -> None:
    """Those of the input, without instructions and earlier messages; a call is part of the answer before it."""
    first = served.client.responses.create(model="tiny", input=QUESTION)
    answer, call = {"role": "assistant", "content": "x"}, {"type": "function_call", "call_id": "1", "arguments": ""}
    items = [{"role": "user", "content": "x"}, answer, {**call, "name": "f"}, {"role": "robot", "content": ""}]
    body = {"input": items, "instructions": "Be brief.", "previous_response_id": first.id}
    error = served.http.post("/v1/responses", json=body).json()["error"]
    assert error["param"] == "input[3].role" and error["message"].startswith("input[3].role must be one of")


def test_tools_that_openai_runs_are_left_out(served: Served) -> None:
    """Clients list them without asking; the model is not offered any."""
    response = served.client.responses.create(model="tiny", input=QUESTION, tools=[{"type": "web_search"}])
    assert response.usage and response.usage.input_tokens < 20


def test_a_response_that_was_not_stored(served: Served) -> None:
    response = served.client.responses.create(model="tiny", input=QUESTION, store=False)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        served.client.responses.create(model="tiny", input="And now?", previous_response_id=response.id)

"""Tests the Responses API and the Messages API beside that of chats: the same requests have the same answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from notes_cli.errors import NotesError
from notes_cli.runtime.request import Answer, Counts, Settings, Text
from notes_cli.serve.responses_api import ResponsesReply, parse_responses
from notes_cli.text.messages import ToolCall
from notes_cli.text.tools import load_tools

from .conftest import QUESTION, Json, Served

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS: dict[str, Json] = {
    CHAT: {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}},
    RESPONSES: {"type": "function", "name": "look", "parameters": PARAMETERS},
    MESSAGES: {"name": "look", "input_schema": PARAMETERS},
}
TOOL = TOOLS[RESPONSES]
NAMED: dict[str, Json] = {
    CHAT: {"type": "function", "function": {"name": "look"}},
    RESPONSES: {"type": "function", "name": "look"},
    MESSAGES: {"type": "tool", "name": "look"},
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
FORMS: dict[str, Json] = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
ENDS = {"end_turn": "stop", "completed": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
ENDS |= {"incomplete": "length", "stop_sequence": "stop"}


def sent(api: str, question: str = QUESTION, most: int = 64, **more: Any) -> Json:
    """Return a request with a system message. `call`: of the tool is required; `form`: of SCHEMA."""
    user = [{"role": "user", "content": question}]
    more |= {"tools": [TOOLS[api]], "tool_choice": NAMED[api]} if more.pop("call", False) else {}
    more |= FORMS[api] if more.pop("form", False) else {}
    if api == CHAT:
        return {"messages": [{"role": "system", "content": "Be brief."}, *user], "max_tokens": most, **more}
    if api == RESPONSES:
        return {"input": question, "instructions": "Be brief.", "max_output_tokens": most, **more}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    return {"system": system, "messages": user, "max_tokens": most, **more}


class Found(NamedTuple):
    """A reply, as in the API of chats."""

    text: str
    calls: list[tuple[str, Any]]
    end: str
    prompt: int
    written: int


def plain(arguments: str) -> str:
    """Return JSON as it is written here, whatever the blanks that the model wrote; other text as it is."""
    try:
        return json.dumps(json.loads(arguments))
    except ValueError:
        return arguments


def read(api: str, reply: Json) -> Found:
    used = reply["usage"]
    if api == CHAT:
        [choice] = reply["choices"]
        functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
        calls = [(function["name"], plain(function["arguments"])) for function in functions]
        counts = used["prompt_tokens"], used["completion_tokens"]
        return Found(choice["message"]["content"] or "", calls, choice["finish_reason"], *counts)
    if api == RESPONSES:
        Response.model_validate(reply)
        texts = [item["content"][0]["text"] for item in reply["output"] if item["type"] == "message"]
        functions = [item for item in reply["output"] if item["type"] == "function_call"]
        calls = [(item["name"], plain(item["arguments"])) for item in functions]
        end = "tool_calls" if calls and reply["status"] == "completed" else ENDS[reply["status"]]
        return Found("".join(texts), calls, end, used["input_tokens"], used["output_tokens"])
    texts = [block["text"] for block in reply["content"] if block["type"] == "text"]
    calls = [(block["name"], json.dumps(block["input"])) for block in reply["content"] if block["type"] == "tool_use"]
    prompt = used["input_tokens"] + used["cache_read_input_tokens"]
    return Found("".join(texts), calls, ENDS[reply["stop_reason"]], prompt, used["output_tokens"])


def joined(api: str, text: str) -> Json:
    """Join the events of a stream to the whole reply, as clients do."""
    events = [event.splitlines() for event in text.strip().split("\n\n")]
    found = [json.loads(event[-1].removeprefix("data: ")) for event in events]
    kinds = [event["type"] for event in found]
    assert [event[0] for event in events] == [f"event: {kind}" for kind in kinds]
    if api == RESPONSES:
        TypeAdapter(list[ResponseStreamEvent]).validate_python(found)
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        for kind, key in (("output_text", "text"), ("function_call_arguments", "arguments")):
            deltas = [event["delta"] for event in found if event["type"] == f"response.{kind}.delta"]
            assert "".join(deltas) == "".join(one[key] for one in found if one["type"] == f"response.{kind}.done")
        whole: Json = found[-1]["response"]
        return whole
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    blocks = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    for block, number in zip(blocks, range(len(blocks)), strict=True):
        deltas = [event["delta"] for event in found if "delta" in event and event.get("index") == number]
        if block["type"] == "text":
            block["text"] = "".join(delta["text"] for delta in deltas)
        else:
            block["input"] = json.loads("".join(delta["partial_json"] for delta in deltas))
    return {**found[0]["message"], "content": blocks, **found[-2]["delta"], "usage": found[-2]["usage"]}


def post(served: Served, api: str, body: Json, status: int = 200) -> Json:
    reply = served.http.post(api, json=body)
    assert reply.status_code == status, reply.text
    found: Json = reply.json()
    return found


LATE = {"splice": ["returns"], "errata": {"date": "2026-07-01"}}
ASKED: list[Json] = [
    {"notes": LATE},
    {"question": f"{QUESTION} Think first.", "notes": {"splice": ["returns"]}},
    {"most": 2},
    {"call": True},
    {"form": True, "question": "Seven?"},
]


@pytest.mark.parametrize("given", ASKED, ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("api", [RESPONSES, MESSAGES])
def test_an_answer_differs_from_that_of_a_chat(served: Served, api: str, given: Json) -> None:
    """With skills and corrections, cut, a call, and with a form; whole and streamed."""
    wanted = read(CHAT, post(served, CHAT, sent(CHAT, **given)))
    body = sent(api, **given)
    whole = post(served, api, body)
    assert read(api, whole) == wanted
    assert read(api, joined(api, served.http.post(api, json={**body, "stream": True}).text)) == wanted
    assert bool(wanted.calls) == ("call" in given) and (wanted.end == "length") == ("most" in given)
    if api == MESSAGES:
        assert post(served, f"{api}/count_tokens", body)["input_tokens"] == wanted.prompt
    else:
        cut = whole["incomplete_details"]
        assert cut == ({"reason": "max_output_tokens"} if "most" in given else None)


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
def test_the_arguments_of_a_call_come_as_they_are_generated(served: Served, api: str) -> None:
    """In parts that make the whole, also of a call that is cut, whose input is what there is of it."""
    tool = json.loads(json.dumps(TOOLS[api]).replace('"integer"', '"string", "minLength": 20, "maxLength": 24'))
    body = {**sent(api, call=True), "tools": [tool]}
    written = read(api, post(served, api, body)).written
    for most in (written + 8, written - 5):
        cut = {**body, {RESPONSES: "max_output_tokens"}.get(api, "max_tokens"): most}
        [(name, arguments)] = read(api, post(served, api, cut)).calls
        lines = served.http.post(api, json={**cut, "stream": True}).text
        events = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
        if api == CHAT:
            found = [one["choices"][0]["delta"].get("tool_calls", []) for one in events]
            [first, *deltas] = [call for calls in found for call in calls]
            assert first["id"] and first["function"] == {"name": "look", "arguments": ""}
            assert all(one.keys() == {"index", "function"} for one in deltas)
            parts = [one["function"]["arguments"] for one in deltas]
        elif api == RESPONSES:
            parts = [one["delta"] for one in events if one["type"] == "response.function_call_arguments.delta"]
            assert joined(api, lines)["output"][0]["arguments"] == "".join(parts)
        else:
            parts = [one["delta"]["partial_json"] for one in events if one["type"] == "content_block_delta"]
        assert len(parts) > 8 and name == "look"
        whole = "".join(parts) + ('"}' if api == MESSAGES and most < written else "")
        assert plain(whole) == arguments and len(arguments) > 20, "of the Messages API whole as far as it goes"


@pytest.mark.parametrize("api", [RESPONSES, MESSAGES])
def test_a_call_that_is_cut(served: Served, api: str) -> None:
    most = read(api, post(served, api, sent(api, call=True))).written - 2
    reply = post(served, api, sent(api, call=True, most=most))
    found = read(api, reply)
    assert found.end == "length" and [name for name, _ in found.calls] == ["look"]
    if api == RESPONSES:
        [item] = reply["output"]
        assert item["status"] == "incomplete" and item["arguments"].startswith('{"x"')


def test_only_the_item_that_was_cut_is_incomplete() -> None:
    """Reasoning before a call that was cut is whole."""
    asked = parse_responses({"input": "Look.", "tools": [TOOL]}, list)
    reply = ResponsesReply(asked.chat, "tiny", asked=asked)
    counts, settings = Counts(0, 0, 0, 0, 0, 0), Settings(True, "now", "early", 1)
    done = Answer("", 2, settings, counts, (), stopped="length", calls=(ToolCall("1", "look", cut='{"x'),))
    for event in (Text("Hm.", reasoning=True), done):
        reply.add(event)
    assert [item["status"] for item in reply.whole()["output"]] == ["completed", "incomplete"]


def test_the_result_of_a_call_makes_another_prompt(served: Served) -> None:
    """It has the tokens of the same result in a chat: by all items or by the id, as a text, blocks or nothing."""
    answer = post(served, RESPONSES, sent(RESPONSES, call=True))
    [call] = answer["output"]
    function = {"name": "look", "arguments": call["arguments"]}
    chat = sent(CHAT, tools=[TOOLS[CHAT]], most=1)
    calling = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    block = {"type": "tool_use", "id": "1", "name": "look", "input": json.loads(call["arguments"])}
    for result in ("7", ""):
        talk = [*chat["messages"], calling, {"role": "tool", "tool_call_id": "1", "content": result}]
        wanted = read(CHAT, post(served, CHAT, {**chat, "messages": talk})).prompt
        output: Json = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        items = [{"role": "user", "content": QUESTION}, call, output]
        for more in ({"input": items}, {"input": [output], "previous_response_id": answer["id"]}):
            body = sent(RESPONSES, tools=[TOOL], most=1) | more
            assert read(RESPONSES, post(served, RESPONSES, body)).prompt == wanted
        for content in (result or None, [{"type": "text", "text": result}]):
            blocks = [{"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": False}]
            body = sent(MESSAGES, tools=[TOOLS[MESSAGES]], most=1)
            body["messages"] += [{"role": "assistant", "content": [block]}, {"role": "user", "content": blocks}]
            assert read(MESSAGES, post(served, MESSAGES, body)).prompt == wanted
            blocks.append({"type": "text", "text": "And now?"})
            assert read(MESSAGES, post(served, MESSAGES, body)).prompt > wanted


def test_tools_that_the_service_runs_are_left_out(served: Served) -> None:
    """Clients list them without asking; a choice of them is left out, too."""
    for api, search in ((RESPONSES, {"type": "web_search"}), (MESSAGES, {"type": "web_search_20250305", "name": "w"})):
        plain = read(api, post(served, api, sent(api)))
        for choice in ({}, {"tool_choice": {"type": "tool", "name": "w"}} if api == MESSAGES else {}):
            assert read(api, post(served, api, sent(api, tools=[search], **choice))) == plain


# The Messages API alone.


def test_blocks_that_are_no_part_of_the_prompt(served: Served) -> None:
    """Claude Code's first block, which differs in each request, and earlier reasoning."""

    def counted(system: str, *answer: Json) -> int:
        first = [{"type": "text", "text": text} for text in (system, "Be brief.") if text]
        talk = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": [*answer]}]
        messages = [*talk, {"role": "user", "content": "Why?"}]
        found: int = post(served, f"{MESSAGES}/count_tokens", {"system": first, "messages": messages})["input_tokens"]
        return found

    yes, hm = {"type": "text", "text": "Yes."}, {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    assert counted("", yes) == counted("x-anthropic-billing-header: cch=1f2;", hm, yes) < counted("Hm.", yes)


def test_a_stop_sequence_is_named(served: Served) -> None:
    body = sent(MESSAGES, f"{QUESTION} Think first.", notes={"splice": ["returns"]})
    assert post(served, MESSAGES, body)["stop_sequence"] is None
    body["stop_sequences"] = ["nowhere", " the return"]
    whole = post(served, MESSAGES, body)
    for reply in (whole, joined(MESSAGES, served.http.post(MESSAGES, json={**body, "stream": True}).text)):
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", " the return")
        assert reply["content"][0]["text"].endswith("So")


RESULT = [  # becomes two messages of a chat
    {"role": "user", "content": "x"},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "y"}]},
]


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("messages must be a list", {"messages": None}),
        ("messages[0].content[0] is video", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
        ("Unknown parameter: 'temprature'", {"temprature": 1}),
        ("no compiled skill", {"model": "claude-9@nothing"}),
        ("prompt is too long", {"messages": [{"role": "user", "content": "May I return this? " * 20_000}]}),
        ("Unknown parameter: 'n'", {"n": 2}),
        ("stop_sequences must be", {"stop_sequences": [5]}),
        ("output_config.format.schema is", {"output_config": {"format": {"type": "json_schema", "schema": None}}}),
        ("messages[2].role must be", {"messages": [*RESULT, {"role": "robot", "content": "z"}]}),
        ("mcp_servers is not supported", {"mcp_servers": [{}]}),
        ("tool_choice.name is missing", {"tools": [TOOLS[MESSAGES]], "tool_choice": {"type": "tool"}}),
    ],
)
def test_errors_have_the_form_of_the_messages_api(served: Served, words: str, body: Json) -> None:
    status, kind = (404, "not_found_error") if "model" in body else (400, "invalid_request_error")
    error = post(served, MESSAGES, {**sent(MESSAGES), **body}, status)
    assert error["type"] == "error" and error["error"]["type"] == kind and words in error["error"]["message"]


# The Responses API alone.


def test_a_tool_of_free_text(served: Served) -> None:
    """A custom tool is a function with one argument for the model, and a custom call for the client."""
    tool = {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "start: X"}}
    choice = {"type": "custom", "name": "patch"}
    [call] = post(served, RESPONSES, {"input": "Patch.", "tools": [tool], "tool_choice": choice})["output"]
    assert call["type"] == "custom_tool_call" and isinstance(call["input"], str)
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    post(served, RESPONSES, {"input": [{"role": "user", "content": "Patch."}, call, result], "tools": [tool]})


def test_a_tool_of_a_namespace(served: Served) -> None:
    """Its call has the tool's own name and its namespace; tools of two namespaces may have one name."""
    spaces = [{"type": "namespace", "name": name, "tools": [TOOL]} for name in ("a", "b")]
    choice = {"type": "function", "name": "b__look"}
    [call] = post(served, RESPONSES, {"input": "Look.", "tools": spaces, "tool_choice": choice})["output"]
    assert (call["name"], call["namespace"]) == ("look", "b")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    post(served, RESPONSES, {"input": [call, result], "tools": spaces})


def test_the_tools_of_codex(tmp_path: Path) -> None:
    """A file of them has the same functions as a request: of namespaces, with a grammar, without what OpenAI runs."""
    plain = [{"name": name, "description": "Looks.", "parameters": PARAMETERS} for name in ("look", "find")]
    patch = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"definition": "start: x"}}
    tools = [
        {"type": "namespace", "name": "mcp__web", "tools": [{"type": "function", **one} for one in plain]},
        *(patch, {"type": "web_search"}, {"type": "function", **plain[0], "strict": False}),
    ]
    file = tmp_path / "codex.json"
    file.write_text(json.dumps({"tools": tools}))
    found = load_tools(file).tools
    asked = parse_responses({"input": "Q?", "tools": tools}, lambda _: [])
    assert json.dumps(found) == json.dumps(asked.chat.tools)
    names = [tool["function"]["name"] for tool in found]
    assert names == ["apply_patch", "look", "mcp__web__find", "mcp__web__look"]
    assert found[0]["function"]["description"] == "Edits.\n\nstart: x"
    for wrong in ({}, {"name": "a", "tools": [1]}, {"name": "a", "tools": [{"type": "function"}]}):
        file.write_text(json.dumps([{"type": "namespace", **wrong}]))
        with pytest.raises(NotesError, match="name"):
            load_tools(file)


def test_allowed_tools(served: Served) -> None:
    """Only they are called, and the prompt is that of all tools."""
    body: Json = {"input": "Look.", "tools": [TOOL, {**TOOL, "name": "listen"}]}
    every = post(served, RESPONSES, {**body, "max_output_tokens": 1})["usage"]
    for names, mode in ((["listen"], "required"), (["look"], "required"), (["look"], "auto")):
        tools = [{"type": "function", "name": name} for name in names]
        choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
        found = post(served, RESPONSES, {**body, "tool_choice": choice})
        assert found["usage"]["input_tokens"] == every["input_tokens"] and found["tool_choice"] == choice
        calls = [item["name"] for item in found["output"] if item["type"] == "function_call"]
        assert calls == (names if mode == "required" else [])
    choice["tools"] = [{"type": "function", "name": "fly"}]
    error = post(served, RESPONSES, {**body, "tool_choice": choice}, 400)["error"]
    assert error["param"] == "tool_choice" and "none of the tools" in error["message"]


def test_errors_count_items_and_responses_may_be_left_unstored(served: Served) -> None:
    """Items of the input, without instructions and earlier messages; a call is part of the answer before it."""
    first = served.client.responses.create(model="tiny", input=QUESTION)
    answer, call = {"role": "assistant", "content": "x"}, {"type": "function_call", "call_id": "1", "arguments": ""}
    items = [{"role": "user", "content": "x"}, answer, {**call, "name": "f"}, {"role": "robot", "content": ""}]
    body = {"input": items, "instructions": "Be brief.", "previous_response_id": first.id}
    error = post(served, RESPONSES, body, 400)["error"]
    assert error["param"] == "input[3].role" and error["message"].startswith("input[3].role must be one of")
    left = served.client.responses.create(model="tiny", input=QUESTION, store=False)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        served.client.responses.create(model="tiny", input="And now?", previous_response_id=left.id)

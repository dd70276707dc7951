"""Tests refusals of a request: the status, the message and the place, without any effect on others."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.scheduler import Limits
from notes_cli.serve.server import CUT_OFF
from notes_cli.text.erratum import OfField

from .conftest import QUESTION, Json, Served, reply_text, started

ASK: Json = {"role": "user", "content": QUESTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_correction_that_would_leave_no_room(own: Served) -> None:
    """Refused with the limit, as each prompt with the skill would have it."""

    def correct(field: str, value: str) -> Any:
        return own.http.post("/v1/notes/errata", json={"field": field, "value": value})

    for value, says in (("1" * 2000, "tokens: 256 at most"), ("1" * 100_000, "maximum context length is 4096 tokens")):
        reply = correct("date", value)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "value"
        assert says in reply.json()["error"]["message"]
    assert reply_text(own.ask(splice=["returns"])) == "accepted"
    text = "".join(f"k{number}: v\n" for number in range(9)) + "\n- If the k1 is v then the fee is normal.\n"
    assert own.http.post("/v1/notes/compile", json={"name": "many", "text": text}).status_code == 200
    replies = [correct(f"k{number}", "~" * 200) for number in range(9)]
    assert [one.status_code for one in replies][:2] == [200, 200] and replies[-1].status_code == 400, replies[0].text
    assert "the corrections of many would have" in replies[-1].json()["error"]["message"]
    assert own.chat([ASK], notes={"splice": ["many"]}, max_tokens=1)["choices"]
    assert correct("k8", "v").status_code == 200, "what the text says is taken back, always"


def test_more_prompts_than_ever_wait(library: Path) -> None:
    """Not with 429, as trying again would not help."""
    with started(library, Limits(parallel=2, queue=2)) as served:
        reply = served.http.post("/v1/completions", json={"prompt": [QUESTION] * 5, "max_tokens": 1})
        assert reply.status_code == 400 and "Retry-After" not in reply.headers
        assert reply.json()["error"]["message"] == "5 prompts in one request: this server takes 4 at a time"
        assert served.http.post("/v1/completions", json={"prompt": [QUESTION] * 4, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("key", ["errata", "fields"])
@pytest.mark.parametrize("given", [{"date=x": "y"}, {"": "y"}, {"date": None}, {"date": []}, {"date": 1e999}])
def test_errata_that_are_none(given: Json, key: str) -> None:
    with pytest.raises(Exception, match=rf"notes.{key} must be an object of fields and texts"):
        parse_chat({"messages": [ASK], "notes": {key: given}})


def test_new_values_of_fields() -> None:
    """Converted to text as in JSON; those of `fields` are added to the errata."""
    notes = {"errata": {"a": True, "b": 3, "c": 1.5, "d": "True"}, "fields": {"date": "2026-07-01"}}
    found = parse_chat({"messages": [ASK], "notes": notes}).notes.errata
    assert found == ("a=true", "b=3", "c=1.5", "d=True", "date=2026-07-01") and isinstance(found[-1], OfField)


CHAT = "/v1/chat/completions"
CHOICES = ["accepted", "refused"]


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/v1/completions", {"prompt": "a", "stop": ["b", "a" * 1001]}, "stop"),
        ("/v1/completions", {"prompt": [5] * 5000}, "prompt"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 0}, "logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"tools": [3]}, "tools"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"notes": {"choices": CHOICES}}, "notes.choices"),  # needs `ask`
        (CHAT, {"notes": {"memory": "returns"}}, "notes.memory"),  # needs `ask` or a session
        (CHAT, {"notes": {"ask": True, "choices": CHOICES, "wnat": 1}}, "notes.wnat"),
        (CHAT, {"notes": {"ask": 1}}, "notes.ask"),
        (CHAT, {"notes": {"ask": True, "place": "here"}}, "notes.place"),
        (CHAT, {"notes": {"ask": True, "seam": -1}}, "notes.seam"),
        (CHAT, {"notes": {"ask": True, "method": "nonsense"}}, "notes.method"),
        (CHAT, {"notes": {"ask": True, "choices": ["yes", "yes"]}}, "notes.choices"),
        (CHAT, {"notes": {"ask": True, "fields": ["date=1"]}}, "notes.fields"),
        (CHAT, {"notes": {"ask": True}, "n": 2}, "n"),
        (CHAT, {"notes": {"ask": True}, "stop": "x"}, "stop"),
        (CHAT, {"notes": {"ask": True}, "messages": [ASK, {"role": "assistant", "content": "No."}, ASK]}, "messages"),
    ],
)
def test_the_parameter_is_named(served: Served, path: str, given: Json, param: str) -> None:
    reply = served.http.post(path, json={"messages": [ASK], **given} if path == CHAT else given)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert reply.json()["error"]["message"]


def test_a_choice_has_its_probabilities(served: Served) -> None:
    """Also at the end of a stream."""
    notes: Json = {"ask": True, "splice": ["returns"], "choices": CHOICES}
    reply = served.chat([ASK], notes=notes)
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("accepted", "stop")
    assert reply["notes"].keys() == {"choice", "probabilities"} and [*reply["notes"]["probabilities"]] == CHOICES
    body = {"messages": [ASK], "stream": True, "notes": {**notes, "session": "streamed"}}
    lines = served.http.post(CHAT, json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "accepted"
    assert [event["notes"]["choice"] for event in events if "notes" in event] == ["accepted"]


def test_a_single_question_leaves_nothing_for_others(served: Served) -> None:
    """Its sequence is closed, and K/V that was edited in place is in no other prompt."""
    free = served.at_context(lambda: served.scheduler.workspace.context.n_free)
    notes: Json = {"ask": True, "splice": ["returns"], "fields": {"date": "2026-07-01"}, "method": "field"}
    served.chat([ASK], notes=notes)
    assert served.at_context(lambda: served.scheduler.workspace.context.n_free) == free
    assert reply_text(served.ask(splice=["returns"])) == "accepted"


NAMELESS = {"id": "c1", "type": "function", "function": {"name": "", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([ASK, {"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[1] calls a tool, which only"),
        ([ASK, {"role": "assistant", "tool_calls": [NAMELESS]}, ASK], "messages[1] calls a tool without a name"),
        (
            [{"role": "system", "content": ""}, ASK, {"role": "assistant", "tool_calls": [NAMELESS]}],
            "messages[2] calls",
        ),
    ],
)
def test_messages_are_counted_as_they_were_sent(served: Served, messages: list[Json], says: str) -> None:
    """From 0, and before skills are added."""
    error = served.chat(messages, 400, notes={"splice": ["returns"]})
    assert says in error["message"] and error["param"] == "messages"


def test_a_client_that_is_cut_off_is_no_news(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn logs it as an error of the application; its other messages are logged."""
    log = logging.getLogger("uvicorn.error")
    log.error(f"{CUT_OFF}.")
    log.error("something else")
    assert [one.getMessage() for one in caplog.records if one.name == log.name] == ["something else"]

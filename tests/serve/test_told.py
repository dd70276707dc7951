"""Tests refusals of a request: the status, the message and the place, without any effect on others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from notes_cli.serve.app import Options
from notes_cli.serve.jobs import Limits
from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.server import CUT_OFF
from notes_cli.text.erratum import OfField

from .conftest import QUESTION, Json, Served, started, told

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
    assert told(own.ask(splice=["returns"])) == "accepted"
    text = "".join(f"k{number}: v\n" for number in range(9)) + "\n- If the k1 is v then the fee is normal.\n"
    assert own.http.post("/v1/notes/compile", json={"name": "many", "text": text}).status_code == 200
    replies = [correct(f"k{number}", "~" * 200) for number in range(9)]
    assert [one.status_code for one in replies][:2] == [200, 200] and replies[-1].status_code == 400, replies[0].text
    assert "the corrections of many would have" in replies[-1].json()["error"]["message"]
    assert own.ask(splice=["many"])["choices"]
    assert correct("k8", "v").status_code == 200, "what the text says is taken back, always"


def test_more_prompts_than_ever_wait(library: Path) -> None:
    """Not with 429, as trying again would not help."""
    with started(library, Limits(parallel=2, queue=2)) as served:
        reply = served.http.post("/v1/completions", json={"prompt": [QUESTION] * 5, "max_tokens": 1})
        assert reply.status_code == 400 and "Retry-After" not in reply.headers
        assert reply.json()["error"]["message"] == "5 prompts in one request: this server takes 4 at a time"
        assert served.http.post("/v1/completions", json={"prompt": [QUESTION] * 4, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("errata", [{"date=x": "y"}, {"": "y"}, {"date": None}, {"date": []}, {"date": 1e999}])
def test_errata_that_are_none(errata: Json) -> None:
    """Not applied to another field."""
    with pytest.raises(Exception, match=r"notes.errata must be an object of fields and texts"):
        parse_chat({"messages": [ASK], "notes": {"errata": errata}})
    with pytest.raises(Exception, match=r"notes.fields must be an object of fields and texts, not"):
        parse_chat({"messages": [ASK], "notes": {"fields": errata}})


def test_new_values_of_fields() -> None:
    """By the usual key `fields`; the server adds them to the errata."""
    asked = parse_chat({"messages": [ASK], "notes": {"errata": ["It rains."], "fields": {"date": "2026-07-01"}}})
    assert asked.notes.errata == ("It rains.", "date=2026-07-01") and isinstance(asked.notes.errata[1], OfField)
    with pytest.raises(Exception, match=r"notes.fields must be an object of fields and texts, not"):
        parse_chat({"messages": [ASK], "notes": {"fields": ["date=2026-07-01"]}})


def test_errata_that_are_no_texts() -> None:
    """Converted to text as in JSON."""
    errata = {"a": True, "b": 3, "c": 1.5, "d": "True"}
    found = parse_chat({"messages": [ASK], "notes": {"errata": errata}}).notes.errata
    assert found == ("a=true", "b=3", "c=1.5", "d=True")


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/v1/completions", {"prompt": "a", "stop": ["b", "a" * 1001]}, "stop"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 0}, "logprobs"),
        ("/v1/chat/completions", {"messages": [ASK], "tools": [{"type": "function"}]}, "tools"),
        ("/v1/chat/completions", {"messages": [ASK], "tools": [3]}, "tools"),
        ("/v1/chat/completions", {"messages": [ASK], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_the_parameter_is_named(served: Served, path: str, given: Json, param: str) -> None:
    reply = served.http.post(path, json=given)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


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


def test_the_page_is_open_to_all_who_ask_whether_it_is_there(library: Path) -> None:
    """HEAD is answered like GET; no other path is open."""
    with started(library, options=Options(keys=("secret",))) as served:
        assert served.http.head("/").status_code == served.http.get("/").status_code == 200
        assert served.http.head("/v1/models").status_code == 401


def test_a_client_that_is_cut_off_is_no_news(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn logs it as an error of the application; its other messages are logged."""
    log = logging.getLogger("uvicorn.error")
    log.error(f"{CUT_OFF}.")
    log.error("something else")
    assert [one.getMessage() for one in caplog.records if one.name == log.name] == ["something else"]

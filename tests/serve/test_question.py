"""Tests `notes.ask` over HTTP: one question with the prompt of `notes ask`, for any client."""

from __future__ import annotations

import json

import pytest

from .conftest import QUESTION, Json, Served

ASK: list[Json] = [{"role": "user", "content": QUESTION}]
CHOICES = ["accepted", "refused"]


def test_choices(served: Served) -> None:
    """The reply is one of them, with the probability of each; with `explain` also the document of `notes ask
    --json`."""
    notes: Json = {"ask": True, "splice": ["returns"], "choices": CHOICES}
    reply = served.chat(ASK, notes=notes)
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("accepted", "stop")
    assert reply["notes"].keys() == {"choice", "probabilities"} and [*reply["notes"]["probabilities"]] == CHOICES
    late = served.chat(ASK, notes={**notes, "fields": {"date": "2026-07-01"}, "explain": True})
    assert late["notes"]["choice"] == "refused" and late["notes"]["method"] == "field+erratum"
    assert late["notes"]["counts"].keys() < late["notes"]["tokens"].keys()


def test_a_stream_ends_with_notes(served: Served) -> None:
    notes: Json = {"ask": True, "splice": ["returns"], "choices": CHOICES, "session": "streamed"}
    body = {"messages": ASK, "stream": True, "notes": notes}
    lines = served.http.post("/v1/chat/completions", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "accepted"
    assert [event["notes"]["choice"] for event in events if "notes" in event] == ["accepted"]


def test_nothing_is_left_for_others(served: Served) -> None:
    """Its sequence is closed, and K/V that was edited in place is in no other prompt."""
    free = served.at_context(lambda: served.scheduler.workspace.context.n_free)
    notes: Json = {"ask": True, "splice": ["returns"], "fields": {"date": "2026-07-01"}, "method": "field"}
    served.chat(ASK, notes=notes)
    assert served.at_context(lambda: served.scheduler.workspace.context.n_free) == free
    assert served.ask(splice=["returns"])["choices"][0]["message"]["content"] == "accepted"


@pytest.mark.parametrize(
    ("notes", "more", "param"),
    [
        ({"choices": CHOICES}, {}, "notes.choices"),  # needs `ask`
        ({"memory": "returns"}, {}, "notes.memory"),  # needs `ask` or a session
        ({"ask": True, "choices": CHOICES, "wnat": 1}, {}, "notes.wnat"),
        ({"ask": 1}, {}, "notes.ask"),
        ({"ask": True, "place": "here"}, {}, "notes.place"),
        ({"ask": True, "seam": -1}, {}, "notes.seam"),
        ({"ask": True, "method": "nonsense"}, {}, "notes.method"),
        ({"ask": True, "choices": ["yes", "yes"]}, {}, "notes.choices"),
        ({"ask": True, "fields": ["date=1"]}, {}, "notes.fields"),
        ({"ask": True}, {"n": 2}, "n"),
        ({"ask": True}, {"stop": "x"}, "stop"),
        ({"ask": True}, {"messages": [*ASK, {"role": "assistant", "content": "No."}, *ASK]}, "messages"),
    ],
)
def test_what_is_wrong_is_named(served: Served, notes: Json, more: Json, param: str) -> None:
    error = served.chat(**{"messages": ASK, "status": 400, "notes": notes, **more})
    assert error["param"] == param and error["message"]

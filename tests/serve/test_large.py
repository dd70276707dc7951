"""Tests large requests: what cannot fit is not tokenized, and small ones are prepared while a large one is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine import sampler
from notes_cli.engine.model import Model
from notes_cli.serve import app, prepare, scheduler
from notes_cli.serve.parsing import Reader

from .conftest import QUESTION, Json, Served, started
from .test_robust import wait

ASK: Json = {"role": "user", "content": QUESTION}
LETTERS = "a" * 50_000  # could fit the context if all its tokens were the longest of the vocabulary, and has 50,000
CALL = {"id": "call_0001", "type": "function", "function": {"name": "look", "arguments": f'{{"at": "{LETTERS}"}}'}}
TOOL: Json = {"type": "function", "function": {"name": "look", "description": LETTERS, "parameters": {}}}
CHAT, MANY = "/v1/chat/completions", [{"role": "user", "content": LETTERS[:100]}, {"role": "assistant", "content": "a"}]
TOKENS, CHARACTERS, MESSAGES = "more than 4096 tokens", "a text of 81,000 characters", "5,000 messages"
WORDS = "the return " * 9000
MANY_TOOLS = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(5000)]
NEVER: list[tuple[str, Json, str]] = [  # path, body, words of the refusal
    (CHAT, {"messages": MANY * 2100 + [ASK]}, "4,201 messages"),
    (CHAT, {"messages": [{**ASK, "content": WORDS}]}, CHARACTERS),
    (CHAT, {"messages": [ASK], "tools": MANY_TOOLS}, "5,000 tools"),
    (CHAT, {"messages": [ASK] * 5000, "notes": {"session": "big"}}, MESSAGES),
    ("/v1/notes/explain", {"messages": [ASK] * 5000}, MESSAGES),
    ("/v1/completions", {"prompt": WORDS}, CHARACTERS),
    ("/v1/completions", {"prompt": ["a", WORDS]}, CHARACTERS),
    ("/tokenize", {"content": WORDS}, CHARACTERS),
    ("/v1/notes/compile", {"name": "big", "text": WORDS}, CHARACTERS),
    (CHAT, {"messages": [{**ASK, "content": LETTERS}]}, TOKENS),
    (CHAT, {"messages": MANY * 400 + [ASK]}, TOKENS),
    (CHAT, {"messages": [ASK], "tools": [TOOL]}, TOKENS),
    (CHAT, {"messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}]}, TOKENS),
    (CHAT, {"messages": [ASK], "notes": {"errata": [LETTERS]}}, TOKENS),
    (CHAT, {"messages": [{**ASK, "content": LETTERS}], "notes": {"session": "large"}}, TOKENS),
    (CHAT, {"messages": [{**ASK, "content": LETTERS}], "notes": {"ask": True}}, TOKENS),
    (CHAT, {"messages": [ASK], "notes": {"ask": True, "choices": ["b", LETTERS]}}, TOKENS),
    ("/v1/completions", {"prompt": LETTERS}, TOKENS),
    ("/v1/responses", {"input": LETTERS}, TOKENS),
    ("/v1/messages", {"max_tokens": 1, "messages": [{**ASK, "content": LETTERS}]}, "4097 tokens > 4096 maximum"),
    ("/v1/decisions", {"input": LETTERS, "questions": [{"type": "predicate", "instructions": "Is it?"}]}, TOKENS),
    ("/v1/notes/compile", {"name": "large", "text": LETTERS}, TOKENS),
    ("/v1/notes/explain", {"messages": [{**ASK, "content": LETTERS}]}, TOKENS),
]
BLANK: Json = {"role": "system", "content": ""}
TEXT: Json = {"type": "text", "text": "a"}
ITEMS: list[tuple[str, Json]] = [  # each has 50
    (CHAT, {"messages": [BLANK] * 49 + [ASK]}),
    (CHAT, {"messages": [{**ASK, "content": [TEXT] * 49}]}),
    (CHAT, {"messages": [BLANK, ASK, {"role": "assistant", "tool_calls": [CALL] * 46}, ASK]}),
    (CHAT, {"messages": [ASK], "tools": [{"type": "function", "function": {"name": f"t{n}"}} for n in range(50)]}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{**ASK, "content": [TEXT] * 49}]}),
    ("/v1/responses", {"input": [{**ASK, "content": [{"type": "input_text", "text": "a"}] * 49}]}),
    ("/v1/notes/explain", {"messages": [BLANK] * 49 + [ASK]}),
]
FORM: Json = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
LOOK: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ALLOWED: Json = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [LOOK]}}


@pytest.fixture(scope="module")
def tokenized() -> Iterator[list[int]]:
    """The characters of each text that is tokenized."""
    found: list[int] = []
    tokenize = Model._tokenize

    def counted(self: Model, text: str, special: bool) -> Any:
        found.append(len(text))
        return tokenize(self, text, special)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "_tokenize", counted)
        yield found


@pytest.mark.parametrize(("path", "body", "words"), NEVER)
def test_what_cannot_fit_is_tokenized(served: Served, tokenized: list[int], path: str, body: Json, words: str) -> None:
    tokenized.clear()
    reply = served.http.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and words in error["message"] and "4096" in error["message"], error
    assert words == TOKENS or path == "/v1/messages" or error["code"] == "context_length_exceeded"
    param = error.get("param")  # errors of the Messages API have none
    assert param == {"/tokenize": "content", "/v1/completions": "prompt"}.get(path, param)
    assert sum(tokenized) < 10_000
    short = served.http.post("/tokenize", json={"content": "a" * 3000}).json()["tokens"]
    assert tokenized[-1] == 3000 == len(short), "it would have been counted"
    wait(lambda: served.scheduler.load == 0)


def test_a_text_is_counted_beyond_the_context(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(served.http.post("/tokenize", json={"content": LETTERS}).json()["tokens"]) == len(LETTERS)
    monkeypatch.setattr(app, "COUNTED", 9999)
    error = served.http.post("/tokenize", json={"content": LETTERS}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "has more than 9999 tokens" in error["message"]


def test_small_requests_do_not_wait_for_large_ones(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More large ones than there are threads: one is prepared at a time, and the others leave the threads free."""
    inside, most, go, read_json = 0, 0, threading.Event(), app.read_json

    def slow(data: bytes) -> Any:
        nonlocal inside, most
        if len(data) > scheduler.LARGE:
            inside += 1
            most = max(most, inside)
            go.wait(30)
            inside -= 1
        return read_json(data)

    monkeypatch.setattr(app, "read_json", slow)
    with started(library) as served, ThreadPoolExecutor() as pool:
        large = {"messages": [{**ASK, "content": "a" * scheduler.LARGE}]}
        sent = [pool.submit(served.http.post, CHAT, json=large) for _ in range(scheduler.PREPARING + 1)]
        try:
            wait(lambda: inside == 1)
            for path, body in ((CHAT, {"messages": [ASK], "max_tokens": 1}), ("/tokenize", {"content": "a"})):
                assert served.http.post(path, json=body).status_code == 200 and inside == 1
        finally:
            go.set()
        assert {one.result().status_code for one in sent} == {400} and most == 1


@pytest.mark.parametrize(("path", "body"), ITEMS)
def test_too_many_items_are_not_parsed(served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: Json) -> None:
    parsed, read = [], Reader.__init__
    monkeypatch.setattr(Reader, "__init__", lambda *args, **how: (parsed.append(1), read(*args, **how))[1])
    for most, refused in ((50, False), (49, True)):
        monkeypatch.setattr(prepare, "MOST_ITEMS", most)
        parsed.clear()
        error = served.http.post(path, json=body).json().get("error", {})
        assert (" has 50 items, with their parts and calls: 49 at most" in str(error)) == refused, error
        assert bool(parsed) != refused


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": FORM, "n": 3},
        {"response_format": FORM, "notes": {"ask": True}},
        {"response_format": FORM, "notes": {"session": "formed"}},
        {"tools": [LOOK, TOOL | {"function": {"name": "other"}}], "tool_choice": ALLOWED},
        {"tools": [LOOK], "tool_choice": "required"},
    ],
)
def test_a_grammar_is_compiled_once_and_not_by_the_decode_thread(
    served: Served, monkeypatch: pytest.MonkeyPatch, more: Json
) -> None:
    threads, tokenizer = [], sampler._tokenizer

    def counted(model: Model) -> Any:
        threads.append(threading.current_thread().name)
        return tokenizer(model)

    monkeypatch.setattr(sampler, "_tokenizer", counted)
    assert served.http.post(CHAT, json={"messages": [ASK], "max_tokens": 8, **more}).status_code == 200
    assert [name.split("_")[0] for name in threads] == ["prepare"]

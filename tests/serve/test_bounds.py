"""What a stranger's request may cost the others: it is read beside them, and refused at once if it is too much."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.options import ContextOptions
from notes_cli.serve import parsing, reading, scheduler
from notes_cli.serve.app import Options
from notes_cli.serve.bounds import Letters, of_chat
from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.reading import read_json
from notes_cli.text.messages import TextPart
from notes_cli.text.schema import schema_grammar

from .conftest import QUESTION, Json, Served, started

ASK: Json = {"role": "user", "content": QUESTION}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "string"}}}
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def test_others_are_answered_while_a_request_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema that takes long is read beside the event loop."""
    began, goes_on = threading.Event(), threading.Event()

    def slow(schema: Any) -> str:
        began.set()
        assert goes_on.wait(30)
        return schema_grammar(schema)

    monkeypatch.setattr(parsing, "schema_grammar", slow)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(served.chat, [ASK], max_tokens=4, json_schema=SCHEMA)
        assert began.wait(30)
        try:
            assert served.http.get("/health").json() == {"status": "ok"}
            assert served.ask()["choices"]
        finally:
            goes_on.set()
        assert waiting.result()["choices"]


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"grammar": 'root ::= "a"'},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
    ids=["schema", "object", "format", "grammar", "call"],
)
def test_forms_that_are_taken_from_nobody_are_not_read(form: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --no-forms."""
    for name in ("schema_grammar", "gbnf_grammar"):
        monkeypatch.setattr(parsing, name, lambda *_: pytest.fail("it was read"))
    with pytest.raises(parsing.Refused) as caught:
        parse_chat({"messages": [ASK], **form}, forms=False)
    assert caught.value.status == 400 and caught.value.code == "no_forms"


def test_forms_are_off_at_every_endpoint(library: Path) -> None:
    with started(library, options=Options(forms=False)) as served:
        for path, given in (
            ("/v1/chat/completions", {"messages": [ASK]}),
            ("/v1/completions", {"prompt": QUESTION}),
            ("/v1/notes/explain", {"messages": [ASK]}),
        ):
            reply = served.http.post(path, json={**given, "grammar": 'root ::= "a"'})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_forms")


@pytest.mark.parametrize(
    ("path", "given", "says"),
    [
        ("/v1/chat/completions", {"messages": [USER, ANSWER] * 2100 + [USER]}, "4,201 messages"),
        ("/v1/chat/completions", {"messages": [USER] * 5000}, "5,000 messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]},
            "5,000 parts",
        ),
        (
            "/v1/chat/completions",
            {"messages": [ASK, {"role": "tool", "content": [{"type": "text", "text": ""}] * 5000}]},
            "a text of 10,016 characters",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{**ASK, "content": "the return " * 9000}]},
            "a text of 98,999 characters",
        ),
        ("/v1/chat/completions", {"messages": [ASK], "notes": {"errata": {"date": "1" * 40_000}}}, "a text of 40,"),
        ("/v1/chat/completions", {"messages": [ASK], "notes": {"errata": ["a=" + "1" * 40_000]}}, "a text of 40,"),
        ("/v1/notes/explain", {"messages": [USER] * 5000}, "5,000 messages"),
        ("/v1/chat/completions", {"messages": [ASK], "tools": [{}] * 5000}, "5,000 tools"),
        ("/v1/notes/heat", {"skill": "returns", "field": "date", "choices": ["a", "~" * 20_000]}, "a text of 20,000"),
        ("/v1/completions", {"prompt": "the return " * 9000}, "a text of 81,000 characters"),
        ("/v1/completions", {"prompt": ["a", "the return " * 9000]}, "a text of 81,000 characters"),
        ("/v1/completions", {"prompt": [5] * 5000}, "5,000 tokens"),
        ("/v1/completions", {"prompt": [[5], [5] * 5000]}, "5,000 tokens"),
        ("/tokenize", {"content": "the return " * 9000}, "a text of 99,000 characters"),
        ("/v1/notes/compile", {"name": "big", "text": "the return " * 9000}, "a text of 81,000 characters"),
        ("/v1/notes/heat", {"skill": "returns", "field": "date", "question": "why? " * 20_000}, "a text of 100,000"),
    ],
)
def test_what_no_context_holds(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, given: Json, says: str
) -> None:
    """Refused with the limit, before the thread that has the context hears of it."""
    for name in ("arrange", "turn_of"):
        monkeypatch.setattr(scheduler, name, lambda *_: pytest.fail("it was arranged"))
    reply = served.http.post(path, json=given)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert error["message"].startswith(says) and "more than the 4,096 tokens of a context" in error["message"]
    assert error["param"] == {"/tokenize": "content", "/v1/completions": "prompt"}.get(path, error["param"])


def test_the_bound_is_that_of_the_context(library: Path) -> None:
    """Of a given size, which a longer prompt does not fit however much the model was trained for."""
    with started(library, context=ContextOptions(n_ctx=512, n_threads=1), fixed_size=True) as served:
        error = served.chat([USER] * 600, 400)
        assert error["message"] == "600 messages: more than the 512 tokens of a context"


def test_what_may_fit_is_let_through(served: Served) -> None:
    """A text has never fewer tokens than is said, whatever it is made of."""
    model, letters, draw = served.scheduler.workspace.model, Letters(), random.Random(3)
    served.at_context(lambda: list(letters.learning(model)))
    words = [piece.decode() for token in range(model.n_vocab) if (piece := model.token_bytes(token)).isascii()]
    longest = sorted(words, key=len)[-20:]
    signs = [chr(draw.randrange(32, 0x3000)) for _ in range(99)]
    texts = [
        "",
        " " * 500,
        "日本語" * 50,
        "\n\n" * 99,
        *("".join(draw.choices(pool, k=200)) for pool in (words, longest, signs)),
    ]
    for text in texts:
        count = served.at_context(lambda text=text: len(model.tokenize(text)))
        assert letters.least([text]) <= count
    assert letters.least([" returned" * 400]) > 200, "else it bounds nothing"


def test_blanks_do_not_count(served: Served) -> None:
    """They come to nothing in a prompt."""
    blank: Any = {"type": "text", "text": " \n"}
    whole = served.chat([ASK], max_tokens=1)["usage"]["prompt_tokens"]
    for messages in (
        [{**ASK, "content": " " * 100_000 + QUESTION}],
        [{"role": "system", "content": ""}] * 5000 + [ASK],
        [{**ASK, "content": [blank] * 5000 + [{"type": "text", "text": QUESTION}]}],
    ):
        assert served.chat(messages, max_tokens=1)["usage"]["prompt_tokens"] == whole


def test_parts_of_a_message() -> None:
    """Several system messages at the head are one, and an answer's parts are one text."""

    def text(words: str) -> Json:
        return {"type": "text", "text": words}

    head = [{"role": "system", "content": "A."}, {"role": "system", "content": [text(""), text("B.")]}, ASK]
    one = [{"role": "system", "content": [text("A."), text("B.")]}, ASK]
    assert parse_chat({"messages": head}).messages == parse_chat({"messages": one}).messages
    answer = {"role": "assistant", "content": [text("a"), text("b")]}
    message, _ = parse_chat({"messages": [answer, ASK]}).messages
    assert [part.text for part in message.parts if isinstance(part, TextPart)] == ["ab"]


def test_nothing_is_collected_while_json_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all is as it was afterwards, also of what is no JSON."""
    seen: list[bool] = []
    loads = reading.json.loads
    monkeypatch.setattr(
        reading.json, "loads", lambda *given, **how: seen.append(gc.isenabled()) or loads(*given, **how)
    )
    assert read_json(b"[[], {}]") == [[], {}]
    with pytest.raises(parsing.Refused, match="the body is not JSON"):
        read_json(b"[")
    assert seen == [False, False] and gc.isenabled()


@pytest.mark.parametrize("given", [{"messages": 3}, {"messages": [3, {"content": 5}]}, {"notes": 4}, [], "x"])
def test_what_is_no_request_is_for_others_to_refuse(given: Any) -> None:
    """The bounds look at what is there, and say nothing of its form."""
    assert of_chat(given)[0].texts == ()

"""Tests answers of the requested length, else of the rest of the context, also the first one of a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.serve import prepare
from notes_cli.serve.prepare import Options

from .conftest import QUESTION, Json, Served, started
from .test_robust import wait

TRAINED, FIRST, TURN = 1024, 512, 128  # tokens: the model's context, the server's first one, a turn's at first
WAYS: list[Json] = [{}, {"ask": True}, {"session": "s"}]
PROMPT = 360  # tokens; with 300 more they exceed the first context
WORDS = "x" * (PROMPT - 100)  # the tokenizer has no merges: one token each
LONG = {"messages": [{"role": "user", "content": WORDS}]}


@pytest.fixture
def fresh(make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server without earlier answers, whose context grows, and whose answers never end by themselves."""
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    monkeypatch.setattr(prepare, "TURN", TURN)
    context = ContextOptions(n_ctx=FIRST, n_threads=1)
    with started(tmp_path, context=context, model=make_model("llama", trained=TRAINED)) as found:
        yield found


def usage(served: Served, path: str, given: Json) -> tuple[list[str], int, int]:
    """Return the finish reasons, the tokens of the prompt, and those of all answers."""
    reply = served.http.post(path, json={"temperature": 1, "seed": 3, **given})
    found = reply.json()
    assert reply.status_code == 200, found
    reasons = [one["finish_reason"] for one in found["choices"]]
    return reasons, found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_completion_in_a_context_that_grows(fresh: Served, count: int) -> None:
    given = {"prompt": [65] * PROMPT, "max_tokens": 300, "n": count}
    assert usage(fresh, "/v1/completions", given) == (["length"] * count, PROMPT, 300 * count)
    assert fresh.at_context(fresh.scheduler.gauges)["cells_promised"] == 0


@pytest.mark.parametrize("notes", WAYS, ids=["chat", "ask", "session"])
def test_a_chat_in_a_context_that_grows(fresh: Served, notes: Json) -> None:
    reasons, prompt, written = usage(fresh, "/v1/chat/completions", {**LONG, "notes": notes, "max_tokens": 300})
    assert (reasons, written) == (["length"], 300) and prompt + 300 > FIRST > prompt + 128


def test_a_chain_of_thought_in_a_context_that_grows(fresh: Served) -> None:
    """It gets all its tokens, and so does the answer."""
    given = {**LONG, "reasoning_effort": "low", "max_think": 200, "max_tokens": 150, "logit_bias": {"77": 100}}
    reply = fresh.chat(**given, temperature=0)
    written = reply["usage"]
    assert written["completion_tokens_details"]["reasoning_tokens"] >= 200
    assert written["completion_tokens"] == written["completion_tokens_details"]["reasoning_tokens"] + 150


@pytest.mark.parametrize("notes", WAYS, ids=["chat", "ask", "session"])
def test_an_answer_ends_with_the_context(fresh: Served, notes: Json) -> None:
    """Without a requested length: the model's context, however small the server's is at first."""
    given = {"messages": [{"role": "user", "content": "x" * 600}], "notes": notes}
    reasons, prompt, written = usage(fresh, "/v1/chat/completions", given)
    assert (reasons, prompt + written) == (["length"], TRAINED) and written > TURN
    assert fresh.at_context(fresh.scheduler.gauges)["cells_promised"] == 0


def test_a_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It cuts answers, but for a question of `notes ask`, which would answer it whole: that is refused."""
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    with started(tmp_path, Options(max_tokens=50)) as served:
        given: Json = {"messages": [{"role": "user", "content": "Why?"}]}
        for notes in ({}, {"session": "s"}):
            for asked in ({}, {"max_tokens": 2000}, {"max_tokens": 30}):
                reasons, _, written = usage(served, "/v1/chat/completions", {**given, "notes": notes, **asked})
                assert (reasons, written) == (["length"], min(50, asked.get("max_tokens", 50)))
        error = served.chat(given["messages"], 400, notes={"ask": True}, max_tokens=2000)
        assert error["param"] == "max_tokens" and "50 tokens" in error["message"]


def test_models_have_the_length_of_their_context(fresh: Served, make_model: Callable[..., Path], library: Path) -> None:
    """Of the model where the server's grows, else the given one; a state has none."""
    for path in ("/v1/models", "/v1/models/tiny"):
        found = fresh.http.get(path).json()
        for one in found.get("data", [found]):
            assert one["max_model_len"] == one["meta"]["n_ctx"] == one["meta"]["n_ctx_train"] == TRAINED
    with started(library, context=ContextOptions(n_ctx=512, n_threads=1), fixed_size=True) as served:
        every = served.http.get("/v1/models").json()["data"]
        assert [(one["max_model_len"], one["meta"]["n_ctx"]) for one in every] == [(512, 512)] * len(every)
        assert {one["meta"]["n_ctx_train"] for one in every} == {4096}
    with started(fresh.home, model=make_model("mamba")) as served:
        (found,) = served.http.get("/v1/models").json()["data"]
        assert "max_model_len" not in found and "n_ctx" not in found["meta"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prompt_that_is_too_long(make_model: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    with started(tmp_path, model=make_model(kind, trained=1000)) as served:
        for notes in WAYS:
            error = served.chat([{"role": "user", "content": "x" * 990}], 400, notes=notes)
            assert "maximum context length is 1000 tokens" in error["message"]
            assert "this request needs 10" in error["message"] and error["code"] == "context_length_exceeded"


# Answers that fill a fixed context: each ends there, none fails, and none is lost.

CELLS = 512


@pytest.fixture(scope="module")
def larger(library: Path) -> Iterator[Served]:
    with started(library, context=ContextOptions(n_ctx=CELLS, n_threads=1), fixed_size=True) as found:
        yield found


def think(served: Served, count: int, question: str = QUESTION, status: int = 200) -> Json:
    """Generate answers after reasoning that repeats a token and never ends by itself."""
    endless = {"reasoning_effort": "low", "max_think": 500, "logit_bias": {"77": 100}}
    asked = [{"role": "user", "content": question}]
    return served.chat(asked, status, notes={"splice": ["returns"]}, n=count, **endless)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_several_chains_of_thought_fill_the_context(larger: Served, count: int) -> None:
    """Each has the cells reserved for its end, and an answer."""
    found = think(larger, count)
    assert [one["finish_reason"] for one in found["choices"]] == ["length"] * count
    assert all(one["message"]["reasoning_content"] and one["message"]["content"] for one in found["choices"])
    assert CELLS - count < found["usage"]["total_tokens"] <= CELLS
    assert larger.at_context(larger.scheduler.gauges)["cells_promised"] == 0


def test_chains_of_thought_for_which_there_is_no_room(larger: Served) -> None:
    assert think(larger, 16, status=400)["code"] == "context_length_exceeded"


def test_chains_of_thought_beside_others(library: Path) -> None:
    """Preempted ones have the cells for their ends after they are resumed, too."""
    context, together = ContextOptions(n_ctx=CELLS * 3 // 2, n_threads=1), threading.Event()
    with started(library, context=context, fixed_size=True) as served, ThreadPoolExecutor() as pool:
        served.scheduler.call(together.wait)
        asked = [pool.submit(think, served, 2, f"{number}? {QUESTION}") for number in range(2)]
        try:
            wait(lambda: served.scheduler.load == 2)
        finally:
            together.set()
        choices = [choice for one in asked for choice in one.result()["choices"]]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 4
        assert served.scheduler.metrics.preempted

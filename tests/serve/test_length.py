"""Tests answers of the requested length, else of the rest of the context, also the first one of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.runtime.workspace import DEFAULT_CONTEXT
from notes_cli.serve.prepare import TURN
from notes_cli.serve.scheduler import Limits

from .conftest import QUESTION, Json, Served, started

TRAINED = 8192
WAYS: list[Json] = [{}, {"ask": True}, {"session": "s"}]
PROMPT = 3832  # tokens; with 600 more they exceed a server's first context
WORDS = "x" * (PROMPT - 100)  # the tokenizer has no merges: one token each
LONG = {"messages": [{"role": "user", "content": WORDS}]}


@pytest.fixture
def fresh(make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server without earlier answers, whose context grows, and whose answers never end by themselves."""
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    context = ContextOptions(n_ctx=DEFAULT_CONTEXT, n_threads=1)
    with started(tmp_path, context=context, model=make_model("llama")) as found:
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
    given = {"prompt": [65] * PROMPT, "max_tokens": 600, "n": count}
    assert usage(fresh, "/v1/completions", given) == (["length"] * count, PROMPT, 600 * count)
    assert fresh.at_context(fresh.scheduler.gauges)["cells_promised"] == 0


@pytest.mark.parametrize("notes", WAYS, ids=["chat", "ask", "session"])
def test_a_chat_in_a_context_that_grows(fresh: Served, notes: Json) -> None:
    reasons, prompt, written = usage(fresh, "/v1/chat/completions", {**LONG, "notes": notes, "max_tokens": 600})
    assert (reasons, written) == (["length"], 600) and prompt + 600 > DEFAULT_CONTEXT > prompt + 128


def test_a_chain_of_thought_in_a_context_that_grows(fresh: Served) -> None:
    """It gets all its tokens, and so does the answer."""
    given = {**LONG, "reasoning_effort": "low", "max_think": 400, "max_tokens": 300, "logit_bias": {"77": 100}}
    reply = fresh.chat(**given, temperature=0)
    written = reply["usage"]
    assert written["completion_tokens_details"]["reasoning_tokens"] >= 400
    assert written["completion_tokens"] == written["completion_tokens_details"]["reasoning_tokens"] + 300


@pytest.mark.parametrize("notes", WAYS, ids=["chat", "ask", "session"])
def test_an_answer_ends_with_the_context(fresh: Served, notes: Json) -> None:
    """Without a requested length: the model's context, however small the server's is at first."""
    given = {"messages": [{"role": "user", "content": "x" * 5900}], "notes": notes}
    reasons, prompt, written = usage(fresh, "/v1/chat/completions", given)
    assert (reasons, prompt + written) == (["length"], TRAINED) and written > TURN
    assert fresh.at_context(fresh.scheduler.gauges)["cells_promised"] == 0


@pytest.mark.parametrize("notes", [{}, {"session": "s"}], ids=["chat", "session"])
@pytest.mark.parametrize("asked", [{}, {"max_tokens": 2000}, {"max_tokens": 30}], ids=str)
def test_a_bound(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notes: Json, asked: Json) -> None:
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    with started(tmp_path, Limits(tokens=50)) as served:
        given = {"messages": [{"role": "user", "content": "Why?"}], "notes": notes, **asked}
        reasons, _, written = usage(served, "/v1/chat/completions", given)
        assert (reasons, written) == (["length"], min(50, asked.get("max_tokens", 50)))


def test_a_question_of_notes_ask_is_not_cut_by_the_bound(library: Path, tmp_path: Path) -> None:
    """`notes ask` would answer it whole, so the server refuses it."""
    with started(tmp_path, Limits(tokens=50)) as served:
        error = served.chat([{"role": "user", "content": "Why?"}], 400, notes={"ask": True}, max_tokens=2000)
        assert error["param"] == "max_tokens" and "50 tokens" in error["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny"])
def test_the_models_have_the_length_of_their_context(fresh: Served, path: str) -> None:
    found = fresh.http.get(path).json()
    for one in found.get("data", [found]):
        assert one["max_model_len"] == one["meta"]["n_ctx"] == one["meta"]["n_ctx_train"] == TRAINED


def test_a_context_of_a_given_size_is_the_length(library: Path) -> None:
    with started(library, context=ContextOptions(n_ctx=512, n_threads=1), fixed_size=True) as served:
        every = served.http.get("/v1/models").json()["data"]
        assert [(one["max_model_len"], one["meta"]["n_ctx"]) for one in every] == [(512, 512)] * len(every)
        assert {one["meta"]["n_ctx_train"] for one in every} == {4096}


def test_nothing_bounds_a_state(make_model: Callable[..., Path], tmp_path: Path) -> None:
    with started(tmp_path, model=make_model("mamba")) as served:
        (found,) = served.http.get("/v1/models").json()["data"]
        assert "max_model_len" not in found and "n_ctx" not in found["meta"]


@pytest.mark.parametrize("notes", WAYS, ids=["chat", "ask", "session"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prompt_that_is_too_long(make_model: Callable[..., Path], tmp_path: Path, kind: str, notes: Json) -> None:
    with started(tmp_path, model=make_model(kind, trained=1000)) as served:
        error = served.chat([{"role": "user", "content": "x" * 990}], 400, notes=notes)
        assert error["message"].startswith("This model's maximum context length is 1000 tokens. ")
        assert "this request needs 10" in error["message"] and error["code"] == "context_length_exceeded"


# Answers that fill a fixed context: each ends there, none fails, and none is lost.

CELLS = 512


@pytest.fixture(scope="module")
def larger(library: Path) -> Iterator[Served]:
    with started(library, context=ContextOptions(n_ctx=2 * CELLS, n_threads=1), fixed_size=True) as found:
        yield found


def think(served: Served, count: int, question: str = QUESTION, status: int = 200) -> Json:
    """Generate answers after reasoning that repeats a token and never ends by itself."""
    endless = {"reasoning_effort": "low", "max_think": 900, "logit_bias": {"77": 100}}
    return served.chat(
        [{"role": "user", "content": question}], status, notes={"splice": ["returns"]}, n=count, **endless
    )


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_several_chains_of_thought_fill_the_context(larger: Served, count: int) -> None:
    """Each has the cells reserved for its end, and an answer."""
    found = think(larger, count)
    assert [one["finish_reason"] for one in found["choices"]] == ["length"] * count
    assert all(one["message"]["reasoning_content"] and one["message"]["content"] for one in found["choices"])
    assert 2 * CELLS - count < found["usage"]["total_tokens"] <= 2 * CELLS
    assert larger.at_context(larger.scheduler.gauges)["cells_promised"] == 0


def test_chains_of_thought_for_which_there_is_no_room(larger: Served) -> None:
    assert think(larger, 16, status=400)["code"] == "context_length_exceeded"


def test_chains_of_thought_beside_others(larger: Served) -> None:
    """Preempted ones have the cells for their ends after they are resumed, too."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda count: think(larger, count, f"{count}? {QUESTION}"), (4, 1, 2, 1, 3, 2)))
    assert [len(one["choices"]) for one in found] == [4, 1, 2, 1, 3, 2]
    assert {choice["finish_reason"] for one in found for choice in one["choices"]} == {"length"}

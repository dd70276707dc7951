"""Tests answers that fill a fixed context: each ends there, none fails, and none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions

from .conftest import QUESTION, Json, Served, started

CELLS = 512
ENDLESS = {"max_tokens": 1000, "temperature": 1, "seed": 3}


@pytest.fixture
def small(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with a small context, whose answers never end by themselves."""
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    with started(library, context=ContextOptions(n_ctx=CELLS, n_threads=1), fixed_size=True) as found:
        yield found


def ask(served: Served, count: int, prompt: Any = QUESTION) -> tuple[int, list[str], int]:
    """Return the status, the finish reason of each answer, and the tokens of the prompt and of all answers."""
    reply = served.http.post("/v1/completions", json={"prompt": prompt, "n": count, **ENDLESS})
    found = reply.json()
    assert reply.status_code == 200, found
    return reply.status_code, [one["finish_reason"] for one in found["choices"]], found["usage"]["total_tokens"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 16])
def test_several_answers_fill_the_context(small: Served, count: int) -> None:
    """Each gets its part."""
    status, reasons, tokens = ask(small, count)
    assert (status, reasons) == (200, ["length"] * count)
    assert CELLS - count < tokens <= CELLS
    assert small.at_context(small.scheduler.gauges)["cells_promised"] == 0


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
    """They are refused before prefill."""
    assert think(larger, 16, status=400)["code"] == "context_length_exceeded"


def test_chains_of_thought_beside_others(larger: Served) -> None:
    """Preempted ones have the cells for their ends after they are resumed, too."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda count: think(larger, count, f"{count}? {QUESTION}"), (4, 1, 2, 1, 3, 2)))
    assert [len(one["choices"]) for one in found] == [4, 1, 2, 1, 3, 2]
    assert {choice["finish_reason"] for one in found for choice in one["choices"]} == {"length"}


def test_others_beside_them(small: Served) -> None:
    """They wait for each other, and all finish."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda count: ask(small, count, f"{count}? {QUESTION}"), (4, 1, 1, 2, 1, 3)))
    assert [reasons for _, reasons, _ in found] == [["length"] * count for count in (4, 1, 1, 2, 1, 3)]

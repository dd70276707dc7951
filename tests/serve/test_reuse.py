"""Tests `reuse` over HTTP: parts of compiled texts and of earlier prompts, by the mode and salt of a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notes_cli.serve.prepare import Options

from .conftest import QUESTION, Json, Served, reply_text, started

RULES = "\n\n".join(
    f"Rule {number}: every {word} must be brought back within {13 * number} days, and not later than that."
    for number, word in enumerate(("chair", "table", "lamp", "shelf", "carpet", "mirror", "clock"), 1)
)
NEAR = "after another text there"


@pytest.fixture(scope="module")
def served(library: Path) -> Iterator[Served]:
    """A server with a compiled text `rules`."""
    with started(library) as found:
        reply = found.http.post("/v1/notes/compile", json={"name": "rules", "text": RULES})
        assert reply.status_code == 200, reply.text
        yield found
        found.http.delete("/v1/notes/rules")


@pytest.fixture(autouse=True)
def empty(served: Served) -> None:
    served.at_context(served.scheduler.prefixes.close)


def ask(served: Served, system: str, reuse: str | None = None, **more: Any) -> Json:
    """Return the reply, with `near` tokens and the names that they are from."""
    notes = {"explain": True, **({"reuse": reuse} if reuse else {}), **more.pop("notes", {})}
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    reply = served.chat(messages, notes=notes, max_tokens=2, **more)
    near = [piece for piece in reply["notes"]["pieces"] if piece["reason"] == "near"]
    sources = {piece["why"].split(",")[0].removeprefix("reused from ") for piece in near}
    return {**reply, "near": sum(piece["tokens"] for piece in near), "sources": sources}


def test_parts_of_compiled_texts_by_default(served: Served) -> None:
    """A line directly above it, or a changed word near its end: K/V up to there is reused, and the reply has the pieces
    and sums."""
    for system, share in ((f"It is Friday.\n{RULES}", 0.7), (RULES.replace("mirror", "mirrors"), 0.5)):
        reply = ask(served, system)
        assert reply["sources"] == {"rules"} and reply["near"] > share * reply["notes"]["counts"]["total"]
        details = reply["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= reply["near"]
        assert details["cached_tokens"] + details["notes"]["decoded_tokens"] == reply["usage"]["prompt_tokens"]
        assert any(NEAR in piece["why"] for piece in reply["notes"]["pieces"])
        turns = [{"role": "system", "content": f"Now. {system}"}, {"role": "user", "content": QUESTION}]
        planned = served.http.post("/v1/notes/explain", json={"messages": turns}).json()
        assert any(piece["reason"] == "near" for piece in planned["pieces"])


def test_exact_requests_continue_no_prompt_with_runs(served: Served) -> None:
    changed = f"It is Friday.\n{RULES}"
    assert ask(served, changed)["near"] > 0
    reply = ask(served, changed + " ", "exact")
    live = sum(piece["tokens"] for piece in reply["notes"]["pieces"] if piece["how"] == "live")
    assert live < reply["notes"]["counts"]["total"] / 4 and not reply["near"]
    served.at_context(lambda: served.scheduler.prefixes.drop(served.scheduler.prefixes.entries[-1]))
    again = ask(served, changed)
    assert any("of them were computed after another text" in piece["why"] for piece in again["notes"]["pieces"])


def test_exact_splices_nothing_after_another_text(served: Served) -> None:
    """`reuse: exact` is `exact`, for skills by name, too."""
    for notes in ({"reuse": "exact"}, {"exact": True}):
        reply = ask(served, "Be kind.", notes={**notes, "splice": ["rules"]})
        assert not reply["near"] and reply["notes"]["counts"]["spliced"] == 0


def likely(served: Served, skills: list[str], **notes: Any) -> tuple[list[float], Json]:
    """Return the log-probabilities of the answer's tokens and their alternatives, and the reply."""
    given = {"splice": skills, "explain": True, **notes}
    turns = [{"role": "user", "content": QUESTION}]
    reply = served.chat(turns, notes=given, logprobs=True, top_logprobs=5, max_tokens=4)
    content = reply["choices"][0]["logprobs"]["content"]
    return [rival["logprob"] for one in content for rival in one["top_logprobs"]], reply


def test_an_exact_answer_is_that_of_a_prefill(served: Served) -> None:
    """Also after inexact requests, where a moved splice is further off; a decoded skill has the reason."""
    worst = 0.0
    orders = (["returns"], ["returns", "support"], ["support", "returns"], ["returns", "support"], ["returns"])
    for number, skills in enumerate(orders):
        wanted, _ = likely(served, skills, recompute=True, cache_salt=f"prefill {number}")
        spliced, plain = likely(served, skills)  # leaves a prefix that an exact request may not reuse
        exact, reply = likely(served, skills, exact=True)
        assert max(abs(a - b) for a, b in zip(exact, wanted, strict=True)) < 1e-3
        assert len(skills) > 1 or reply_text(plain) == reply_text(reply)
        worst = max(worst, *(abs(a - b) for a, b in zip(spliced, wanted, strict=True)))
        parts = [one for one in reply["notes"]["pieces"] if one["kind"] == "splice"]
        assert [one["name"] for one in parts] == skills
        assert all(one["how"] in ("spliced", "live") for one in parts[:1])
        for one in parts[1:]:
            assert one["how"] == "live" or (one["how"] == "decoded" and "exact rows were asked for" in one["why"])
    assert worst > 1e-3  # else no skill was moved


def test_with_a_salt_there_is_nothing_of_the_library(served: Served) -> None:
    assert not ask(served, f"It is Friday.\n{RULES}", notes={"cache_salt": "mine"})["near"]
    assert not ask(served, f"It is early.\n{RULES}", notes={"match": False})["near"]


def test_the_servers_mode(library: Path) -> None:
    with started(library, Options(reuse="exact")) as served:
        assert not ask(served, f"It is Friday.\n{RULES}")["near"]
        assert ask(served, f"It is Monday.\n{RULES}", "compiled")["near"]

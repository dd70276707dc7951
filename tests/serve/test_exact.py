"""Tests `exact` over HTTP: K/V of skills equals that of a prefill, whatever is in the prefix cache."""

from __future__ import annotations

from typing import Any

from .conftest import QUESTION, Served, told

ORDERS = (["returns"], ["returns", "support"], ["support", "returns"], ["returns", "support"], ["returns"])


def likely(served: Served, skills: list[str], **notes: Any) -> tuple[list[float], dict[str, Any]]:
    """Return the log-probabilities of the answer's tokens and their alternatives, and the reply."""
    given = {"splice": skills, "explain": True, **notes}
    turns = [{"role": "user", "content": QUESTION}]
    reply = served.chat(turns, notes=given, logprobs=True, top_logprobs=5, max_tokens=4)
    content = reply["choices"][0]["logprobs"]["content"]
    return [rival["logprob"] for one in content for rival in one["top_logprobs"]], reply


def test_an_exact_answer_is_that_of_a_prefill(served: Served) -> None:
    """Within a thousandth, where a moved splice is further off, also after inexact requests; the explanation gives the
    reason for a decoded skill."""
    worst = 0.0
    for number, skills in enumerate(ORDERS):
        wanted, _ = likely(served, skills, recompute=True, cache_salt=f"prefill {number}")
        spliced, plain = likely(served, skills)  # leaves a prefix that an exact request may not reuse
        exact, reply = likely(served, skills, exact=True)
        assert max(abs(a - b) for a, b in zip(exact, wanted, strict=True)) < 1e-3
        assert len(skills) > 1 or told(plain) == told(reply)
        worst = max(worst, *(abs(a - b) for a, b in zip(spliced, wanted, strict=True)))
        parts = [one for one in reply["notes"]["pieces"] if one["kind"] == "splice"]
        assert [one["name"] for one in parts] == skills
        assert all(one["how"] in ("spliced", "live") for one in parts[:1])
        for one in parts[1:]:
            assert one["how"] == "live" or (one["how"] == "decoded" and "exact rows were asked for" in one["why"])
    assert worst > 1e-3  # else no skill was moved


def test_an_exact_conversation_goes_on(served: Served) -> None:
    """The next turn reuses its own prefix, decodes no skill again, and answers as a prefill does."""
    given = {"splice": ["support", "returns"], "exact": True, "explain": True}
    turns = [{"role": "user", "content": "What is the tier?"}]
    first = served.chat(turns, notes=given)
    turns += [{"role": "assistant", "content": told(first)}, {"role": "user", "content": QUESTION}]
    second = served.chat(turns, notes=given)
    assert all(one["how"] == "live" for one in second["notes"]["pieces"] if one["kind"] == "splice")
    full = served.chat(turns, notes={**given, "recompute": True, "cache_salt": "prefill"})
    assert told(full) == told(second)


def test_a_session_has_it_with_its_first_turn(served: Served) -> None:
    """As on the command line: its K/V is computed once."""
    ask = [{"role": "user", "content": QUESTION}]
    first = served.chat(
        ask, notes={"session": "exact", "splice": ["support", "returns"], "exact": True, "explain": True}
    )
    decoded = [one["name"] for one in first["notes"]["pieces"] if one["kind"] == "splice" and one["how"] == "decoded"]
    assert decoded == ["returns"]
    refused = served.chat(ask, 400, notes={"session": "exact", "exact": True})
    assert "has begun" in refused["message"] and "exact" in refused["message"]

"""Tests other kinds of models, with windows, recurrent layers, learned positions: together they answer as alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from notes_cli.engine.options import ContextOptions
from notes_cli.serve.jobs import Limits

from .conftest import Json, started, told
from .test_together import at_once

TEXT = "date: 2026-06-01\ntier: gold\n\nReturns before 2026-06-15 are accepted, and later ones are refused by us."


@pytest.mark.parametrize("kind", ["gemma3", "lfm2", "mamba", "gpt2"])
def test_served_as_alone(make_model: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """Skills are restored where they cannot be moved, a recurrent state is reused only whole, and a conversation
    continues."""
    context = ContextOptions(n_ctx=1024, n_threads=1, type_k="f32", type_v="f32")
    with started(tmp_path, Limits(parallel=3), context=context, model=make_model(kind)) as served:
        reply = served.http.post("/v1/notes/compile", json={"name": "rules", "text": TEXT})
        assert '"skill"' in reply.text, reply.text
        every: list[Json] = [
            {
                "messages": [{"role": "user", "content": f"Why {number}?"}],
                "max_tokens": 6,
                "notes": {"splice": ["rules"], "explain": True},
            }
            for number in range(6)
        ]
        salted = [{**one, "notes": {**one["notes"], "cache_salt": str(n)}} for n, one in enumerate(every)]
        alone = [told(served.http.post("/v1/chat/completions", json=one).json()) for one in salted]
        replies = [one.json() for one in at_once(served.url, every)]
        assert [told(one) for one in replies] == alone
        hows = {piece["how"] for one in replies for piece in one["notes"]["pieces"] if piece["kind"] == "splice"}
        assert "decoded" not in hows, "its rows were there"
        talk = [*every[0]["messages"], {"role": "assistant", "content": alone[0]}, *every[1]["messages"]]
        goes_on = {**every[0], "messages": talk}
        first = served.http.post("/v1/chat/completions", json=goes_on).json()
        fresh = {**goes_on, "notes": {"splice": ["rules"], "cache_salt": "fresh"}}
        assert told(first) == told(served.http.post("/v1/chat/completions", json=fresh).json())
        assert served.scheduler.load == 0 and not served.scheduler.budget.reservations


@pytest.mark.parametrize("kind", ["gemma3", "lfm2", "mamba"])
def test_decisions_share_their_input(make_model: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """Of windows and recurrent states, too: each answer is that of its question alone."""
    context = ContextOptions(n_ctx=2048, n_threads=1, type_k="f32", type_v="f32")
    with started(tmp_path, context=context, model=make_model(kind)) as served:
        options = [{"value": "accepted"}, {"value": "refused"}]
        questions = [
            {"type": "choice", "instructions": f"Is it {word}?", "choices": options} for word in ("late", "gold", "it")
        ]
        body = {"input": TEXT * 3, "questions": questions}
        alone = [served.http.post("/v1/decisions", json={**body, "questions": [one]}).json() for one in questions]
        found = served.http.post("/v1/decisions", json=body).json()
        for one, answer in zip(alone, found["answers"], strict=True):
            [expected], values = one["answers"], [pair["probability"] for pair in answer["probabilities"]]
            assert values == pytest.approx([pair["probability"] for pair in expected["probabilities"]], abs=1e-4)
        decoded = found["usage"]["input_tokens_details"]["notes"]["decoded_tokens"]
        assert decoded < 1.5 * alone[0]["usage"]["input_tokens"], "the input was read once"


def test_a_state_cannot_take_back_a_call(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """So the tools that a model may call are all or none, unless a call is required."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "listen")]
    with started(tmp_path, model=make_model("mamba")) as served:
        for mode, status in (("auto", 400), ("required", 200)):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools[:1]}}
            asked = [{"role": "user", "content": "Hm?"}]
            reply = served.chat(asked, status, tools=tools, tool_choice=choice, max_tokens=40)
            assert status == 200 or (reply["param"] == "tool_choice" and "mode required" in reply["message"])

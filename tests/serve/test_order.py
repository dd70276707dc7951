"""Tests conversations as web clients send them: a greeting first, system messages later on."""

from __future__ import annotations

from typing import Any

import pytest
from samples import SAMPLES

from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.prepare import _question

from .conftest import QUESTION, Served, pieces, told

HELLO = {"role": "assistant", "content": "Hello! How can I help?"}
ASK = {"role": "user", "content": QUESTION}


def shown(messages: list[dict[str, str]]) -> str:
    """Render messages as the shipped model's template does."""
    talk = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    return f"{talk}<|im_start|>assistant\n"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_each_message_is_in_its_place(served: Served, role: str) -> None:
    """The prompt has as many tokens as the rendered template, and is answered."""
    late = {"role": role, "content": "Answer in one word."}
    for talk in ([HELLO, ASK], [ASK, late], [ASK, HELLO, late, ASK], [ASK, HELLO, HELLO, ASK], [ASK, HELLO, late]):
        reply = served.chat(talk, max_tokens=1)
        text = shown([{**one, "role": one["role"].replace("developer", "system")} for one in talk])
        tokens = served.at_context(lambda text=text: served.scheduler.workspace.model.tokenize(text, special=True))
        assert reply["usage"]["prompt_tokens"] == len(tokens)


def test_a_skill_in_a_later_system_message(served: Served) -> None:
    """It is matched and spliced, corrected before the next question, and answered as when decoded."""
    policy = (SAMPLES / "returns" / "SKILL.md").read_text().split("---\n")[2].strip()
    talk: list[Any] = [HELLO, {"role": "user", "content": "Hello"}, HELLO, {"role": "system", "content": policy}, ASK]
    reply = served.chat(talk, notes={"explain": True})
    assert [kind for kind, how, _ in pieces(reply) if how == "spliced"] == ["splice"]
    assert told(reply) == told(served.chat(talk, notes={"recompute": True})) == "accepted"
    more = [*talk, {"role": "assistant", "content": told(reply)}, ASK]
    again = served.chat(more, notes={"explain": True, "errata": ["date=2026-07-01"]})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= reply["usage"]["prompt_tokens"]
    assert [kind for kind, *_ in pieces(again)][-2:] == ["erratum", "question"] and told(again) == "refused"


def test_a_turn_begins_with_a_system_message_in_the_place_of_a_question() -> None:
    """Global errata come before the last question, or before the message in its place."""
    late = {"role": "system", "content": "Go on."}
    for talk, number in (
        ([ASK, HELLO, late], 2),
        ([HELLO, ASK, late], 1),
        ([late, ASK], 1),
        ([ASK, HELLO, late, ASK], 3),
    ):
        assert _question(parse_chat({"messages": talk}).messages) == number

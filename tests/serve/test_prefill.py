"""Tests the continuation of a last message of the assistant, in chats and in the Messages API."""

from __future__ import annotations

from typing import Any

from .conftest import QUESTION, Json, Served, pieces, reply_text

THINK: Json = {"role": "user", "content": f"{QUESTION} Think first."}
NOTES: Json = {"splice": ["returns"], "errata": {"date": "2026-07-01"}}
LAST: Json = {"role": "assistant", "content": "The date"}


def answer(text: str) -> Json:
    return {"role": "assistant", "content": text}


def test_the_reply_is_the_rest_of_the_answer(served: Served) -> None:
    """With skills and corrections, whole and streamed, wherever the answer is cut; confirmed by vLLM's keys or not."""
    whole = reply_text(served.chat([THINK], notes=NOTES))
    assert whole == "The date is 2026-07-01. So the return is refused."
    for end, keys in (
        (len("The"), {}),
        (len("The date is"), {"add_generation_prompt": False}),
        (whole.index(" return"), {"continue_final_message": True, "add_generation_prompt": False}),
        (len(whole) - 1, {"continue_final_message": True}),
    ):
        begun = [THINK, answer(whole[:end])]
        reply = served.chat(begun, notes=NOTES, **keys)
        assert reply_text(reply) == whole[end:] and reply["choices"][0]["finish_reason"] == "stop"
        create: Any = served.client.chat.completions.create
        chunks = create(model="tiny", messages=begun, stream=True, extra_body={"notes": NOTES, **keys})
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[end:]


def test_a_prefilled_answer_is_an_answer_in_the_next_turn(served: Served) -> None:
    """Its tokens are reused, and errata are where they were."""
    begun, notes = "The date is 2026-07-01.", {**NOTES, "explain": True, "cache_salt": "own"}
    first = served.chat([THINK, answer(begun)], notes=notes)
    talk = [THINK, answer(begun + reply_text(first)), {"role": "user", "content": QUESTION}]
    second = served.chat(talk, notes=notes)
    live = sum(count for _, how, count in pieces(second) if how == "live")
    assert live >= first["usage"]["prompt_tokens"] and pieces(second)[0][1] == "live"
    errata = [[kind for kind, _, _ in pieces(one)].count("erratum") for one in (first, second)]
    assert errata[0] == errata[1]


def test_an_empty_one_begins_nothing(served: Served) -> None:
    whole = served.chat([THINK], notes=NOTES)
    for content in ("", None, []):
        reply = served.chat([THINK, {**LAST, "content": content}], notes=NOTES)
        assert reply_text(reply) == reply_text(whole)
        assert reply["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]

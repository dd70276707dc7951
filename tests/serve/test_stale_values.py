"""No answer comes from a value that has changed: prompts with old and new texts, beside `exact` ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import SAMPLES

from notes_cli.text.skill import load_skill

from .conftest import QUESTION, Json, Served, reply_text, started

OLD = load_skill(str(SAMPLES / "returns")).text
NEW = OLD.replace("2026-05-01", "2026-07-01").replace("tier: gold", "tier: basic").replace("120", "620")
HEADER = OLD[: OLD.index("- If")].strip()
QUESTIONS = (
    *(QUESTION, "What is the return?", "What is the shipping?", "Which shipping applies?"),
    *("What is the approval?", "Which approval applies?", "And the approval?"),
)
WEEK = "\n\n".join(
    f"# {day}\n\nOpening: 09:00\nClosing: 17:00\n\n- If the closing is 17:00 then the access is timed."
    for day in ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
)


@pytest.fixture(scope="module")
def served(library: Path) -> Iterator[Served]:
    """A server with the week compiled, too."""
    with started(library) as found:
        assert found.http.post("/v1/notes/compile", json={"name": "week", "text": WEEK}).status_code == 200
        yield found
        found.http.delete("/v1/notes/week")


@pytest.fixture(autouse=True)
def empty(served: Served) -> None:
    served.at_context(served.scheduler.prefixes.close)


def system(text: str) -> list[Json]:
    return [{"role": "system", "content": text}]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def tokens_reused(reply: Json) -> int:
    return sum(piece["tokens"] for piece in reply["notes"]["pieces"] if piece["reason"] == "near")


PROMPTS: dict[str, list[Json]] = {
    "its header is quoted above": system(f"It said before:\n\n{HEADER}\n\nToday it says:\n\n{NEW}"),
    "the old text is above": system(f"{OLD}\n\n{NEW}"),
    "the old text is in an earlier turn": [user(OLD), {"role": "assistant", "content": "Yes."}, user(NEW)],
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_compiled_text_with_another_value(served: Served, prompt: str) -> None:
    """The answers are those of a prefill, which the old text alone has otherwise."""
    answers: dict[str, str] = {}
    for question in QUESTIONS:
        *before, last = PROMPTS[prompt]
        messages = (
            [*PROMPTS[prompt], user(question)] if last["role"] == "system" else [*before, user(f"{NEW}\n\n{question}")]
        )
        found = served.chat(messages, max_tokens=2, notes={"explain": True})
        right = served.chat(messages, max_tokens=2, notes={"reuse": "exact", "cache_salt": "alone"})
        answers[question] = reply_text(right)
        assert reply_text(found) == answers[question], question
    old = served.chat([*system(OLD), user(QUESTION)], max_tokens=2)
    assert reply_text(old) == "accepted" and (prompt == "the old text is above" or answers[QUESTION] == "refused")


def test_lines_that_are_equal_but_for_their_place(served: Served) -> None:
    """Nothing is placed behind the one that has changed; all of it below another line."""
    for text, most in ((WEEK.replace("Closing: 17:00", "Closing: 13:00", 1), 0), (WEEK, 1000)):
        messages = [*system(f"You work for Harbor Books.\n{text}"), user("What is the access?")]
        reply = served.chat(messages, max_tokens=2, notes={"explain": True})
        assert tokens_reused(reply) <= most and (most == 0 or tokens_reused(reply) > 150)

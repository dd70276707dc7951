"""Tests messages in unusual places: each template puts them where it does by itself, or refuses with its own reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from notes_cli.errors import ModelError
from notes_cli.text.messages import Conversation, Message, SkillPart, TextPart
from notes_cli.text.prompt import Chunk, build
from notes_cli.text.template import ChatTemplate

from .wild import DAY, WILD, plainly

SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in WILD}
ROLES = {"s": "system", "u": "user", "a": "assistant"}
FOLDED = {"google-gemma-2-2b-it", "mistralai-Mistral-Nemo-Instruct-2407"}  # no system role: it is put into a question
OWN = {"muse-glimmer", "unsloth-Apriel-1.5"}  # open a question otherwise where the first message is no system message


def spoken(shape: str) -> list[dict[str, Any]]:
    """Return the messages of a shape, `s`ystem, `u`ser and `a`ssistant, each with its own text."""
    return [{"role": ROLES[role], "content": f"TEXT{number:02d}X"} for number, role in enumerate(shape)]


def expected(source: str, shape: str, answers: str) -> str | None:
    """Return the template's output with answers (at the nonblank `answers`) after the generation prompt. None if it
    refuses, drops or moves a message."""
    talk = spoken(shape)
    text = plainly(source, talk, True)
    if text is None:
        return None
    places = [text.find(one["content"]) for one in talk]
    if places != sorted(places) or -1 in places:
        return None
    for number, one in enumerate(talk):
        if answers[number : number + 1].strip():
            before, after = talk[number - 1]["content"], one["content"]
            opening = plainly(source, talk[:number], True)
            if opening is None:
                return None
            head, _, rest = text.partition(before)
            text = head + before + opening.partition(before)[2] + after + rest.partition(after)[2]
    return text


@pytest.mark.parametrize(
    ("shape", "answers", "least"),
    [
        ("us", "", 40),
        ("suasu", "  a", 40),
        ("au", "", 60),
        ("uaau", " a", 60),
        ("usauaus", "  a a", 38),
    ],
)
def test_templates_have_messages_where_they_put_them(shape: str, answers: str, least: int) -> None:
    """Later system messages, greetings, two answers in a row: the template's own output, except for the generation
    prompt before answers; a template that drops or moves one is refused."""
    counts: Counter[bool] = Counter()
    messages = tuple(Message(one["role"], (TextPart(one["content"]),)) for one in spoken(shape))
    for name, source in SOURCES.items():
        try:
            template = ChatTemplate(source, "<s>", "</s>", now=DAY, name=name)
            chunks = build(template, Conversation(messages))
            found = "".join(chunk.text for chunk in chunks)
        except ModelError as error:
            found = None
            assert name in str(error)
        if name in (FOLDED if shape[0] == "s" else OWN):
            continue
        assert found == expected(source, shape, answers), name
        counts[found is not None] += 1
    assert counts[True] >= least


def test_a_skill_in_a_later_system_message(chatml: ChatTemplate) -> None:
    """It is in the place of the text, and nothing else changes."""
    talk = (
        Message("user", (TextPart("Q1?"),)),
        Message("assistant", (TextPart("A1"),)),
        Message("system", (TextPart("From now on:"), SkillPart("a"))),
        Message("user", (TextPart("Q2?"),)),
    )
    chunks = build(chatml, Conversation(talk))
    assert Chunk("splice", name="a") in chunks
    assert "".join(chunk.text or f"<{chunk.name}>" for chunk in chunks) == (
        "<|im_start|>user\nQ1?<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>system\nFrom now on:\n\n<a><|im_end|>\n<|im_start|>user\nQ2?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("google-gemma-2-2b-it", "au", "Conversation roles must alternate user/assistant"),
        ("google-gemma-2-2b-it", "uasu", "System role not supported|Conversation roles must alternate"),
        ("Qwen3.5-4B", "uasu", "System message must be at the beginning"),
        ("openai-gpt-oss-120b", "uasu", "drops or changes the content of a message"),
        ("deepseek-ai-DeepSeek-V3.1", "uasu", "reorders the content of a message"),
    ],
)
def test_a_template_that_refuses_says_why(name: str, shape: str, says: str) -> None:
    """The error has the template's reason, or its fault."""
    talk = tuple(Message(one["role"], (TextPart(one["content"]),)) for one in spoken(shape))
    with pytest.raises(ModelError, match=says):
        build(ChatTemplate(SOURCES[name], "<s>", "</s>", now=DAY, name=name), Conversation(talk))

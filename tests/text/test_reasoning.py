"""Tests reasoning formats: marks of templates, how an answer opens, and marks in streamed text."""

from __future__ import annotations

import pytest

from notes_cli.text.messages import asking
from notes_cli.text.prompt import build, generation_prompt
from notes_cli.text.reasoning import Reasoning, reasoning_of, shipped_table
from notes_cli.text.template import ChatTemplate

from ..thinkers import HARMONY, OPENED, PLAIN, RESPONSE, SWITCH, UNAWARE

ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "thinking", "direct"),
    [
        (SWITCH, ASSISTANT + "<think>\n", ASSISTANT + "<think>\n\n</think>\n\n"),
        (OPENED, ASSISTANT + "<think>\n", ASSISTANT + "<think>\n</think>\n\n"),
        (UNAWARE, ASSISTANT + "<think>\n", ASSISTANT),
        (
            HARMONY,
            "<|end|><|start|>assistant<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
        *((RESPONSE, ASSISTANT + "<think>", ASSISTANT), (PLAIN, ASSISTANT, ASSISTANT)),
    ],
)
def test_where_an_answer_begins(source: str, thinking: str, direct: str) -> None:
    reasoning = reasoning_of(source, "any")
    template = ChatTemplate(source)
    assert generation_prompt(reasoning.template(template, True)) == thinking
    assert generation_prompt(reasoning.template(template, False)) == direct


def test_only_the_question_at_hand_is_thought_about() -> None:
    """Answers of earlier turns have no open mark before them, and their questions no cue."""
    for source, opened in ((SWITCH, "<think>\n"), (OPENED, "<think>\n")):
        template = reasoning_of(source, "any").template(ChatTemplate(source), True)
        text = "".join(piece.text for piece in build(template, asking("Q2?", turns=[("Q1?", "A1")])))
        assert text.endswith(ASSISTANT + opened)
        assert "<think>" not in text.split("A1")[0] or "</think>\n\nA1" in text
    template = reasoning_of(PLAIN, "notes-tiny").template(ChatTemplate(PLAIN), True)
    text = "".join(piece.text for piece in build(template, asking("Q2? ", turns=[("Q1?", "A1")])))
    assert "Q2? Think first.<|im_end|>" in text and "Q1?<|im_end|>" in text
    said = "".join(piece.text for piece in build(template, asking("Q? Think first.")))
    assert said.count("Think first.") == 1


def test_the_table_tells_models_apart() -> None:
    """By the template first, then by the beginning of the name. Every entry is complete, the last cue matches all
    names, and each first entry is matched by its own texts."""
    assert reasoning_of(SWITCH, "notes-tiny").close == "</think>"
    assert reasoning_of(RESPONSE, "x").end == "</response>"
    assert reasoning_of(PLAIN, "notes-tiny Q8_0").cue == " Think first."
    assert reasoning_of("", "Llama 3").answer == "\n\nAnswer:"
    table = shipped_table()
    for entry in table["marks"]:
        assert entry.open.strip() and entry.close.strip() and "enable_thinking" in entry.thinking
        assert reasoning_of(" ".join(entry.known or (entry.open, entry.close)), "x") is entry
    assert all(entry.cue and entry.answer and not entry.open for entry in table["cues"])
    assert not table["cues"][-1].name


def test_an_answer_inside_the_chain() -> None:
    """The last match counts; reasoning without an outcome has none."""
    tiny = reasoning_of("", "notes-tiny")
    found = tiny.found("So the return is refused. The date is 1. So the return is accepted.")
    assert found and found[1] == "accepted"
    assert tiny.found("So the return is") is None and Reasoning().found("So the return is accepted.") is None

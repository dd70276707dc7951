"""Tests conversations with tools of other programs in each template: none is refused, no text is lost."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bench.templates import HISTORIES, ours
from notes_cli.serve.parsing import parse_chat
from notes_cli.text.messages import Conversation
from notes_cli.text.prompt import Chunk, build

from .test_tools import SOURCES, template_of

ENDLESS = {  # a macro of these calls itself for ever where a property has no type
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
}
USERS = re.compile(r"<(main|slow|look|brief)>|<a>\\?\"|b\|c|c\|d|\{x|\{a\}")  # in strings of users only


def prompt_of(name: str, history: str) -> list[Chunk]:
    asked = parse_chat(json.loads(json.dumps(HISTORIES[history])))
    return build(template_of(name), Conversation(asked.messages, asked.tools))


def typed(history: str) -> bool:
    """Return True if all properties of its tools have a type."""
    tools = HISTORIES[history].get("tools", []) if HISTORIES[history].get("tool_choice") != "none" else []
    schemas: list[Any] = [tool["function"].get("parameters") or {} for tool in tools]
    return all("type" in one for schema in schemas for one in schema.get("properties", {}).values())


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_each_history_has_a_prompt(name: str) -> None:
    """It contains the names of called tools, the results and all other texts, none of it read as control tokens."""
    for history, given in HISTORIES.items():
        if name in ENDLESS and not typed(history):
            assert "nested too deeply" in ours(SOURCES[name], name, given)
            continue
        chunks = prompt_of(name, history)
        text = "".join(chunk.text for chunk in chunks)
        for message in given["messages"]:
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in text, history
            if message["role"] == "tool" and isinstance(message["content"], str):
                shown = (message["content"], json.dumps(message["content"]), json.dumps(message["content"])[1:-1])
                assert any(one in text for one in shown), history
        own = [run.text for chunk in chunks for run in chunk.runs if run.special]
        assert not [part for part in own if USERS.search(part)], history


def test_a_turn_does_not_change_what_came_before() -> None:
    """The prompt begins with that of the history without its last question, as a prefix cache requires."""
    for name in ("Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407"):
        for history in ("ids of other servers", "no ids", "parallel calls, results reversed", "arguments {} and null"):
            given = HISTORIES[history]
            messages = [one for one in given["messages"] if one["content"] != "And the largest?"]
            texts = []
            for more in ([], [{"role": "assistant", "content": "A."}, {"role": "user", "content": "And now?"}]):
                asked = parse_chat({**given, "messages": [*messages, *more]})
                chunks = build(template_of(name), Conversation(asked.messages, asked.tools))
                texts.append("".join(chunk.text for chunk in chunks))
            assert texts[1].startswith(texts[0]), (name, history)

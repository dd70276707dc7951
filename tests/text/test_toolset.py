"""Tests sets of tools as texts: each template's block, found again in prompts that contain it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from notes_cli.errors import ModelError, NotesError, SkillError
from notes_cli.text.messages import Conversation, Message, TextPart, user_message
from notes_cli.text.prompt import Chunk, build
from notes_cli.text.tools import ToolSet, in_order, load_tools, tools_skill, with_splice

from .test_tools import IN_SYSTEM, KNOWS, NO_TOOLS, TOOLS, template_of

SET = ToolSet("mine", in_order(TOOLS), "tools.json")


@pytest.mark.parametrize("name", KNOWS)
def test_the_block_is_in_every_prompt_with_these_tools(name: str) -> None:
    """With a system message or without, for any question; with the splice the prompt is the same."""
    template = template_of(name)
    skill = tools_skill(template, SET)
    assert "".join(text for text, _ in skill.runs) == skill.text and "get_weather" in skill.text
    for system in ("You are brief.", "Other words <|im_end|>."):
        talk = (Message("system", (TextPart(system),)), user_message(f"Q? {skill.text}"))
        chunks = build(template, Conversation(talk, SET.tools))
        found = with_splice(chunks, skill.text, "mine")
        assert found, name
        cut, runs = found
        assert [(run.text, run.special) for run in runs] == [*skill.runs]
        assert not any(system in text for text, _ in skill.runs)
        assert [chunk.name for chunk in cut if chunk.kind == "splice"] == ["mine"]
        assert "".join(skill.text if one.kind == "splice" else one.text for one in cut) == text_of(chunks)
        plain = build(template, Conversation(talk))
        assert with_splice(plain, skill.text, "mine") is None  # text of a user is not the template's block


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_the_order_of_tools_is_not_the_clients() -> None:
    """They are sorted by name."""
    assert in_order(TOOLS) == in_order(TOOLS[::-1])
    with pytest.raises(NotesError, match="two tools of the name"):
        in_order([*TOOLS, TOOLS[0]])


@pytest.mark.parametrize("name", sorted(NO_TOOLS | IN_SYSTEM))
def test_a_template_without_tools(name: str) -> None:
    """It is refused."""
    with pytest.raises(ModelError, match="does not tell the model of tools"):
        tools_skill(template_of(name), SET)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not JSON"), ("[]", "holds no tools"), ('{"a": 1}', "holds no tools"), ("[1]", "is not a function")],
)
def test_files_that_hold_no_tools(tmp_path: Path, text: str, says: str) -> None:
    """Each has an error of one line."""
    (tmp_path / "tools.json").write_text(text)
    with pytest.raises(NotesError, match=says):
        load_tools(tmp_path / "tools.json")
    with pytest.raises(SkillError, match="cannot read"):
        load_tools(tmp_path / "none.json")


@pytest.mark.parametrize("wrap", [lambda tools: tools, lambda tools: {"tools": tools}])
def test_a_file_of_tools(tmp_path: Path, wrap: Any) -> None:
    """It is a list, or an object with one; functions have their outer object or not."""
    bare: list[Mapping[str, Any]] = [tool["function"] for tool in TOOLS]  # type: ignore[misc]
    (tmp_path / "My tools.json").write_text(json.dumps(wrap(bare)))
    found = load_tools(tmp_path / "My tools.json")
    assert (found.name, found.tools) == ("my-tools", SET.tools)


def test_files_of_other_programs(tmp_path: Path) -> None:
    """An MCP server's reply and the tools of requests to Anthropic's or OpenAI's API give the same tools, compiled as
    requests have them."""
    kept = ("name", "description")
    plain: list[Any] = [tool["function"] for tool in TOOLS]
    mcp = [{**{key: one[key] for key in kept}, "inputSchema": one["parameters"], "title": "T"} for one in plain]
    anthropic = [{**{key: one[key] for key in kept}, "input_schema": one["parameters"]} for one in plain]
    responses = [{"type": "function", **one, "strict": True} for one in plain]
    for given in (mcp, {"tools": mcp}, {"jsonrpc": "2.0", "id": 1, "result": {"tools": mcp}}, anthropic, responses):
        (tmp_path / "tools.json").write_text(json.dumps(given))
        found = load_tools(tmp_path / "tools.json")
        assert found.tools == SET.tools
        skill = tools_skill(template_of("Qwen-Qwen3-0.6B"), found)
        chunks = build(template_of("Qwen-Qwen3-0.6B"), Conversation((user_message("Q?"),), SET.tools))
        assert with_splice(chunks, skill.text, "tools")

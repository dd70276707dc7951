"""Makes a set of tools a text to compile: the block in which a chat template shows the tools.

Tools are sorted by name, so that the order in which a client lists them does not matter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from notes_cli.errors import ModelError, SkillError, reason
from notes_cli.text import names
from notes_cli.text.messages import has_mark_remains, marker, normalize_tools, split_marked
from notes_cli.text.prompt import Chunk, Run
from notes_cli.text.skill import MAX_BYTES, Skill, stamp_of
from notes_cli.text.template import ChatTemplate

Tools = tuple[Mapping[str, Any], ...]
SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools to compile under a name."""

    name: str
    tools: Tools
    source: str  # file
    stamp: tuple[int, ...] = ()  # of the file (Skill.stamp)


def in_order(tools: Iterable[Mapping[str, Any]]) -> Tools:
    """Return the tools sorted by name. Raises NotesError for an invalid one."""
    return tuple(sorted(normalize_tools(tools), key=lambda tool: str(tool["function"]["name"])))


def load_tools(source: str | Path, name: str | None = None) -> ToolSet:
    """Read tools from a file: a JSON list in any format of `normalize_tools`, or an object with it under `tools`, also
    in the `result` of an MCP server's reply to tools/list. Raises SkillError."""
    path = Path(source)
    try:
        with path.open("rb") as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SkillError(f"cannot read {path}: {reason(error)}") from error
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise SkillError(f"{path} is not JSON: {' '.join(str(error).split())[:200]}") from error
    if isinstance(value, dict) and isinstance(value.get("result"), dict):
        value = value["result"]
    listed = value.get("tools") if isinstance(value, dict) else value
    if not isinstance(listed, list) or not listed:
        raise SkillError(f"{path} holds no tools", 'Write a JSON list of them, or {"tools": [...]}')
    valid_name = names.name_of(name or path.stem)
    if not valid_name:
        raise SkillError(f"{path}: the name {(name or path.stem)!r} has no letter and no digit", "Give it another name")
    return ToolSet(valid_name, in_order(listed), str(path), stamp)


def tools_skill(template: ChatTemplate, tool_set: ToolSet) -> Skill:
    """Return a template's block for these tools as a skill. Raises ModelError if the template shows them in no single
    place."""
    messages = [{"role": role, "content": marker(number)} for number, role in enumerate(("system", "user"))]
    marks = [marker(0), marker(1)]
    with_tools = template.with_tools(tool_set.tools)
    plain = template.cut(messages, marks)
    rendered = with_tools.cut_text(with_tools.render_marked(lambda _: messages), marks)
    runs = split_marked(max((_added(*both) for both in zip(plain, rendered, strict=True)), key=len)) or []
    text = "".join(part for part, _ in runs)
    tool_names = [tool["function"]["name"] for tool in tool_set.tools]
    if has_mark_remains(text) or not all(name in text for name in tool_names):
        raise ModelError(f"{template.name} does not tell the model of tools in one place, so they cannot be compiled")
    description = f"Tools: {', '.join(tool_names)}"
    return Skill(tool_set.name, description, text, (), tool_set.source, runs=tuple(runs), stamp=tool_set.stamp)


def _added(plain: str, longer: str) -> str:
    """Return the part of one text that another lacks, without surrounding blanks."""
    first = _common_prefix(plain, longer)
    last = _common_prefix(plain[first:][::-1], longer[first:][::-1])
    return longer[first : len(longer) - last].strip()


def _common_prefix(one: str, two: str) -> int:
    """Return the length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def with_splice(chunks: Sequence[Chunk], text: str, name: str) -> tuple[list[Chunk], tuple[Run, ...]] | None:
    """Replace a text in the chunks by a splice, unless it is only a user's. Returns the chunks and the runs of that
    text; None if it is not in there."""
    for number, chunk in enumerate(chunks):
        place = -1 if chunk.kind == "splice" else chunk.text.find(text)
        if place < 0:
            continue
        before, rest = _split_runs(chunk.runs, place)
        inside, after = _split_runs(rest, len(text))
        if not any(run.special for run in inside):
            continue
        pieces = [Chunk("text", before), Chunk("splice", name=name), replace(chunk, runs=after)]
        return [
            *chunks[:number],
            *(piece for piece in pieces if piece.runs or piece.name),
            *chunks[number + 1 :],
        ], inside
    return None


def _split_runs(runs: Sequence[Run], place: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Split runs after so many characters."""
    before: list[Run] = []
    for number, run in enumerate(runs):
        if place < len(run.text):
            head = [Run(run.text[:place], run.special)] if place else []
            return (*before, *head), (Run(run.text[place:], run.special), *runs[number + 1 :])
        before.append(run)
        place -= len(run.text)
    return tuple(before), ()

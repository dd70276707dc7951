"""Sets of tools as texts to be compiled: the block in which a chat template tells the model of them.

Tools are taken in the order of their names, so that the order in which a client lists them costs nothing.
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
    """Tools that are to be compiled, under a name."""

    name: str
    tools: Tools
    source: str  # the file that they were read from
    stamp: tuple[int, ...] = ()  # of that file (Skill.stamp)


def in_order(tools: Iterable[Mapping[str, Any]]) -> Tools:
    """The tools by their names. Raise NotesError for one that is none."""
    return tuple(sorted(normalize_tools(tools), key=lambda tool: str(tool["function"]["name"])))


def load_tools(source: str | Path, name: str | None = None) -> ToolSet:
    """Read tools from a file: a JSON list of them, in any form of `normalize_tools`, or an object that has it under
    `tools`, also in the `result` of an MCP server's reply to tools/list. Raise SkillError."""
    path = Path(source)
    try:
        with path.open("rb") as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SkillError(f"cannot read {path}: {reason(error)}") from error
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise SkillError(f"{path} is not JSON: {' '.join(str(error).split())[:200]}") from error
    if isinstance(found, dict) and isinstance(found.get("result"), dict):
        found = found["result"]
    listed = found.get("tools") if isinstance(found, dict) else found
    if not isinstance(listed, list) or not listed:
        raise SkillError(f"{path} holds no tools", 'Write a JSON list of them, or {"tools": [...]}')
    called = names.name_of(name or path.stem)
    if not called:
        raise SkillError(f"{path}: the name {(name or path.stem)!r} has no letter and no digit", "Give it another name")
    return ToolSet(called, in_order(listed), str(path), stamp)


def tools_skill(template: ChatTemplate, found: ToolSet) -> Skill:
    """What a template tells the model of these tools, as a text to be compiled. Raise ModelError where it does not tell
    of them, or not in one place."""
    messages = [{"role": role, "content": marker(number)} for number, role in enumerate(("system", "user"))]
    marks = [marker(0), marker(1)]
    telling = template.with_tools(found.tools)
    plain = template.cut(messages, marks)
    told = telling.cut_text(telling.render_marked(lambda _: messages), marks)
    runs = split_marked(max((_added(*both) for both in zip(plain, told, strict=True)), key=len)) or []
    text = "".join(part for part, _ in runs)
    called = [tool["function"]["name"] for tool in found.tools]
    if has_mark_remains(text) or not all(name in text for name in called):
        raise ModelError(f"{template.name} does not tell the model of tools in one place, so they cannot be compiled")
    return Skill(found.name, f"Tools: {', '.join(called)}", text, (), found.source, runs=tuple(runs), stamp=found.stamp)


def _added(plain: str, told: str) -> str:
    """What one text has more than another, in one stretch, without blanks around it."""
    first = _alike(plain, told)
    last = _alike(plain[first:][::-1], told[first:][::-1])
    return told[first : len(told) - last].strip()


def _alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def with_splice(chunks: Sequence[Chunk], text: str, name: str) -> tuple[list[Chunk], tuple[Run, ...]] | None:
    """The chunks with a splice in the place of a text that is not only a user's words, and the runs of that text; None
    where it is not in there."""
    for number, chunk in enumerate(chunks):
        place = -1 if chunk.kind == "splice" else chunk.text.find(text)
        if place < 0:
            continue
        before, rest = _cut(chunk.runs, place)
        inside, after = _cut(rest, len(text))
        if not any(run.special for run in inside):
            continue
        splice = [Chunk("text", before), Chunk("splice", name=name), replace(chunk, runs=after)]
        return [*chunks[:number], *(one for one in splice if one.runs or one.name), *chunks[number + 1 :]], inside
    return None


def _cut(runs: Sequence[Run], place: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Runs before and after so many characters."""
    before: list[Run] = []
    for number, run in enumerate(runs):
        if place < len(run.text):
            head = [Run(run.text[:place], run.special)] if place else []
            return (*before, *head), (Run(run.text[place:], run.special), *runs[number + 1 :])
        before.append(run)
        place -= len(run.text)
    return tuple(before), ()

"""Workspaces with a cache of any type, and skills compiled in them with the influence of their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import Segment
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

OpenWorkspace = Callable[..., Workspace]


@pytest.fixture
def open_workspace(make_model: Callable[..., Path], home: Path) -> Iterator[OpenWorkspace]:
    """Open a workspace on a tiny model, with K and V of a type."""
    opened: list[Workspace] = []

    def make(kind: str = "llama", kv: str = "f16", **settings: object) -> Workspace:
        flash = "off" if kv == "f32" else "auto"  # flash attention rounds more than an f32 cache does
        options = ContextOptions(n_ctx=512, n_threads=1, type_k=kv, type_v=kv, flash_attention=flash)
        opened.append(Workspace(make_model(kind, **settings), options))
        return opened[-1]

    yield make
    for workspace in opened:
        workspace.close()


def skill_of(text: str, **values: str) -> Skill:
    """Parse a skill from a text with placeholders."""
    fields = "".join(f"  {name}: {value}\n" for name, value in values.items())
    return parse_skill(f"---\nname: s\nfields:\n{fields}---\n{text}", source="s", default="s")


def measured(workspace: Workspace, skill: Skill) -> Segment:
    """Compile the skill with the influence of its fields."""
    return compile_skill(workspace, skill, measure=lambda done, of: None)

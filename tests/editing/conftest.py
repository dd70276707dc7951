"""Workspaces with a cache of any type, and skills to compile in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeModel

OpenWorkspace = Callable[..., Workspace]


@pytest.fixture(scope="module")
def open_workspace(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWorkspace]:
    """One workspace a module for each tiny model and type of K and V; empty when it is handed out."""
    paths = Paths.under(tmp_path_factory.mktemp("home"))
    with ExitStack() as opened:

        @cache
        def make(kind: str, kv: str, **settings: object) -> Workspace:
            flash = "off" if kv == "f32" else "auto"  # flash attention rounds more than an f32 cache does
            options = ContextOptions(n_ctx=512, n_threads=1, type_k=kv, type_v=kv, flash_attention=flash)
            return opened.enter_context(Workspace(make_model(kind, **settings), options, paths=paths))

        def get(kind: str = "llama", kv: str = "f16", **settings: object) -> Workspace:
            workspace = make(kind, kv, **settings)
            workspace.context.clear()
            return workspace

        yield get


@pytest.fixture(scope="module")
def skill() -> Skill:
    """Two fields and a rule."""
    text = "date: 2026-06-01\ntier: gold\n\nReturns before 2026-06-15 are accepted."
    return parse_skill(text, source="returns.txt", default="returns")


def skill_of(text: str, **values: str) -> Skill:
    """Parse a skill from a text with placeholders."""
    fields = "".join(f"  {name}: {value}\n" for name, value in values.items())
    return parse_skill(f"---\nname: s\nfields:\n{fields}---\n{text}", source="s", default="s")

"""A workspace on a tiny random model, and a skill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from notes_cli.engine.context import ContextOptions
from notes_cli.text.skill import Skill, parse_skill
from notes_cli.work.workspace import Workspace

MakeWorkspace = Callable[..., Workspace]


@pytest.fixture
def make_workspace(make_model: Callable[..., Path], home: Path) -> Iterator[MakeWorkspace]:
    """Open a workspace on a tiny model of the given kind and settings; closed after the test."""
    opened: list[Workspace] = []

    def make(kind: str = "llama", n_ctx: int = 1024, fixed_size: bool = False, **settings: object) -> Workspace:
        options = ContextOptions(n_ctx=n_ctx, n_threads=1)
        opened.append(Workspace(make_model(kind, **settings), options, fixed_size=fixed_size))
        return opened[-1]

    yield make
    for workspace in opened:
        workspace.close()


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    return make_workspace()


@pytest.fixture
def skill() -> Skill:
    """Two fields and a rule."""
    text = "date: 2026-06-01\ntier: gold\n\nReturns before 2026-06-15 are accepted."
    return parse_skill(text, source="returns.txt", default="returns")

"""Rows of two compiles in one prompt, with the model that ships."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import SAMPLES

from notes_cli.config import shipped_model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.positions import Patch
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import load_skill
from training.tiny.mixes import AlikeError, Column, Mixes, columns_of

QUESTION, CHOICES = "May I return this?", ["accepted", "refused"]


def test_columns() -> None:
    """One a token; one in all for a value of another length, and what follows it keeps its partner."""
    assert columns_of(3, [Patch(1, 2, (7,))]) == [
        Column((0, 1), (0, 1), False),
        Column((1, 2), (1, 2), True),
        Column((2, 3), (2, 3), False),
    ]
    found = columns_of(6, [Patch(1, 2, (7, 7, 7)), Patch(3, 5, (8,))])
    assert [column.stale for column in found] == [(0, 1), (1, 2), (2, 3), (3, 5), (5, 6)]
    assert [column.fresh for column in found] == [(0, 1), (1, 4), (4, 5), (5, 6), (6, 7)]


def test_where_the_shipped_model_decides(home: Path) -> None:
    """On the rows after the field; the field's own rows alone change nothing. Texts that decide alike are refused."""
    with Workspace(shipped_model(), ContextOptions(n_ctx=512, n_threads=1)) as workspace:
        returns = compile_skill(workspace, load_skill(SAMPLES / "returns"))
        with Mixes(workspace, returns, "date", "2026-07-01", question=QUESTION, choices=CHOICES) as mixes:
            count = len(mixes.columns)
            assert mixes.decisions == ("accepted", "refused")
            assert mixes.recovery([False] * count) == 0 and mixes.recovery([True] * count) == 1
            assert mixes.after_only() > 0.9 and abs(mixes.field_only()) < 0.1
        with pytest.raises(AlikeError):
            Mixes(workspace, returns, "date", "2026-02-01", question=QUESTION, choices=CHOICES)
        assert workspace.context.used == 0

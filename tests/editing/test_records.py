"""A new method in the registry works in prompts, and no other code depends on its name."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import notes_cli
from notes_cli.editing.methods import (
    METHODS,
    Change,
    Method,
    Placer,
    in_place,
)
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill

from .conftest import OpenWorkspace

NEW = {"date": "2026-07-01"}


def field_and_last(sequence: KVSequence, segment: Segment, change: Change, placer: Placer) -> None:
    """A new edit operation: the field in place, and the last token of the skill."""
    in_place(sequence, segment, change, placer, [len(segment) - 1])


TOY = Method("toy", field_and_last, in_place=True, needs_rewrite=True)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, TOY.name, TOY)


@pytest.fixture
def workspace(open_workspace: OpenWorkspace) -> Workspace:
    return open_workspace()


@pytest.fixture
def segment(workspace: Workspace, skill: Skill) -> Segment:
    return compile_skill(workspace, skill)


def rows(seq: KVSequence) -> NDArray[np.float32]:
    """K and V of all layers, one row per token."""
    seq.flush()
    read = seq.context.read(seq.seq_id, 0, len(seq), base=0, dtype="f32")
    return np.hstack([part for layer in read for part in (layer.k, layer.v)])


def expected(segment: Segment, start: int) -> set[int]:
    """The positions that the toy edits: those of the date, and the last of the skill."""
    span = next(span for span in segment.fields if span.name == "date")
    return {*range(start + span.first, start + span.last), start + len(segment) - 1}


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_a_new_method_in_a_prompt(workspace: Workspace, segment: Segment, system: str | None) -> None:
    """Only the K/V at its positions changes, and pieces record that; a dry run, too."""
    prompt = Prompt("Why?", [segment], system=system, fields=NEW, method=Method.parse("stale"))
    plain = assemble(workspace, prompt)
    start = next(piece.position for piece in plain.pieces if piece.kind == "splice")
    before = rows(plain)[: start + len(segment)]
    edited = assemble(workspace, replace(prompt, method=Method.parse("toy")))
    after = rows(edited)[: start + len(segment)]
    changed = set(np.flatnonzero((before != after).any(axis=1)).tolist())
    assert start + len(segment) - 1 in changed <= expected(segment, start)
    assert sum(piece.rewritten for piece in edited.pieces) == len(expected(segment, start))
    assert assemble(workspace, replace(prompt, method=Method.parse("toy")), dry=True).pieces == edited.pieces


def test_nobody_asks_for_a_name() -> None:
    """No comparison with a method's name outside of the table: properties of a method are in its record."""
    package = Path(notes_cli.__file__).parent
    assert [f"{path.name}:{line}" for path in package.rglob("*.py") for line in asked(path.read_text())] == []
    assert asked('if method.name == "suffix" or x.name in ("field", "erratum"):\n    pass') == [1, 1]
    assert asked('entry.kind == "erratum"') == asked('method == RECOMPUTE and segment.name == "s"') == []


def asked(source: str) -> list[int]:
    """The lines that compare a name or a method with the name of a method."""
    if not re.search(f"[\"'](?:{'|'.join(map(re.escape, METHODS))})[\"']", source):
        return []
    lines = []
    for node in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)):
        sides = [node.left, *node.comparators]
        texts = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
        subjects = {side.attr for side in sides if isinstance(side, ast.Attribute)}
        subjects |= {side.id for side in sides if isinstance(side, ast.Name)}
        if texts & set(METHODS) and subjects & {"name", "method", "selected", "how", "named"}:
            lines.append(node.lineno)
    return lines

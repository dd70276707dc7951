"""The edit methods that bench/methods.py adds: which K/V each of them computes anew."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from samples import with_values

from bench import methods
from notes_cli.editing.methods import METHODS, Method, change
from notes_cli.engine.segment import Segment
from notes_cli.errors import UnsupportedError
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

from ..engine.reference import nmse

TEXT = "# When\n\ndate: 2026-06-01\n\n# What\n\nReturns before 2026-06-15 are accepted, later ones are refused."


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("selective@16", "blend@16", "block"):
        monkeypatch.setitem(METHODS, name, METHODS["stale"])  # restored afterwards
    monkeypatch.setattr(methods, "K", 4)
    methods.add()


@pytest.fixture
def skill() -> Skill:
    return parse_skill(TEXT, source="returns.txt", default="returns")


def rows(workspace: Workspace, segment: Segment, method: str, value: str) -> tuple[NDArray[np.float32], int]:
    """K and V of the skill in a prompt, a row a token, and the tokens that were recomputed in place."""
    workspace.context.clear()
    asked = Prompt("Why?", [segment], fields={"date": value}, method=Method.parse(method))
    with assemble(workspace, asked) as sequence:
        sequence.flush()
        start = next(piece.position for piece in sequence.pieces if piece.kind == "splice")
        last = max(piece.position + piece.tokens for piece in sequence.pieces if piece.kind == "splice")
        read = workspace.context.read(sequence.seq_id, start, last - start, base=0, dtype="f32")
        both = np.hstack([part for layer in read for part in (layer.k, layer.v)])
        return both, sum(piece.rewritten for piece in sequence.pieces)


@pytest.mark.parametrize(("method", "layers"), [("selective@16", None), ("blend@16", 2)])
def test_the_tokens_that_deviate_most_are_computed_too(
    workspace: Workspace, skill: Skill, method: str, layers: int | None
) -> None:
    """Those whose V is farthest from that of a compile of the corrected text, and no others."""
    value = "2026-07-01"
    segment, corrected = (compile_skill(workspace, one) for one in (skill, with_values(skill, {"date": value})))
    old, new = (np.stack([each.v.astype(np.float32) for each in of.layers]) for of in (segment, corrected))
    far = (np.linalg.norm(new - old, axis=2) / np.linalg.norm(old, axis=2))[:layers].mean(axis=0)
    span = segment.fields[0]
    far[: span.last] = 0
    stale, _ = rows(workspace, segment, "stale", value)
    found, count = rows(workspace, segment, method, value)
    changed = np.flatnonzero((found != stale).any(axis=1)).tolist()
    assert [at for at in changed if at >= span.last] == sorted(np.argsort(-far, kind="stable")[:4].tolist())
    assert count == 4 + span.last - span.first


@pytest.mark.parametrize("value", ["2026-07-01", "the first of July"])
def test_a_block_is_as_compiled_from_the_corrected_text(workspace: Workspace, skill: Skill, value: str) -> None:
    segment = compile_skill(workspace, skill, blocks="headings")
    corrected = compile_skill(workspace, with_values(skill, {"date": value}), blocks="headings")
    found, _ = rows(workspace, segment, "block", value)
    wanted, _ = rows(workspace, corrected, "stale", value)
    stale, _ = rows(workspace, segment, "stale", value)
    assert nmse(found, wanted) < 1e-5
    assert found.shape != stale.shape or nmse(stale, wanted) > 1e-3
    assert change(workspace.model, corrected, {"date": value}) is None
    with pytest.raises(UnsupportedError, match="in one piece"):
        rows(workspace, compile_skill(workspace, skill), "block", value)

"""Tests skills on recurrent models after other left contexts: state carried if trusted, else decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import nmse

from notes_cli.engine import recurrent
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import Carry, Segment
from notes_cli.engine.sequence import run
from notes_cli.errors import EngineError
from notes_cli.explanations import why
from notes_cli.library.container import open_stored, peek, write_segment
from notes_cli.measure.verify import verify
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import UNCAPTURED, UNTRUSTED, compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.recompile import compile_to_library, stale
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill

from ..conftest import MakeWorkspace

SYSTEM = "Be kind, and brief."

pytestmark = pytest.mark.patches("recurrent")


@pytest.fixture(params=["lfm2", "mamba"])
def workspace(request: pytest.FixtureRequest, make_workspace: MakeWorkspace) -> Workspace:
    return make_workspace(request.param)


@contextmanager
def trusting(workspace: Workspace) -> Iterator[None]:
    """Carry state during the block."""
    workspace._carry = True
    workspace.refresh_capabilities()
    try:
        yield
    finally:
        workspace._carry = None
        workspace.refresh_capabilities()


def compiled(workspace: Workspace, skill: Skill) -> Segment:
    """Compile with state transitions."""
    with trusting(workspace):
        return compile_skill(workspace, skill)


@pytest.fixture
def segment(workspace: Workspace, skill: Skill) -> Segment:
    return compiled(workspace, skill)


def logits(workspace: Workspace, prompt: Prompt, *, splice: bool = True) -> NDArray[np.float32]:
    with assemble(workspace, prompt, splice=splice) as seq:
        return seq.logits()


def test_a_prompt_goes_by_trust(workspace: Workspace, segment: Segment) -> None:
    """The seam is decoded and the rest placed, with its reason; without trust all of it is decoded."""
    assert segment.carry is not None and segment.carry.nbytes > 0
    prompt = Prompt("Why?", [segment], system=SYSTEM)
    with assemble(workspace, prompt) as seq:
        assert seq.count("spliced") == 0 and UNTRUSTED in why(seq.pieces[1])
    with trusting(workspace), assemble(workspace, prompt) as seq:
        dry = assemble(workspace, prompt, dry=True)
        assert dry.pieces == seq.pieces and dry.tokens.tolist() == seq.tokens.tolist()
        seam, rest = [piece for piece in seq.pieces if piece.name == "returns"]
        assert (seam.how, seam.tokens, seam.reason) == ("seam", segment.carry.seam, Reason.OTHER_CONTEXT)
        assert (rest.how, rest.tokens, rest.reason) == ("spliced", len(segment) - seam.tokens, Reason.CARRIED)
        assert why(rest) == f"reused, keys rotated by {rest.moved:+d} positions, recurrent state carried through"
        assert rest.moved == seam.position - segment.base > 0
    with assemble(workspace, prompt) as seq:
        assert seq.count("spliced") == 0


def test_carried_is_nearer_than_what_forgets(workspace: Workspace, segment: Segment) -> None:
    """After a system text: nearer to the recompute than with the earlier state dropped, or the skill's left out."""
    assert segment.carry is not None
    prompt = Prompt("Why?", [segment], system=SYSTEM)
    wanted = logits(workspace, prompt, splice=False)
    with trusting(workspace):
        found = nmse(logits(workspace, prompt), wanted)
        for a, b in ((0.0, 1.0), (1.0, 0.0)):
            parts = [replace(one, a=np.full_like(one.a, a), b=one.b * np.float32(b)) for one in segment.carry.load()]
            if not any(len(one.a) for one in parts):
                continue  # convolutions alone
            wrong = replace(segment, carry=Carry.of(segment.carry.seam, segment.carry.tail, parts))
            assert nmse(logits(workspace, replace(prompt, segments=[wrong])), wanted) > 2 * found


def test_from_its_file_as_from_memory(workspace: Workspace, segment: Segment, tmp_path: Path) -> None:
    """A segment from its file carries like the captured one, also if its rows were read first."""
    write_segment(tmp_path / "a.gguf", segment)
    prompt = Prompt("Why?", [segment], system=SYSTEM)
    with trusting(workspace):
        wanted = logits(workspace, prompt)
        for _ in range(2):
            stored = open_stored(tmp_path / "a.gguf")
            np.testing.assert_array_equal(logits(workspace, replace(prompt, segments=[stored])), wanted)


def test_a_skill_of_a_few_tokens_is_decoded(workspace: Workspace) -> None:
    """Nothing is between its seam and its end."""
    yes = Skill("yes", "", "y", (), "-")
    segment = compiled(workspace, yes)
    assert segment.carry is None
    write_segment(workspace.library.path("yes", workspace.identity), segment)
    with trusting(workspace):
        assert not stale(workspace, yes, workspace.library.path("yes", workspace.identity))
        with assemble(workspace, Prompt("Why?", [segment], system=SYSTEM)) as seq:
            assert "was not captured" in why(seq.pieces[1]) and seq.count("spliced") == 0


def test_who_does_not_carry_captures_nothing(workspace: Workspace, skill: Skill) -> None:
    """A compile captures transitions only if they are used; once they are, segments without them are stale."""
    first = compile_to_library(workspace, skill)
    assert peek(first.path).carry is None and not compile_to_library(workspace, skill).reasons
    with trusting(workspace):
        with assemble(workspace, Prompt("Why?", [open_stored(first.path)], system=SYSTEM)) as seq:
            assert UNCAPTURED in why(seq.pieces[1]) and seq.count("spliced") == 0
        assert compile_to_library(workspace, skill).reasons == (UNCAPTURED,)
        assert peek(first.path).carry and not compile_to_library(workspace, skill).reasons
    assert not compile_to_library(workspace, skill).reasons  # additional content is no reason


def test_verifying_compares_what_is_carried(workspace: Workspace, segment: Segment) -> None:
    with trusting(workspace):
        report = verify(workspace, Prompt("", [segment], system=SYSTEM), ["Why?"], choices=["yes", "no"])
    (case,) = report.cases
    assert case.spliced > 0 and 0.9 < case.cosine <= 1
    [rows] = report.rows.values()
    assert rows.right and rows.tokens == len(segment)


def test_an_interrupted_carry(workspace: Workspace, segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overwritten state cannot be recovered: the sequence refuses to continue."""
    carry = recurrent.carry

    def interrupted(*given: Any) -> None:
        carry(*given)
        raise KeyboardInterrupt

    seq = workspace.sequence()
    seq.append(workspace.model.tokenize(SYSTEM))
    monkeypatch.setattr(recurrent, "carry", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(seq.carry_task(segment))
    assert not seq.intact
    seq.append([65])
    with pytest.raises(EngineError):
        seq.flush()
    seq.close()

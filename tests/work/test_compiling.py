"""Compiling: the segment holds the skill's own rows, as decoding makes them behind its left context."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from notes_cli.errors import SegmentError, UnsupportedError
from notes_cli.library.container import open_segment
from notes_cli.text.skill import Skill
from notes_cli.work.compiling import compile_skill, compile_to_library, plan
from notes_cli.work.workspace import Workspace

from ..conftest import MakeWorkspace


def test_rows_are_those_behind_the_left_context(workspace: Workspace, skill: Skill) -> None:
    """Tokens are the skill's alone, base is the left context's length, and the rows are those of decoding there."""
    segment = compile_skill(workspace, skill)
    left = workspace.left_context
    assert segment.tokens.tolist() == workspace.model.tokenize(skill.text).tolist()
    assert segment.base == len(left) and segment.context.tolist() == left.tolist()
    workspace.context.clear()
    workspace.context.append({0: np.concatenate([left, segment.tokens])})
    wanted = workspace.context.read(0, len(left), len(segment), base=len(left))
    for found, row in zip(segment.layers, wanted, strict=True):
        np.testing.assert_allclose(found.k, row.k, atol=0.01)
        np.testing.assert_allclose(found.v, row.v, atol=0.01)


def test_field_spans_point_at_the_values(workspace: Workspace, skill: Skill) -> None:
    """The tokens of a span give its value back, and so do its characters."""
    segment = compile_skill(workspace, skill)
    assert [span.name for span in segment.fields] == ["date", "tier"]
    for span in segment.fields:
        assert workspace.model.text(segment.tokens[span.first : span.last]) == span.value
        assert segment.text[span.start : span.end] == span.value


def test_a_plan_is_the_segment_without_rows(workspace: Workspace, skill: Skill) -> None:
    """What a dry run knows of a skill is what compiling it gives."""
    planned, compiled = plan(workspace, skill), compile_skill(workspace, skill)
    assert planned.layers == () and planned.tokens.tolist() == compiled.tokens.tolist()
    for part in ("name", "description", "text", "base", "fields", "identity"):
        assert getattr(planned, part) == getattr(compiled, part)


def test_progress_counts_to_the_end(workspace: Workspace) -> None:
    """It rises to the number of tokens of the skill, in more than one step for a long one."""
    seen: list[tuple[int, int]] = []
    long = Skill("long", "", "word " * 100, (), "-")
    compile_skill(workspace, long, lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [500] * len(seen) and len(seen) > 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1] == (500, 500)


def test_a_growing_context_does_not_change_the_file(make_workspace: MakeWorkspace, skill: Skill) -> None:
    """The size of the context is no part of the identity of a model that rotates the same in all of them."""
    small, large = make_workspace(n_ctx=256), make_workspace(n_ctx=2048)
    first = compile_to_library(small, skill)
    assert first.reasons and not compile_to_library(large, skill).reasons


def test_a_skill_beyond_the_context_that_was_asked_for(make_workspace: MakeWorkspace) -> None:
    """A fixed size is kept to; one that is free grows."""
    long = Skill("long", "", "word " * 200, (), "-")
    with pytest.raises(Exception, match="tokens do not fit 256"):
        compile_skill(make_workspace(n_ctx=256, fixed_size=True), long)
    assert len(compile_skill(make_workspace(n_ctx=256), long)) == 1000


def test_refused_for_an_architecture_that_cannot(make_workspace: MakeWorkspace, skill: Skill, home: Path) -> None:
    """The reason is said; the library is not even begun."""
    workspace = make_workspace("llama-embed")
    for action in (compile_skill, plan, compile_to_library):
        with pytest.raises(UnsupportedError, match="keeps no K/V cache"):
            action(workspace, skill)
    assert not (home / "library").exists()


def test_output_over_something_else(workspace: Workspace, skill: Skill, tmp_path: Path) -> None:
    """Only a segment is written over, or whatever it is if that is asked for."""
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    with pytest.raises(SegmentError, match="no sound segment"):
        compile_to_library(workspace, skill, output=target)
    assert target.read_text() == "mine"
    assert compile_to_library(workspace, skill, output=target, force=True).path == target
    assert open_segment(target).name == "returns"
    assert not compile_to_library(workspace, skill, output=target).reasons

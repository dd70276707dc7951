"""Selection of the tokens to recompute with a change, and the influence of fields."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta

import numpy as np
import pytest
from samples import with_values

from notes_cli.editing.methods import counterfactual, influence
from notes_cli.engine.segment import Segment
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.text.skill import Skill

from .conftest import OpenWorkspace, measured, skill_of


def touched(segment: Segment, name: str) -> list[int]:
    return [at for span in segment.fields if span.name == name for at in range(span.first, span.last)]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ("2026-06-01", "2021-01-05"),
        ("2026-05-12", "2021-09-07"),
        ("120", "115"),
        ("100", "105"),
        ("9", "4"),
        ("gold", "other"),
        ("other", "another"),
        ("up to 5", "up to 9"),
    ],
)
def test_the_other_value(value: str, other: str) -> None:
    """Of the same kind, for numbers of the same length, never the value itself, and a valid date of any day."""
    assert counterfactual(value) == other
    days = [date(2024, 1, 1) + timedelta(day) for day in range(366)]
    assert all(day != date.fromisoformat(counterfactual(day.isoformat())) for day in days)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "smollm3", "gpt2", "lfm2"])
def test_nothing_in_the_field_or_before_it(open_workspace: OpenWorkspace, skill: Skill, kind: str) -> None:
    """One number per token: 0 up to the field's end, positive after it; the context is left empty."""
    workspace = open_workspace(kind)
    progress: list[tuple[int, int]] = []
    segment = compile_skill(workspace, skill, measure=lambda done, of: progress.append((done, of)))
    assert progress == [(1, 2), (2, 2)] and workspace.context.length(0) == 0
    assert list(segment.influence) == ["date", "tier"]
    for name, found in segment.influence.items():
        last = touched(segment, name)[-1] + 1
        assert found.shape == (len(segment),) and found.dtype == np.float32 and np.isfinite(found).all()
        assert (found[:last] == 0).all() and (found[last:] >= 0).all() and found[last:].max() > 0


def test_it_is_what_another_value_does_to_the_rows(open_workspace: OpenWorkspace, skill: Skill) -> None:
    """The mean over the layers of the relative distance of V from that of a compile with the other value."""
    workspace = open_workspace(kv="f32")
    segment = measured(workspace, skill)
    other = compile_skill(workspace, with_values(skill, {"date": "2021-01-05"}))
    far = np.mean(
        [
            np.linalg.norm(a.v - b.v, axis=1) / np.linalg.norm(a.v, axis=1)
            for a, b in zip(segment.layers, other.layers, strict=True)
        ],
        axis=0,
    )
    after = segment.fields[0].last
    np.testing.assert_allclose(segment.influence["date"][after:], far[after:], rtol=1e-4, atol=1e-6)


def test_it_is_the_same_again(open_workspace: OpenWorkspace, skill: Skill) -> None:
    """Bit-identical in a sequence that held other K/V, and nearly equal in an f32 cache."""
    workspace = open_workspace()
    first = measured(workspace, skill).influence
    segment = compile_skill(workspace, skill)
    with workspace.scratch() as sequence:
        sequence.append(np.arange(9, dtype=np.int32))
        sequence.flush()
        again = influence(sequence, segment, "date")
    assert (again == first["date"]).all()
    exact = measured(open_workspace(kv="f32"), skill).influence["date"]
    np.testing.assert_allclose(again, exact, atol=0.02 * float(exact.max()))


def test_a_field_in_several_places_and_of_another_length(open_workspace: OpenWorkspace) -> None:
    """0 at all its places, positive between them, and each token keeps its number."""
    workspace = open_workspace()
    segment = measured(workspace, skill_of("A {{x}} is a {{x}}, they say.", x="cat"))
    found, own = segment.influence["x"], touched(segment, "x")
    assert (found[own] == 0).all() and (found[: own[0]] == 0).all()
    after = [at for at in range(own[0], len(segment)) if at not in own]
    assert (found[after] > 0).all()


def test_recurrent_layers_alone_have_no_rows(open_workspace: OpenWorkspace, skill: Skill) -> None:
    """All 0: no single token can be recomputed."""
    assert not any(found.any() for found in measured(open_workspace("mamba"), skill).influence.values())


def test_in_the_library(open_workspace: OpenWorkspace, skill: Skill) -> None:
    """Measured on request; kept by later compiles of the same text, and dropped for another text."""
    workspace = open_workspace()
    plain = compile_to_library(workspace, skill)
    assert workspace.open(plain.path).influence == {}
    progress: list[int] = []

    def asked(of: Skill) -> tuple[str, ...]:
        return compile_to_library(workspace, of, measure=lambda done, _: progress.append(done)).reasons

    assert asked(skill) == ("the influence of its fields has not been measured",) and progress == [1, 2]
    kept = workspace.open(plain.path).influence
    wanted = measured(workspace, skill).influence
    assert all((kept[name] == wanted[name]).all() for name in ("date", "tier"))
    assert not compile_to_library(workspace, skill).reasons and not asked(skill) and progress == [1, 2]
    assert workspace.open(plain.path).influence.keys() == kept.keys()
    assert compile_to_library(workspace, replace(skill, description="Another.")).reasons
    assert workspace.open(plain.path).influence == {}


def test_a_skill_without_fields(open_workspace: OpenWorkspace) -> None:
    """Its influence is empty, not missing."""
    workspace, progress = open_workspace(), []
    skill = Skill("s", "", "No fields.", (), "-")
    for reasons in (1, 0):
        compiled = compile_to_library(workspace, skill, measure=lambda done, of: progress.append(done))
        assert len(compiled.reasons) == reasons and progress == []

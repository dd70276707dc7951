"""Carrying recurrent state: the measurement, the verdict, and the effect of a profile."""

from __future__ import annotations

import json

import pytest

from notes_cli.errors import NotesError
from notes_cli.library.profiles import Carried, Profile, Profiles
from notes_cli.measure.battery import shipped_battery
from notes_cli.measure.calibrate import calibrate
from notes_cli.measure.composition import judge, measure_carried
from notes_cli.runtime.workspace import Workspace

from ..conftest import MakeWorkspace

pytestmark = pytest.mark.patches("recurrent")


@pytest.mark.parametrize(
    ("carried", "read", "without", "verdict", "says"),
    [
        (60, 60, 20, "holds", "decides as one that is decoded: right in 60 of 60"),
        (59, 60, 20, "holds", "right in 59 of 60"),
        (40, 60, 20, "fails", "loses decisions"),
        (55, 60, 20, "open", "neither a loss nor that there is none"),
        (30, 30, 30, "open", "does not decide by a skill even when it reads it"),
    ],
)
def test_what_follows(carried: int, read: int, without: int, verdict: str, says: str) -> None:
    """`holds` needs decisions that depend on the skill, and hardly any of them lost."""
    right = {
        name: [number < count for number in range(60)]
        for name, count in (("carried", carried), ("recompute", read), ("without", without))
    }
    found = judge(right)
    assert found.verdict == verdict and says in found.why


def test_few_decisions_prove_nothing() -> None:
    """Even if all are right."""
    found = judge({name: [name != "without"] * 40 for name in ("carried", "recompute", "without")})
    assert found.verdict == "open" and found.why.startswith("40 decisions prove nothing")


def test_a_random_hybrid_is_not_trusted(make_workspace: MakeWorkspace) -> None:
    """Both places and all three ways are measured, and the verdict is `open`."""
    workspace, cases = make_workspace("lfm2"), shipped_battery()[:3]
    told: list[int] = []
    found, measured = measure_carried(workspace, cases, lambda: told.append(1))
    assert found is not None and found.verdict == "open" and len(told) == 3
    assert {(one.name, one.way) for one in measured} == {
        (way, place) for way in ("carried", "recompute", "without") for place in ("after", "before")
    }
    decoded = {(one.name, one.way): one.decoded for one in measured}
    assert all(decoded["carried", place] < decoded["recompute", place] for place in ("after", "before"))
    assert not workspace.context.carries


def test_attention_alone_is_not_measured_for_it(make_workspace: MakeWorkspace) -> None:
    """It has no recurrent state."""
    assert measure_carried(make_workspace(), shipped_battery()[:1], lambda: None) == (None, [])


def test_a_profile_decides_unless_the_user_does(make_workspace: MakeWorkspace) -> None:
    """A saved profile is followed; a damaged one is refused, and no state is carried."""
    first = make_workspace("mamba")
    told: list[tuple[int, int]] = []
    profile = calibrate(first, shipped_battery()[:2], lambda done, of: told.append((done, of)))
    assert told[-1] == (6, 6) and profile.carry is not None and profile.carry.verdict == "open"
    profiles = Profiles(first.paths.profiles)

    def opened(found: Carried | None, **chosen: bool) -> bool:
        parts = {name: getattr(profile, name) for name in Profile.__dataclass_fields__} | {"carry": found}
        path = profiles.save(Profile(**parts), "test")
        assert profiles.read(path).carry == found
        with Workspace(first.model.path, first.options, paths=first.paths, **chosen) as workspace:
            _ = workspace.identity
            return workspace.context.carries

    assert opened(Carried("holds", "because"))
    assert not opened(Carried("fails", "because")) and not opened(None)
    assert not opened(Carried("holds", "because"), carry=False)
    assert opened(Carried("open", "because"), carry=True)
    path = profiles.path(first.identity, first.context.options.cache)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"carry": {"verdict": "surely", "why": ""}}))
    with pytest.raises(NotesError, match=r"carry\.verdict is 'surely'"):
        profiles.read(path)
    with Workspace(first.model.path, first.options, paths=first.paths) as workspace:
        _ = workspace.identity
        assert not workspace.context.carries

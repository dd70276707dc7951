"""Calibrating: what is chosen by which figures, and what is measured at all."""

from __future__ import annotations

import pytest

from notes_cli.config import shipped_model
from notes_cli.editing.methods import METHODS
from notes_cli.engine.context import ContextOptions
from notes_cli.library.profiles import Measured
from notes_cli.measure.calibrate import CLASSES, SEAMS, calibrate, choose
from notes_cli.text.battery import shipped_battery
from notes_cli.text.erratum import shipped_wordings
from notes_cli.work.workspace import Workspace

from ..conftest import MakeWorkspace


def method(name: str, same: int, decoded: float = 20.0, way: str = "direct") -> Measured:
    """So many of 40 decisions as the recompute's."""
    return Measured("method", name, way, 40, same, same, 0.99, decoded, 10.0)


@pytest.mark.parametrize(
    ("measured", "heard", "chosen"),
    [
        ([method("erratum", 39), method("field", 40), method("suffix", 40)], 1.0, "field"),
        ([method("erratum", 40, 20), method("field", 40, 3)], 1.0, "field"),
        ([method("erratum", 40, 3), method("field", 40, 20)], 1.0, "erratum"),
        ([method("erratum", 30), method("field", 2), method("suffix", 40)], 1.0, "suffix"),
        ([method("erratum", 37), method("suffix", 37)], 1.0, "recompute"),
        ([method("erratum", 40), method("suffix", 40)], 0.4, "recompute"),
        ([method("erratum", 40, way="reasoned"), method("suffix", 40)], 1.0, "suffix"),
        ([method("stale", 40), method("recompute", 40)], 1.0, "recompute"),
        ([], 0.0, "recompute"),
    ],
)
def test_the_best_of_the_cheapest_trustworthy_class(measured: list[Measured], heard: float, chosen: str) -> None:
    """Agreement first, then cost; a class without a trustworthy method is passed over; a deaf model has none."""
    assert choose(measured, "direct", heard) == chosen


def test_every_class_holds_methods() -> None:
    """What is chosen among exists, and no method is in two classes."""
    names = [name.partition("@")[0] for names in CLASSES for name in names]
    assert set(names) <= set(METHODS) and len(set(names)) == len(names)


def test_the_shipped_model_is_heard() -> None:
    """On a few decisions: every method, wording, seam and place is measured, and one of a few tokens is chosen."""
    told: list[tuple[int, int]] = []
    with Workspace(shipped_model(), ContextOptions(n_ctx=1024, n_threads=1)) as workspace:
        profile = calibrate(workspace, shipped_battery()[:4], lambda done, of: told.append((done, of)))
    assert told == [(done, 8) for done in range(1, 9)]
    assert profile.heard["direct"] >= 3
    for way in ("direct", "reasoned"):
        assert profile.methods[way] in CLASSES[0]
        stale, recompute = profile.found("method", "stale", way), profile.found("method", "recompute", way)
        assert stale is not None and recompute is not None
        assert stale.same < stale.cases == recompute.same and stale.decoded < recompute.decoded
    named = {(one.what, one.name) for one in profile.measured}
    assert {("wording", name) for name in shipped_wordings().forms} <= named
    assert {("seam", str(seam)) for seam in SEAMS} <= named
    assert {("place", "early"), ("place", "late")} <= named


def test_a_deaf_model_is_told(make_workspace: MakeWorkspace) -> None:
    """Random weights do not decide by the field: nothing is trustworthy, however well methods agree."""
    profile = calibrate(make_workspace(), shipped_battery()[:6])
    assert profile.methods == {"direct": "recompute", "reasoned": "recompute"}
    assert max(profile.heard.values()) < 3


def test_a_model_that_cannot_rewrite(make_workspace: MakeWorkspace) -> None:
    """What it refuses is not measured; the rest is."""
    profile = calibrate(make_workspace("mamba"), shipped_battery()[:1])
    names = {one.name for one in profile.measured if one.what == "method"}
    assert not names & {"field", "selective@16", "suffix"}

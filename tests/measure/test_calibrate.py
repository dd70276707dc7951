"""Calibrating: what is chosen by which figures, and what is measured at all."""

from __future__ import annotations

import numpy as np

from notes_cli.config import shipped_model
from notes_cli.editing.methods import METHODS
from notes_cli.engine.options import ContextOptions
from notes_cli.measure.battery import shipped_battery
from notes_cli.measure.calibrate import CLASSES, SEAMS, _Found, _Tally, calibrate
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import shipped_wordings

from ..conftest import MakeWorkspace


def test_every_class_holds_methods() -> None:
    """What is chosen among exists, and no method is in two classes."""
    names = [name.partition("@")[0] for names in CLASSES for name in names]
    assert set(names) <= set(METHODS) and len(set(names)) == len(names)


def test_it_is_not_agreement_that_counts() -> None:
    """One case, ten times three ways: what is right by the truth of the case is told apart from what agrees."""
    logits = np.ones(3, np.float32)
    found = {name: _Found(choice, logits, 1, 0.1) for name, choice in (("erratum", "new"), ("field", "old"))}
    tally = _Tally()
    for _ in range(10):
        for name, one in found.items():
            tally.add("method", name, "direct", one, found["field"], "new")
        tally.add("method", "stale", "direct", found["field"], found["field"], "new")
    tally.add("method", "suffix", "direct", found["erratum"], found["field"], "new")  # in one case alone
    assert tally.right("method") == {"erratum": [True] * 10, "field": [False] * 10}
    measured = {one.name: (one.same, one.right) for one in tally.measured()}
    assert measured == {"erratum": (0, 10), "field": (10, 0), "stale": (10, 0), "suffix": (0, 1)}


def test_fields_decide_on_the_shipped_model() -> None:
    """On a few decisions: every method, wording, seam and place is measured, and nothing is chosen by so few."""
    told: list[tuple[int, int]] = []
    with Workspace(shipped_model(), ContextOptions(n_ctx=1024, n_threads=1)) as workspace:
        profile = calibrate(workspace, shipped_battery()[:4], lambda done, of: told.append((done, of)))
    assert told == [(done, 8) for done in range(1, 9)]
    assert profile.decisive["direct"] >= 3
    for way in ("direct", "reasoned"):
        assert profile.methods[way] == "erratum" and profile.verdicts[way].startswith("4 cases prove nothing")
        stale, recompute = profile.found("method", "stale", way), profile.found("method", "recompute", way)
        assert stale is not None and recompute is not None
        assert stale.same < stale.cases == recompute.same and stale.decoded < recompute.decoded
    named = {(one.what, one.name) for one in profile.measured}
    assert {("wording", name) for name in shipped_wordings().forms} <= named
    assert {("seam", str(seam)) for seam in SEAMS} <= named
    assert {("place", "early"), ("place", "late")} <= named


def test_a_deaf_model_is_told(make_workspace: MakeWorkspace) -> None:
    """Random weights do not decide by the field: nothing is proven, and the default stays."""
    profile = calibrate(make_workspace(), shipped_battery()[:6])
    assert profile.methods == {"direct": "erratum", "reasoned": "erratum"}
    assert max(profile.decisive.values()) < 3


def test_a_model_that_cannot_rewrite(make_workspace: MakeWorkspace) -> None:
    """What it refuses is not measured; the rest is."""
    profile = calibrate(make_workspace("mamba"), shipped_battery()[:1])
    names = {one.name for one in profile.measured if one.what == "method"}
    assert not names & {"field", "selective@16", "suffix"}

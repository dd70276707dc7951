"""Calibration: which settings are measured, and which are chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.config import shipped_model
from notes_cli.engine.options import ContextOptions
from notes_cli.library.profiles import CalibrationCheckpoint, Profile, step_name
from notes_cli.measure.battery import pairs, shipped_battery
from notes_cli.measure.calibrate import SEAMS, calibrate
from notes_cli.measure.composition import Decision, Tally
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import shipped_wordings

from ..conftest import MakeWorkspace


def test_it_is_not_agreement_that_counts() -> None:
    """One case, ten times in three ways: correctness counts, not agreement with the recompute."""
    logits = np.ones(3, np.float32)
    found = {name: Decision(choice, logits, 1, 0.1) for name, choice in (("erratum", "new"), ("field", "old"))}
    tally = Tally()
    for _ in range(10):
        for name, one in found.items():
            tally.add("method", name, "direct", one, found["field"], "new")
        tally.add("method", "stale", "direct", found["field"], found["field"], "new")
    tally.add("method", "suffix", "direct", found["erratum"], found["field"], "new")  # in one case alone
    assert tally.right("method") == {"erratum": [True] * 10, "field": [False] * 10, "stale": [False] * 10}
    measured = {one.name: (one.same, one.right) for one in tally.measured()}
    assert measured == {"erratum": (0, 10), "field": (10, 0), "stale": (10, 0), "suffix": (0, 1)}


def test_fields_decide_on_the_shipped_model() -> None:
    """On a few decisions: every method, wording, seam and place is measured, and none is chosen."""
    progress: list[tuple[int, int]] = []
    with Workspace(shipped_model(), ContextOptions(n_ctx=1024, n_threads=1)) as workspace:
        profile = calibrate(workspace, shipped_battery()[:4], lambda done, of: progress.append((done, of)))
    assert progress == [(done, 8) for done in range(1, 9)]
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


@pytest.mark.parametrize("kind", ["llama", pytest.param("lfm2", marks=pytest.mark.patches("recurrent"))])
def test_a_stopped_calibration_goes_on(make_workspace: MakeWorkspace, tmp_path: Path, kind: str) -> None:
    """After each step, with the figures of a single run; steps of other cases, versions or damage are not used."""
    cases, drawn = shipped_battery()[:2], pairs()[:1]
    whole = calibrate(make_workspace(kind), cases, None, drawn)
    profile, steps = tmp_path / "profiles" / "a.json", {"llama": 5, "lfm2": 6}[kind]
    measured: list[str] = []

    def stop_after(most: int) -> Profile:
        unfinished = CalibrationCheckpoint(profile, "this version")

        def keep(name: str, measure: Callable[[], Any]) -> Any:
            return unfinished.keep(name, lambda: (measured.append(name), measure())[1])

        def progress(done: int, of: int) -> None:
            if done == most:
                raise KeyboardInterrupt

        return calibrate(make_workspace(kind), cases, progress, drawn, keep)

    for most in range(1, steps + 1):
        with pytest.raises(KeyboardInterrupt):
            stop_after(most)
        assert len(measured) == most
    assert figures(stop_after(0)) == figures(whole) and len(measured) == steps == len(set(measured))
    kept = profile.parent / ".begun" / "a.jsonl"
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:-1]) + lines[-1][:9])  # as if the disk was full
    assert len(CalibrationCheckpoint(profile, "this version").found) == steps - 1
    assert not CalibrationCheckpoint(profile, "another version").found
    assert not {step_name("forms", 0, cases[0])} & {step_name("forms", 0, cases[1]), step_name("forms", 1, cases[0])}
    kept.write_bytes(b"\xff" * 99)
    assert not CalibrationCheckpoint(profile, "this version").found
    CalibrationCheckpoint(profile, "this version").forget()
    assert not kept.exists()


def figures(profile: Profile) -> list[tuple[object, ...]]:
    """All counts, without times."""
    rows = [(one.what, one.name, one.way, one.cases, one.same, one.right) for one in profile.measured]
    means = [(one.cosine, one.decoded) for one in profile.measured]
    return [*rows, *means, tuple(profile.decisive.items()), (profile.wording, profile.seam, profile.carry)]


def test_a_deaf_model_is_told(make_workspace: MakeWorkspace) -> None:
    """Decisions of random weights do not depend on the field: nothing is proven, and the default stays."""
    profile = calibrate(make_workspace(), shipped_battery()[:6])
    assert profile.methods == {"direct": "erratum", "reasoned": "erratum"}
    assert max(profile.decisive.values()) < 3


def test_a_model_that_cannot_rewrite(make_workspace: MakeWorkspace) -> None:
    """Unsupported methods are skipped; the others are measured."""
    profile = calibrate(make_workspace("mamba"), shipped_battery()[:1])
    names = {one.name for one in profile.measured if one.what == "method"}
    assert not names & {"field", "selective@16", "suffix"}

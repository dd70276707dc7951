"""What `notes calibrate` measures of a model, kept in build/: the same code measures the same model once."""

from __future__ import annotations

import hashlib
import time

from bench.experiments.keeping import ROOT, digest
from notes_cli.engine import system
from notes_cli.errors import Progress
from notes_cli.library.profiles import Profile, Profiles
from notes_cli.measure.battery import shipped_battery
from notes_cli.measure.calibrate import calibrate
from notes_cli.measure.composition import measure_pairs
from notes_cli.measure.pairs import pairs
from notes_cli.runtime.workspace import Workspace

KEPT = ROOT / "build" / "calibrations"


def profile_of(workspace: Workspace, told: Progress | None = None) -> Profile:
    """Over the battery and the pairs that ship."""
    profiles = _kept(workspace)
    cache = workspace.context.options.cache
    found = profiles.find(workspace.identity, cache)
    if found is None:
        profiles.save(calibrate(workspace, shipped_battery(), told, pairs()), "bench.experiments")
        found = profiles.find(workspace.identity, cache)
        assert found
    return found


def seconds(workspace: Workspace) -> float:
    """About how long that will take: by its first decision and its first pair."""
    if _kept(workspace).find(workspace.identity, workspace.context.options.cache):
        return 0.0
    started = time.monotonic()
    calibrate(workspace, shipped_battery()[:1])
    decided = time.monotonic()
    measure_pairs(workspace, pairs()[:1])
    return (decided - started) * len(shipped_battery()) + (time.monotonic() - decided) * len(pairs())


def _kept(workspace: Workspace) -> Profiles:
    """A folder for this code and engine, and the settings that no profile tells apart."""
    code = digest(ROOT / name for name in ("notes_cli", "prompts", "native"))
    which = hashlib.sha256(f"{code} {system.build()} {workspace.options.flash_attention}".encode()).hexdigest()
    return Profiles(KEPT / which[:16])

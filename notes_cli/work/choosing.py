"""Choosing: the edit method, the wording, the seam and the place that hold where the user names none.

By the profile that `notes calibrate` wrote of this model; without one, by what is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from notes_cli.editing.change import Change
from notes_cli.editing.methods import DEFAULT_METHOD, Method
from notes_cli.errors import NotesError, UnsupportedError
from notes_cli.library.profiles import Profile, Profiles
from notes_cli.work.workspace import Workspace

AUTO = "auto"
# Measured on the shipped model (make experiments, docs/results.md).
DEFAULT_SEAM = 1  # tokens recomputed at the start of a skill behind another left context than it was compiled behind
DEFAULT_PLACE = "early"
NEAR = 32  # tokens: with no more behind a change, all of them are decoded, which is exact and costs as an erratum does


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where the user names nothing, and why."""

    method: Method
    wording: str | None
    seam: int
    place: str
    why: str


UNMEASURED = Defaults(
    *(Method(DEFAULT_METHOD), None, DEFAULT_SEAM, DEFAULT_PLACE),
    f"{DEFAULT_METHOD}: this model has not been measured (notes calibrate), so the safe one",
)


def defaults(workspace: Workspace, *, think: bool = False) -> Defaults:
    """By the profile of the workspace's model. `think`: decisions come after a chain of thought."""
    profile = _profile(workspace)
    if profile is None:
        return UNMEASURED
    way = "reasoned" if think else "direct"
    try:
        method = Method.parse(profile.methods[way])
    except NotesError as error:
        raise NotesError(f"the profile of this model: {error}. Measure again: notes calibrate") from error
    return Defaults(method, profile.wording, profile.seam, profile.place, _why(profile, way))


def near(change: Change) -> bool:
    """Whether so little stands behind the first changed token that all of it is better decoded."""
    return len(change.tokens) - change.patches[0].first <= NEAR


def choose(workspace: Workspace, changes: Sequence[Change], *, think: bool = False) -> tuple[Method, str]:
    """The method for these changes of spliced skills, one that this model can, and why."""
    found = defaults(workspace, think=think)
    method, why = found.method, found.why
    if changes and all(near(change) for change in changes):
        method = Method("suffix")
        why = f"suffix: no more than {NEAR} tokens stand behind the change, and all of them are decoded"
    reason = workspace.context.supports("rewrite")
    if reason is None or not method.touches or method.name == "recompute":
        return method, why
    if found.method.name == "recompute":
        return found.method, found.why
    return Method("erratum"), f"erratum: {method} is not possible: {reason}"


def _profile(workspace: Workspace) -> Profile | None:
    try:
        identity = workspace.identity
    except UnsupportedError:  # its rows cannot be kept, so nothing was measured
        return None
    return Profiles(workspace.paths.profiles).find(identity, workspace.context.options.cache)


def _why(profile: Profile, way: str) -> str:
    name, day = profile.methods[way], profile.created[:10]
    measured = profile.found("method", name, way)
    if name == "recompute" or measured is None:
        return f"recompute: no method is trustworthy on this model (notes calibrate, {day})"
    return f"{name}: {measured.same} of {measured.cases} decisions as a recompute's (notes calibrate, {day})"

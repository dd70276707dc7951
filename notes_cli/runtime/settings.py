"""Choosing: the edit method, the wording, the seam and the place that hold where the user names none.

By the profile that a calibration wrote of this model; without one, by what is safe.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from notes_cli.editing.amend import refusal
from notes_cli.editing.change import Change
from notes_cli.editing.methods import ERRATUM, FIELD_ERRATUM, SUFFIX, Method
from notes_cli.errors import Help, NotesError, Notice, OutdatedError, Remedy, UnsupportedError
from notes_cli.library.profiles import Composition, Profile, Profiles, damaged
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import shipped_wordings
from notes_cli.text.names import name_of

AUTO = "auto"
# Measured on tiny models (docs/findings.md).
DEFAULT_SEAM = 1  # tokens recomputed at the start of a skill that follows another context than at compile time
DEFAULT_PLACE = "early"
NEAR = 32  # tokens: with no more after a change, all of them are decoded, which is exact and costs as an erratum does


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where the user names nothing, and why."""

    method: Method
    wording: str | None
    seam: int
    place: str
    why: str
    note: NotesError | None = None  # where a profile is there and not followed: why
    composition: Composition | None = None  # what was measured of skills that were compiled apart


UNMEASURED = Defaults(
    *(FIELD_ERRATUM, None, DEFAULT_SEAM, DEFAULT_PLACE),
    f"{FIELD_ERRATUM}: the default for a model that calibrate has not measured",
)


def parse_method(given: Method | str | None) -> Method | None:
    """None for the one that was measured to be best. Raise NotesError for one that there is not."""
    if not isinstance(given, str):
        return given
    return None if given == AUTO else Method.parse(given, also=(AUTO,))


def defaults(workspace: Workspace, *, think: bool = False) -> Defaults:
    """By the profile of the workspace's model. `think`: decisions come after a chain of thought. Raise NotesError for
    one that is damaged."""
    try:
        profile = _profile(workspace)
    except OutdatedError as error:
        return replace(UNMEASURED, note=error)
    if profile is None:
        return UNMEASURED
    way = "reasoned" if think else "direct"
    method = Method.parse(profile.methods[way])
    chosen = method, profile.wording, profile.seam, profile.place, _why(profile, way)
    return Defaults(*chosen, composition=profile.composition)


def repair(way: str, names: Sequence[str], *, these: bool = False) -> Remedy:
    """What composes skills of these names in another way. `these`: it was measured with them, not with made-up ones, of
    which the first had values and the second the rules for them."""
    kind, _, tokens = way.partition("@")
    if kind == "reversed":
        return Help.OTHER_ORDER(names=[*reversed(names)]) if these else Help.RULES_FIRST()
    if kind == "seam":
        return Help.LONGER_SEAM(tokens=int(tokens))
    if kind == "together":
        return Help.COMPILE_TOGETHER(names=names, name=name_of("-".join(names)))
    return Help.DECODE(names=names[1:]) if kind == "suffix" else Help.DECODE_ALL()


def composition_warning(
    found: Composition | None, names: Sequence[str], decoded: Collection[str], seam: int
) -> Notice | None:
    """What to say where skills of these names are composed and that fails on this model; None where it does not, or
    where what repairs it is done already. `decoded`: those that are not spliced."""
    if found is None or found.verdict != "fails" or len(set(names[1:]) - set(decoded)) == 0:
        return None
    if found.repair.startswith("seam@") and seam >= int(found.repair[len("seam@") :]):
        return None
    what = "on this model questions that need several skills fail where each was compiled apart (measured)"
    return Notice(what, repair(found.repair, names), warning=True)


def few_tokens_follow(change: Change) -> bool:
    """Whether so little follows the first changed token that all of it is better decoded."""
    return len(change.tokens) - change.patches[0].first <= NEAR


def choose(
    workspace: Workspace, changes: Sequence[Change], *, think: bool = False, stated: bool = False
) -> tuple[Method, str]:
    """The method for these changes of spliced skills, one that this model can, and why. `stated`: an erratum was asked
    for, so only a method that appends one."""
    found = defaults(workspace, think=think)
    if stated and not found.method.record.appends_erratum:
        found = replace(found, method=FIELD_ERRATUM, why=f"{FIELD_ERRATUM}: an erratum was asked for")
    method, why = found.method, found.why
    if not stated and changes and all(few_tokens_follow(change) for change in changes):
        method, why = SUFFIX, f"{SUFFIX}: no more than {NEAR} tokens follow the change, and all of them are decoded"
    reason = refusal(workspace.context, method, changes=changes)
    if reason is None:
        return method, why
    if found.method.record.edits_rows and refusal(workspace.context, found.method, changes=changes) is None:
        return found.method, found.why
    return ERRATUM, f"{ERRATUM}: {method} is not possible: {reason}"


def _profile(workspace: Workspace) -> Profile | None:
    try:
        identity = workspace.identity
    except UnsupportedError:  # its rows cannot be kept, so nothing was measured
        return None
    profiles, cache = Profiles(workspace.paths.profiles), workspace.context.options.cache
    profile = profiles.find(identity, cache)
    if profile:
        check_names(profile, profiles.path(identity, cache))
    return profile


def check_names(profile: Profile, path: Path) -> None:
    """Raise NotesError for a method or a wording that there is not: the profile is another version's, or damaged."""
    for way, name in profile.methods.items():
        try:
            Method.parse(name)
        except NotesError as error:
            raise damaged(path, f"methods.{way}", name, "an edit method") from error
    forms = list(shipped_wordings().forms)
    if profile.wording not in forms:
        raise damaged(path, "wording", profile.wording, " or ".join(forms))


def _why(profile: Profile, way: str) -> str:
    return f"{profile.methods[way]}: {profile.verdicts[way]} (calibrate, {profile.created[:10]})"

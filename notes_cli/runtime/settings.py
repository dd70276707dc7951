"""Chooses the edit method, wording, seam and place of skills by calibration, else safe defaults."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from notes_cli.editing.change import Change
from notes_cli.editing.methods import AUTO, ERRATUM, FIELD_ERRATUM, SUFFIX, Method, refusal
from notes_cli.errors import Help, NotesError, Notice, OutdatedError, Remedy, UnsupportedError
from notes_cli.library.profiles import Composition, Profile, Profiles, damaged
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import shipped_wordings
from notes_cli.text.names import name_of

# Measured on tiny models (docs/findings.md).
DEFAULT_SEAM = 1  # tokens recomputed at the start of a skill that follows another context than at compile time
RUN_SEAM = 16  # likewise at the start of a run (runtime/token_runs.py; docs/serving.md)
DEFAULT_PLACE = "early"
NEAR = 32  # with at most so many tokens after a change all are decoded, which is exact and costs as much as an erratum


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values used where the user names none, and the reason."""

    method: Method
    wording: str | None
    seam: int
    place: str
    why: str
    note: NotesError | None = None  # reason why an existing profile is not used
    composition: Composition | None = None  # measurement of separately compiled skills in one prompt


UNMEASURED = Defaults(
    *(FIELD_ERRATUM, None, DEFAULT_SEAM, DEFAULT_PLACE),
    f"{FIELD_ERRATUM}: the default for a model that calibrate has not measured",
)


def parse_method(name: Method | str | None) -> Method | None:
    """Parse a method; None for the default. Raises NotesError for an unknown name."""
    if not isinstance(name, str):
        return name
    return AUTO if name == str(AUTO) else Method.parse(name, also=(str(AUTO),))


def defaults(workspace: Workspace, *, think: bool = False) -> Defaults:
    """Return the defaults of the model's profile. `think`: for decisions after reasoning. Raises NotesError for a
    damaged profile."""
    profiles, cache = Profiles(workspace.paths.profiles), workspace.context.options.cache
    try:
        identity = workspace.identity
        profile = profiles.find(identity, cache)
        if profile:
            check_names(profile, profiles.path(identity, cache))
    except UnsupportedError:  # its K/V cannot be read, so nothing was measured
        return UNMEASURED
    except OutdatedError as error:
        return replace(UNMEASURED, note=error)
    if profile is None:
        return UNMEASURED
    way = "reasoned" if think else "direct"
    method = Method.parse(profile.methods[way])
    chosen = method, profile.wording, profile.seam, profile.place, _why(profile, way)
    return Defaults(*chosen, composition=profile.composition)


def repair(way: str, names: Sequence[str], *, these: bool = False) -> Remedy:
    """Return the remedy that composes these skills in another way. `these`: measured with these skills, not with sample
    ones of which the first had values and the second rules for them."""
    kind, _, tokens = way.partition("@")
    if kind == "reversed":
        return Help.OTHER_ORDER(names=[*reversed(names)]) if these else Help.RULES_FIRST()
    if kind == "seam":
        return Help.LONGER_SEAM(tokens=int(tokens))
    if kind == "together":
        return Help.COMPILE_TOGETHER(names=names, name=name_of("-".join(names)))
    return Help.DECODE(names=names[1:]) if kind == "suffix" else Help.DECODE_ALL()


def composition_warning(
    composition: Composition | None, names: Sequence[str], decoded: Collection[str], seam: int
) -> Notice | None:
    """Return a warning if these skills are composed and that fails on this model; None if not, or if its remedy is
    applied. `decoded`: skills that are not spliced."""
    if composition is None or composition.verdict != "fails" or len(set(names[1:]) - set(decoded)) == 0:
        return None
    if composition.repair.startswith("seam@") and seam >= int(composition.repair[len("seam@") :]):
        return None
    text = "on this model questions that need several skills fail where each was compiled apart (measured)"
    return Notice(text, repair(composition.repair, names), warning=True)


def few_tokens_follow(change: Change) -> bool:
    """True if so few tokens follow the first changed one that all are better decoded."""
    return len(change.tokens) - change.patches[0].first <= NEAR


def choose(
    workspace: Workspace,
    changes: Sequence[Change],
    default: Defaults | None = None,
    *,
    think: bool = False,
    stated: bool = False,
) -> tuple[Method, str]:
    """Return a method that this model supports for these changes, and the reason. `default`: the model's defaults, if
    they were read already. `stated`: an erratum was requested, so it must append one."""
    default = default or defaults(workspace, think=think)
    if stated and not default.method.record.appends_erratum:
        default = replace(default, method=FIELD_ERRATUM, why=f"{FIELD_ERRATUM}: an erratum was asked for")
    method, why = default.method, default.why
    if not stated and changes and all(few_tokens_follow(change) for change in changes):
        method, why = SUFFIX, f"{SUFFIX}: no more than {NEAR} tokens follow the change, and all of them are decoded"
    reason = refusal(workspace.context, method, changes=changes)
    if reason is None:
        return method, why
    if default.method.record.edits_rows and refusal(workspace.context, default.method, changes=changes) is None:
        return default.method, default.why
    return ERRATUM, f"{ERRATUM}: {method} is not possible: {reason}"


def check_names(profile: Profile, path: Path) -> None:
    """Raise NotesError for an unknown method or wording: the profile is another version's, or damaged."""
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

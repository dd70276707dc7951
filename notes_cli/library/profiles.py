"""Profiles: what a calibration measured of a model, a JSON file each, described in docs/format.md.

A profile holds for one model with one rotation and one type of cache. It says which edit method to trust; who follows
it is decided elsewhere.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from notes_cli.engine.identity import Identity
from notes_cli.errors import Help, NotesError, OutdatedError, Remedy, reason
from notes_cli.library.safe_files import check_private, check_private_file, replacing
from notes_cli.text.messages import PLACES

FORMAT = 2  # changes when an older version would read a newer profile wrongly; 1 chose by agreement, right or wrong
LONGEST_SEAM = 64
WAYS = ("direct", "reasoned")
# Skills that were compiled apart answer as those that are read together, or do not; the model does not answer such
# questions at all; neither is proven.
VERDICTS = ("holds", "fails", "unable", "open")
# Skills whose state is carried answer as those that are decoded, do not, or too few answers tell.
CARRIED = ("holds", "fails", "open")
REPAIR = re.compile(r"reversed|seam@[1-9][0-9]?|together|suffix|recompute")


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of doing it over the cases of a battery.

    `same` counts decisions as the full recompute's, `right` those that are right, both of `cases`; `cosine` is that of
    the logits against the recompute, `decoded` tokens and `ms` milliseconds until the decision, all means.
    """

    what: str  # method, wording, seam, place, composition
    name: str
    way: str  # direct, reasoned; of a composition how many skills the questions need: one, two
    cases: int
    same: int
    right: int
    cosine: float
    decoded: float
    ms: float

    @property
    def agreement(self) -> float:
        return self.same / self.cases if self.cases else 0.0


@dataclass(frozen=True, slots=True)
class Composition:
    """What came of questions that need two skills which were compiled apart (measure/composition.py)."""

    verdict: str  # one of VERDICTS
    repair: str  # where it fails the cheapest way that does not, one of REPAIR; else empty
    why: str  # for people, with counts and intervals


@dataclass(frozen=True, slots=True)
class Carried:
    """What came of skills through which a recurrent state was carried (measure/carried_state.py)."""

    verdict: str  # one of CARRIED
    why: str  # for people, with counts and intervals


@dataclass(frozen=True, slots=True)
class Profile:
    """What to do on this model, and what was measured for that."""

    identity: Identity
    cache: str  # K and V as the cache keeps them, "q8_0/f16"
    cases: int
    decisive: dict[str, int]  # by way: cases in which a full recompute decides by the field
    methods: dict[str, str]  # by way: the edit method to use
    wording: str
    seam: int
    place: str
    measured: Sequence[Measured]
    created: str = ""
    verdicts: dict[str, str] = field(default_factory=lambda: dict.fromkeys(WAYS, ""))  # by way: why that method
    composition: Composition | None = None  # None: not measured
    carry: Carried | None = None  # None: not measured, or there is no recurrent state

    def __repr__(self) -> str:
        methods = ", ".join(f"{way}: {method}" for way, method in self.methods.items())
        return f"Profile({methods}, {self.cases} cases, cache {self.cache})"

    @property
    def carries(self) -> bool:
        """Whether a recurrent state may be carried through skills."""
        return self.carry is not None and self.carry.verdict == "holds"

    def as_dict(self) -> dict[str, Any]:
        """As files and JSON documents have it."""
        return {{"decisive": "heard"}.get(key, key): value for key, value in asdict(self).items()}

    def found(self, what: str, name: str, way: str = "direct") -> Measured | None:
        """What was measured of one way of doing it."""
        return next((one for one in self.measured if (one.what, one.name, one.way) == (what, name, way)), None)


class Profiles:
    """The profiles of one user. The folder appears with the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, identity: Identity, cache: str) -> Path:
        check_private(self.folder)
        path = self.folder / f"{identity.key}-{cache.replace('/', '-')}.json"
        check_private_file(path)
        return path

    def find(self, identity: Identity, cache: str) -> Profile | None:
        """The profile of this model in this cache, None without one. Raise OutdatedError for one that an older version
        wrote, and NotesError for one that cannot be read, or is not this model's."""
        path = self.path(identity, cache)
        profile = self.read(path) if path.exists() else None
        if profile is None:
            return None
        differences = profile.identity.differences(identity, "measured")
        if profile.cache != cache:
            differences.append(f"measured in a cache of {profile.cache[:20]!r}, this one is {cache}")
        if differences:
            raise NotesError(f"{path} was {'; '.join(differences)}", _remedy(path))
        return profile

    def read(self, path: Path) -> Profile:
        """The profile in a file. Raise OutdatedError for one of an older format, NotesError for one that cannot be
        read."""
        try:
            data = json.loads(path.read_bytes())
            version = _count(data, "format")
            if version > FORMAT:
                raise NotesError(f"{path} has format {version}, this version of notes reads {FORMAT}", "Update notes")
            if version < FORMAT:
                raise OutdatedError(
                    f"{path} was written by an older version, which chose by agreement with a recompute, right or "
                    "wrong, and is not used",
                    _remedy(path),
                )
            return _profile(data)
        except OSError as error:
            raise NotesError(f"cannot read {path}: {reason(error)}") from error
        except _BadError as error:
            raise damaged(path, *error.args) from error
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            raise NotesError(f"{path} is damaged: it is not a profile", _remedy(path)) from error

    def names(self) -> list[str]:
        """The names of all profiles: those of their files, without the ending."""
        check_private(self.folder)
        try:
            return sorted(path.stem for path in self.folder.glob("*.json"))
        except OSError as error:
            raise NotesError(f"cannot read {self.folder}: {reason(error)}") from error

    def named(self, name: str) -> Path:
        """The file of the profile of that name, or of the one whose name begins so. Raise NotesError for none."""
        names = self.names()
        found = [one for one in names if one == name] or [one for one in names if name and one.startswith(name)]
        if len(found) != 1:
            what = f"several profiles have a name that begins with {name!r}" if found else f"no profile {name!r}"
            raise NotesError(what, Help.LIST_PROFILES())
        path = self.folder / f"{found[0]}.json"
        check_private_file(path)
        return path

    def remove(self, name: str) -> Path:
        """Remove a profile; return where it was."""
        path = self.named(name)
        try:
            path.unlink()
        except OSError as error:
            raise NotesError(f"cannot remove {path}: {reason(error)}") from error
        return path

    def save(self, profile: Profile, writer: str) -> Path:
        """Write the profile in place of an older one. Raise NotesError if that cannot be."""
        path = self.path(profile.identity, profile.cache)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        data = {"format": FORMAT, "writer": writer, **profile.as_dict(), "created": profile.created or now}
        try:
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise NotesError(f"cannot write {path}: {reason(error)}. Nothing was changed") from error
        return path


def damaged(path: Path, key: str, value: object, must: str) -> NotesError:
    """What to raise for a value that a profile must not have: where it is, and what to do."""
    found = "missing" if value is None else repr(value)[:60]
    return NotesError(f"{path} is damaged: {key} is {found}, it must be {must}", _remedy(path))


def _remedy(path: Path) -> Remedy:
    return Help.MEASURE_AGAIN(name=path.stem)


class _BadError(Exception):
    """A key, its value, and what it must be."""


def _profile(data: dict[str, Any]) -> Profile:
    """Raise _BadError, or what a value of another type raises, where the data is no profile: it decides how answers
    come about."""
    cases = _count(data, "cases")
    decisive, methods, verdicts = (_dict(data, key) for key in ("heard", "methods", "verdicts"))
    try:
        identity = Identity.from_dict(_dict(data, "identity"))
    except KeyError as error:
        raise _BadError(f"identity.{error.args[0]}", None, "text") from error
    measured = data.get("measured")
    if not isinstance(measured, list):
        raise _BadError("measured", measured, "a list")
    return Profile(
        identity=identity,
        cache=_text(data, "cache"),
        cases=cases,
        decisive={way: _count(decisive, way, cases, "heard.") for way in WAYS},
        methods={way: _text(methods, way, under="methods.") for way in WAYS},
        wording=_text(data, "wording"),
        seam=_count(data, "seam", LONGEST_SEAM),
        place=_text(data, "place", PLACES),
        measured=tuple(_measured(one, number) for number, one in enumerate(measured)),
        created=_text(data, "created"),
        verdicts={way: _text(verdicts, way, under="verdicts.") for way in WAYS},
        composition=_composition(data),
        carry=_carried(data),
    )


def _composition(data: dict[str, Any]) -> Composition | None:
    """None where it was not measured: earlier versions did not."""
    if data.get("composition") is None:
        return None
    found = _dict(data, "composition")
    verdict, repair, why = (
        _text(found, "verdict", VERDICTS, "composition."),
        *(_text(found, key, under="composition.") for key in ("repair", "why")),
    )
    if (verdict == "fails") != bool(REPAIR.fullmatch(repair)) or (repair and verdict != "fails"):
        raise _BadError("composition.repair", repair, "a way of composing where it fails, else empty")
    return Composition(verdict, repair, why)


def _carried(data: dict[str, Any]) -> Carried | None:
    """None where it was not measured: earlier versions did not."""
    if data.get("carry") is None:
        return None
    found = _dict(data, "carry")
    return Carried(_text(found, "verdict", CARRIED, "carry."), _text(found, "why", under="carry."))


def _measured(data: Any, number: int) -> Measured:
    under = f"measured[{number}]."
    if not isinstance(data, dict):
        raise _BadError(under[:-1], data, "an object")
    cases = _count(data, "cases", under=under)
    what, name, way = (_text(data, key, under=under) for key in ("what", "name", "way"))
    same, right = (_count(data, key, cases, under) for key in ("same", "right"))
    near, decoded, ms = (_figure(data, key, under) for key in ("cosine", "decoded", "ms"))
    return Measured(what, name, way, cases, same, right, near, decoded, ms)


def _dict(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise _BadError(key, value, "an object")
    return value


def _text(data: dict[str, Any], key: str, known: Sequence[str] = (), under: str = "") -> str:
    value = data.get(key)
    if not isinstance(value, str) or (known and value not in known):
        raise _BadError(under + key, value, " or ".join(known) or "text")
    return value


def _count(data: dict[str, Any], key: str, most: int | None = None, under: str = "") -> int:
    value = data.get(key)
    if type(value) is not int or value < 0 or (most is not None and value > most):
        raise _BadError(under + key, value, "a whole number from 0" + ("" if most is None else f" to {most}"))
    return value


def _figure(data: dict[str, Any], key: str, under: str) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _BadError(under + key, value, "a number")
    return float(value)

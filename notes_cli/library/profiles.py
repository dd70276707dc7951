"""Reads and writes calibration profiles: measured settings of a model, one JSON file each (docs/format.md).

A profile is valid for one model with one rotation and one type of K/V cache. It names the edit method to use;
runtime/resolve.py applies it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from notes_cli.engine.segment import Identity
from notes_cli.errors import Help, NotesError, OutdatedError, Remedy, reason
from notes_cli.library.safe_files import check_private, check_private_file, make_private, replacing
from notes_cli.library.segment_files import CHECKPOINTS
from notes_cli.text.messages import PLACES

FORMAT = 3  # changes when an older version would misread a newer profile
LONGEST_SEAM = 64
WAYS = ("direct", "reasoned")
# Skills compiled separately give the same answers as skills prefilled together; they do not; the model cannot answer
# such questions at all; too few answers to decide.
VERDICTS = ("holds", "fails", "unable", "open")
# Skills with carried state give the same answers as decoded ones; they do not; too few answers to decide.
CARRIED = ("holds", "fails", "open")
REPAIR = re.compile(r"reversed|seam@[1-9][0-9]?|together|suffix|recompute")


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one variant (a method, a wording, a seam ...) over the cases of a battery.

    Of `cases`, `same` decisions equal the full recompute's, and `right` ones are right. Means: `cosine` of the logits
    with the recompute's, `decoded` tokens and `ms` milliseconds until the decision.
    """

    what: str  # method, wording, seam, place, composition
    name: str
    way: str  # direct, reasoned; of a composition the number of skills that questions need: one, two
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
    """Result of questions that need two separately compiled skills (measure/composition.py)."""

    verdict: str  # one of VERDICTS
    repair: str  # if the verdict is "fails", the cheapest remedy (REPAIR); else empty
    why: str  # sentence with counts and intervals


@dataclass(frozen=True, slots=True)
class Carried:
    """Result of skills through which a recurrent state was carried (measure/composition.py)."""

    verdict: str  # one of CARRIED
    why: str  # sentence with counts and intervals


@dataclass(frozen=True, slots=True)
class Profile:
    """Calibrated settings of a model, with the measurements."""

    identity: Identity
    cache: str  # types of K and V in the cache, "q8_0/f16"
    cases: int
    decisive: dict[str, int]  # by way: cases in which a full recompute decides by the field
    methods: dict[str, str]  # by way: the edit method to use
    wording: str
    seam: int
    place: str
    measured: Sequence[Measured]
    created: str = ""
    verdicts: dict[str, str] = field(default_factory=lambda: dict.fromkeys(WAYS, ""))  # by way: reason for the method
    composition: Composition | None = None  # None: not measured
    carry: Carried | None = None  # None: not measured, or no recurrent state

    def __repr__(self) -> str:
        methods = ", ".join(f"{way}: {method}" for way, method in self.methods.items())
        return f"Profile({methods}, {self.cases} cases, cache {self.cache})"

    @property
    def carries(self) -> bool:
        """True if a recurrent state may be carried through skills."""
        return self.carry is not None and self.carry.verdict == "holds"

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as JSON data."""
        return asdict(self)

    def found(self, what: str, name: str, way: str = "direct") -> Measured | None:
        """Return the measurement of one variant, if there is one."""
        return next((item for item in self.measured if (item.what, item.name, item.way) == (what, name, way)), None)


class Profiles:
    """The profiles of a user, in a folder that is created with the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, identity: Identity, cache: str) -> Path:
        check_private(self.folder)
        path = self.folder / f"{identity.key}-{cache.replace('/', '-')}.json"
        check_private_file(path)
        return path

    def find(self, identity: Identity, cache: str) -> Profile | None:
        """Return the profile of this model in this cache, None without one. Raises OutdatedError for one of an older
        version, NotesError for one that cannot be read, or of another model."""
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
        """Return the profile in a file. Raises OutdatedError for an older format, NotesError if it cannot be read."""
        try:
            data = json.loads(path.read_bytes())
            version = _count(data, "format")
            if version > FORMAT:
                raise NotesError(f"{path} has format {version}, this version of notes reads {FORMAT}", "Update notes")
            if version < FORMAT:
                raise OutdatedError(f"{path} was written by an older version, and is not used", _remedy(path))
            return _profile(data)
        except OSError as error:
            raise NotesError(f"cannot read {path}: {reason(error)}") from error
        except _BadError as error:
            raise damaged(path, *error.args) from error
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            raise NotesError(f"{path} is damaged: it is not a profile", _remedy(path)) from error

    def names(self) -> list[str]:
        """Return the names of all profiles: file names without the suffix."""
        check_private(self.folder)
        try:
            return sorted(path.stem for path in self.folder.glob("*.json"))
        except OSError as error:
            raise NotesError(f"cannot read {self.folder}: {reason(error)}") from error

    def named(self, name: str) -> Path:
        """Return the file of the profile of that name, or of the only one whose name begins with it. Raises NotesError
        without one."""
        names = self.names()
        matches = [known for known in names if known == name]
        matches = matches or [known for known in names if name and known.startswith(name)]
        if len(matches) != 1:
            message = f"several profiles have a name that begins with {name!r}" if matches else f"no profile {name!r}"
            raise NotesError(message, Help.LIST_PROFILES())
        path = self.folder / f"{matches[0]}.json"
        check_private_file(path)
        return path

    def remove(self, name: str) -> Path:
        """Remove a profile; return its path."""
        path = self.named(name)
        try:
            path.unlink()
        except OSError as error:
            raise NotesError(f"cannot remove {path}: {reason(error)}") from error
        return path

    def save(self, profile: Profile, writer: str) -> Path:
        """Write the profile, replacing an older one. Raises NotesError if it cannot be written."""
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
    """Return the error for an invalid value in a profile."""
    shown = "missing" if value is None else repr(value)[:60]
    return NotesError(f"{path} is damaged: {key} is {shown}, it must be {must}", _remedy(path))


def _remedy(path: Path) -> Remedy:
    return Help.MEASURE_AGAIN(name=path.stem)


class _BadError(Exception):
    """A key, its invalid value, and the values that it may have."""


def _profile(data: dict[str, Any]) -> Profile:
    """Parse a profile strictly, because it decides how prompts are built. Raises _BadError, or a Python error for data
    of another shape."""
    cases = _count(data, "cases")
    decisive, methods, verdicts, texts = (_dict(data, key) for key in ("decisive", "methods", "verdicts", "identity"))
    try:
        identity = Identity.from_dict({key: _text(texts, key, under="identity.") for key in texts})
    except KeyError as error:
        raise _BadError(f"identity.{error.args[0]}", None, "text") from error
    measured = data.get("measured")
    if not isinstance(measured, list):
        raise _BadError("measured", measured, "a list")
    return Profile(
        identity=identity,
        cache=_text(data, "cache"),
        cases=cases,
        decisive={way: _count(decisive, way, cases, "decisive.") for way in WAYS},
        methods={way: _text(methods, way, under="methods.") for way in WAYS},
        wording=_text(data, "wording"),
        seam=_count(data, "seam", LONGEST_SEAM),
        place=_text(data, "place", PLACES),
        measured=tuple(_measured(item, number) for number, item in enumerate(measured)),
        created=_text(data, "created"),
        verdicts={way: _text(verdicts, way, under="verdicts.") for way in WAYS},
        composition=_composition(data),
        carry=_carried(data),
    )


def _composition(data: dict[str, Any]) -> Composition | None:
    if data.get("composition") is None:
        return None
    entry = _dict(data, "composition")
    verdict, repair, why = (
        _text(entry, "verdict", VERDICTS, "composition."),
        *(_text(entry, key, under="composition.") for key in ("repair", "why")),
    )
    if (verdict == "fails") != bool(REPAIR.fullmatch(repair)) or (repair and verdict != "fails"):
        raise _BadError("composition.repair", repair, "a way of composing where it fails, else empty")
    return Composition(verdict, repair, why)


def _carried(data: dict[str, Any]) -> Carried | None:
    if data.get("carry") is None:
        return None
    entry = _dict(data, "carry")
    return Carried(_text(entry, "verdict", CARRIED, "carry."), _text(entry, "why", under="carry."))


def _measured(data: Any, number: int) -> Measured:
    under = f"measured[{number}]."
    if not isinstance(data, dict):
        raise _BadError(under[:-1], data, "an object")
    cases = _count(data, "cases", under=under)
    what, name, way = (_text(data, key, under=under) for key in ("what", "name", "way"))
    same, right = (_count(data, key, cases, under) for key in ("same", "right"))
    cosine, decoded, ms = (_figure(data, key, under) for key in ("cosine", "decoded", "ms"))
    return Measured(what, name, way, cases, same, right, cosine, decoded, ms)


def _dict(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise _BadError(key, value, "an object")
    return value


def _text(data: dict[str, Any], key: str, known: Sequence[str] = (), under: str = "") -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value.isprintable() or (known and value not in known):
        raise _BadError(under + key, value, " or ".join(known) or "text in one line")
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


# Checkpoints of calibrations.

# Takes the name of a step and the function that measures it; returns its result as JSON data.
Keep = Callable[[str, Callable[[], Any]], Any]


def step_name(kind: str, number: int, thing: Any) -> str:
    """Return the name of a step on a case or a pair, with a digest of its compared fields."""
    return f"{kind} {number} {hashlib.sha256(repr(_content(thing)).encode()).hexdigest()[:16]}"


def _content(thing: Any) -> Any:
    if is_dataclass(thing):
        return [_content(getattr(thing, field.name)) for field in fields(thing) if field.compare]
    return [*map(_content, thing)] if isinstance(thing, tuple) else thing


def keep_nothing(name: str, measure: Callable[[], Any]) -> Any:
    """Run a step without a checkpoint."""
    return measure()


class CalibrationCheckpoint:
    """The finished steps of a calibration."""

    def __init__(self, profile: Path, kind: str) -> None:
        """`profile`: its future path. `kind`: the conditions of the calibration; steps of another kind are ignored.
        Raises NotesError for a file of another user."""
        self._path = profile.parent / CHECKPOINTS / f"{profile.stem}.jsonl"
        self._kind, self.found = kind, dict[str, Any]()
        check_private(self._path.parent)
        check_private_file(self._path)
        with suppress(OSError, ValueError, TypeError, RecursionError):
            first, *lines = self._path.read_text(encoding="utf-8").splitlines()
            if json.loads(first) == kind:
                for line in lines:
                    name, result = json.loads(line)  # an incomplete last line ends the loop
                    self.found[name] = result

    def keep(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the result of a step, measuring it unless the checkpoint has it."""
        if name not in self.found:
            result = measure()
            with suppress(OSError):  # saving the profile will fail, too, with the reason
                self._append(name, result)
            self.found[name] = result
        return self.found[name]

    def _append(self, name: str, result: Any) -> None:
        begins = not self.found
        if begins:
            make_private(self._path.parent)
        with self._path.open("w" if begins else "a", encoding="utf-8") as file:
            lines = [*([self._kind] if begins else []), [name, result]]
            file.write("".join(f"{json.dumps(line)}\n" for line in lines))

    def forget(self) -> None:
        """Remove the checkpoint once the profile is saved."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def calibration_checkpoints(profiles: Path) -> Iterator[Path]:
    """Yield the checkpoints of unfinished calibrations."""
    with suppress(OSError):
        yield from sorted((profiles / CHECKPOINTS).glob("*.jsonl"))

"""Profiles: what `notes calibrate` measured of a model, a JSON file each, described in docs/format.md.

A profile holds for one model with one rotation and one type of cache. It says which edit method to trust; who follows
it is decided elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from notes_cli.engine.identity import Identity
from notes_cli.errors import NotesError, reason
from notes_cli.library import private
from notes_cli.library.atomic import replacing
from notes_cli.text.prompt import PLACES

FORMAT = 1  # changes when an older notes would read a newer profile wrongly


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of doing it over the cases of a battery.

    `same` counts decisions as the full recompute's, `right` those that are right, both of `cases`; `cosine` is that of
    the logits against the recompute, `decoded` tokens and `ms` milliseconds until the decision, all means.
    """

    what: str  # method, wording, seam, place
    name: str
    way: str  # direct, reasoned
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
class Profile:
    """What to do on this model, and what that rests on."""

    identity: Identity
    cache: str  # K and V as the cache keeps them, "q8_0/f16"
    cases: int
    heard: dict[str, int]  # by way: cases in which a full recompute decides by the field
    methods: dict[str, str]  # by way: the edit method to use; recompute where none is trustworthy
    wording: str
    seam: int
    place: str
    measured: Sequence[Measured]
    created: str = ""

    def found(self, what: str, name: str, way: str = "direct") -> Measured | None:
        """What was measured of one way of doing it."""
        return next((one for one in self.measured if (one.what, one.name, one.way) == (what, name, way)), None)


class Profiles:
    """The profiles of one user. The folder appears with the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, identity: Identity, cache: str) -> Path:
        private.check(self.folder)
        path = self.folder / f"{identity.key}-{cache.replace('/', '-')}.json"
        private.check_file(path)
        return path

    def find(self, identity: Identity, cache: str) -> Profile | None:
        """The profile of this model in this cache, None without one. Raise NotesError if it cannot be read."""
        path = self.path(identity, cache)
        try:
            data = json.loads(path.read_bytes())
            if data["format"] > FORMAT:
                raise NotesError(f"{path} has format {data['format']}, this notes reads {FORMAT}. Update notes")
            profile = _profile(data)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NotesError(f"cannot read {path}: {reason(error)}") from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise NotesError(f"{path} is damaged. Remove it, or measure again: notes calibrate") from error
        differences = list(profile.identity.differences(identity))
        if profile.cache != cache:
            differences.append(f"measured in a cache of {profile.cache[:20]!r}, this one is {cache}")
        if differences:
            raise NotesError(f"{path} was {'; '.join(differences)}. Remove it, or measure again: notes calibrate")
        return profile

    def save(self, profile: Profile, writer: str) -> Path:
        """Write the profile in place of an older one. Raise NotesError if that cannot be."""
        path = self.path(profile.identity, profile.cache)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        data = {"format": FORMAT, "writer": writer, **asdict(profile), "created": profile.created or now}
        try:
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise NotesError(f"cannot write {path}: {reason(error)}. Nothing was changed") from error
        return path


def _profile(data: dict[str, Any]) -> Profile:
    """Raise KeyError, TypeError or ValueError where the data is no profile: it decides how answers come about."""
    ways = ("direct", "reasoned")
    cases = _count(data["cases"])
    return Profile(
        identity=Identity.from_dict(data["identity"]),
        cache=_text(data["cache"]),
        cases=cases,
        heard={way: _count(data["heard"][way], cases) for way in ways},
        methods={way: _text(data["methods"][way]) for way in ways},
        wording=_text(data["wording"]),
        seam=_count(data["seam"]),
        place=_text(data["place"], PLACES),
        measured=tuple(_measured(Measured(**one)) for one in data["measured"]),
        created=_text(data["created"]),
    )


def _measured(one: Measured) -> Measured:
    for word in (one.what, one.name, one.way):
        _text(word)
    cases = _count(one.cases)
    for count in (one.same, one.right):
        _count(count, cases)
    for figure in (one.cosine, one.decoded, one.ms):
        if type(figure) not in (int, float) or not math.isfinite(figure):
            raise ValueError("measured")
    return one


def _text(value: object, known: Sequence[str] = ()) -> str:
    if not isinstance(value, str) or (known and value not in known):
        raise ValueError("text")
    return value


def _count(value: object, most: int | None = None) -> int:
    if type(value) is not int or value < 0 or (most is not None and value > most):
        raise ValueError("count")
    return value

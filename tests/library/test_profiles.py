"""Tests of profiles on disk: written atomically, found for the same model and cache, refused if damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from notes_cli.engine.segment import Identity
from notes_cli.errors import NotesError, OutdatedError
from notes_cli.library.profiles import Composition, Measured, Profile, Profiles

from ..limits import small_files
from ..refused import refused


@pytest.fixture
def profile(identity: Identity) -> Profile:
    """One that trusts the field alone."""
    return Profile(
        identity=identity,
        cache="q8_0/f16",
        cases=40,
        decisive={"direct": 39, "reasoned": 38},
        methods={"direct": "field", "reasoned": "recompute"},
        wording="now",
        seam=0,
        place="late",
        measured=(Measured("method", "field", "direct", 39, 38, 37, 0.99, 33.0, 12.5),),
        composition=Composition("fails", "seam@16", "20 of 48"),
    )


def test_what_was_saved_is_found(tmp_path: Path, profile: Profile) -> None:
    """For this model in this cache, and for no other; readable by its owner alone. A full disk leaves the older one."""
    profiles = Profiles(tmp_path / "profiles")
    assert profiles.find(profile.identity, profile.cache) is None
    path = profiles.save(profile, "notes 0")
    found = profiles.find(profile.identity, profile.cache)
    assert found is not None and replace(found, created="") == profile and found.created
    assert profiles.find(profile.identity, "f16/f16") is None
    assert profiles.find(replace(profile.identity, weights="other"), profile.cache) is None
    assert path.stat().st_mode & 0o777 == 0o600
    measured = found.found("method", "field")
    assert measured is not None and measured.agreement == pytest.approx(38 / 39)
    assert found.found("method", "field", "reasoned") is None
    before = path.read_bytes()
    with small_files(100), pytest.raises(NotesError, match="File too large"):
        profiles.save(profile, "notes 2")
    assert [*path.parent.iterdir()] == [path] and path.read_bytes() == before


MEASURED = {"what": "a", "name": "b", "way": "c", "cases": 2, "same": 1, "right": 1, "cosine": 1, "decoded": 1, "ms": 1}
WRONG_MEASURED = ({"same": 3}, {"right": -1}, {"cosine": "1"}, {"ms": 1e999})
WRONG_COMPOSITION = ("fails", [], {"verdict": "fails", "repair": "seam@", "why": ""}, {"why": ""})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(({"seam": seam}, f"damaged: seam is {seam!r}, .*from 0 to 64") for seam in (-5, 65, "x", 1.5, True)),
        ({"place": "middle"}, "damaged: place is 'middle', it must be early or late"),
        ({"decisive": {"direct": 41, "reasoned": 0}}, "decisive.direct is 41, .*from 0 to 40"),
        *(({"methods": {"direct": "field"}}, "methods.reasoned is missing"), ({"identity": {}}, "identity.model is")),
        ({"measured": [{**MEASURED, "right": -1}]}, "measured.0..right is -1, .*from 0 to 2"),
        *(
            (change, "is damaged")
            for change in ({"measured": [{}]}, {"decisive": {}}, {"methods": []}, {"identity": 3})
        ),
        *((change, "is damaged") for change in ({"wording": None}, {"cases": "40"}, {"cache": 3}, {"created": 2026})),
        ({"methods": {"direct": ["field"], "reasoned": "field"}}, "is damaged"),
        *(({"composition": wrong}, "is damaged") for wrong in WRONG_COMPOSITION),
        *(({"measured": [{**MEASURED, **wrong}]}, "is damaged") for wrong in WRONG_MEASURED),
        ({"cache": "f32/f32"}, "'f32/f32', .* q8_0/f16"),
        ({"format": 1}, "by an older version"),  # outdated, and not damaged
    ],
    ids=str,
)
def test_a_profile_that_does_not_fit_is_refused(
    tmp_path: Path, profile: Profile, change: dict[str, object], says: str
) -> None:
    """One line names the file, the key, the value, and the commands that mend it."""
    profiles = Profiles(tmp_path)
    path = profiles.save(profile, "notes 0")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with refused(OutdatedError if "format" in change else NotesError, f"{path} .*{says}.*notes calibrate.*{path.stem}"):
        profiles.find(profile.identity, profile.cache)


def test_a_profile_of_another_model_is_refused(tmp_path: Path, profile: Profile) -> None:
    """One that was renamed or written by hand, and one of a newer format, whose values may have another meaning."""
    profiles = Profiles(tmp_path)
    path = profiles.save(profile, "notes 0")
    data = json.loads(path.read_text())
    for change, says in (
        ({"identity": {**data["identity"], "weights": "cd" * 32}}, r"cdcd.*Measure again \(notes calibrate\)"),
        ({"identity": {**data["identity"], "adapters": "\r"}}, r"damaged: identity.adapters is '\\r'"),
        ({"format": 4}, "format 4, this version of notes reads 3"),
    ):
        path.write_text(json.dumps({**data, **change}))
        with refused(NotesError, says):
            profiles.find(profile.identity, profile.cache)


def test_profiles_by_name(tmp_path: Path, profile: Profile) -> None:
    """In order; the beginning of a name is enough where it is one profile's; removed, and the others stay."""
    profiles = Profiles(tmp_path / "profiles")
    assert profiles.names() == []
    first = profiles.save(profile, "notes 0")
    second = profiles.save(replace(profile, cache="f16/f16"), "notes 0")
    assert profiles.names() == sorted([first.stem, second.stem])
    assert profiles.named(first.stem) == profiles.named(first.stem[:-2]) == first
    for name in ("", "no", first.stem[:12], "../x"):
        with refused(NotesError, "notes profile ls"):
            profiles.named(name)
    assert profiles.remove(second.stem) == second and profiles.names() == [first.stem]

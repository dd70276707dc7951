"""Hostile profiles: output of `notes calibrate`, mutated, and then used."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from bench.faults.frame import ACCEPTED, FOUND, REFUSED, SCRATCH, Budget, Row, Verdict, chance, tried
from bench.faults.mutate import bytes_changed, text_changed, twisted
from notes_cli.editing.methods import Method
from notes_cli.engine.segment import Identity
from notes_cli.errors import NotesError
from notes_cli.library.profiles import Profile, Profiles

TITLE = "Profiles, mutated in their bytes, in their JSON, and with other models' identities."
FAILS = (
    "an exception other than the one-line refusal, or a wrong accept: a profile of another model or cache, an edit "
    "method or a place that does not exist, a seam or a count below 0, more that is right than there was, a figure "
    "that is no number."
)
CASES, SHARE = 20_000, 1
CACHE = "f16/f16"


def run(budget: Budget, seed: int) -> Row:
    folder = SCRATCH / "profiles"
    folder.mkdir()
    return tried(Hostile(folder, seed), budget, patience=10, memory=6 << 30, say="profiles")


class Hostile:
    """Judges mutants of one profile."""

    def __init__(self, folder: Path, seed: int) -> None:
        from bench.faults.kills import save_profile

        self.seed = seed
        saved = save_profile(folder)
        assert isinstance(saved, Path)
        self.path, self.profiles = saved, Profiles(saved.parent)
        self.sound = saved.read_bytes()
        self.identity = Identity.from_dict(json.loads(self.sound)["identity"])
        if self._judged() != ACCEPTED:
            raise RuntimeError("the sound profile is refused")

    def __call__(self, number: int) -> Verdict:
        rng = chance(self.seed, number)
        data = self._lie(rng)
        self.path.write_bytes(data)
        verdict = self._judged()
        if verdict.outcome not in ("accepted", "refused"):
            (FOUND / f"profile-{number}.json").write_bytes(data)
        return verdict

    def _lie(self, rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return bytes_changed(rng, self.sound, [self.sound])
        value = json.loads(self.sound)
        for _ in range(rng.choice((1, 1, 2))):
            key = rng.choice(list(value) or ["x"])
            if rng.random() < 0.3:
                value = twisted(rng, value)
            elif isinstance(value, dict) and key in value:
                one = value[key]
                value[key] = (
                    text_changed(rng, one) if isinstance(one, str) and rng.random() < 0.4 else twisted(rng, one)
                )
            if not isinstance(value, dict):
                break
        return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="replace")

    def _judged(self) -> Verdict:
        try:
            found = self.profiles.find(self.identity, CACHE)
        except NotesError as error:
            said = str(error)
            return REFUSED if said.isprintable() and len(said) < 1000 else Verdict("wrong", f"no clear line: {said!r}")
        if found is None:
            return REFUSED
        try:
            for method in found.methods.values():  # as users of a profile do
                Method.parse(method)
        except NotesError:
            return REFUSED
        why = self._contradicted(found)
        return Verdict("wrong", why) if why else ACCEPTED

    def _contradicted(self, found: Profile) -> str:
        if found.identity.differences(self.identity) or found.cache != CACHE:
            return f"of another model: {found.identity} {found.cache}"[:200]
        if found.place not in ("early", "late") or not isinstance(found.wording, str):
            return f"the place {found.place!r}"
        numbers = (found.seam, found.cases, *found.decisive.values())
        if (
            any(type(number) is not int or number < 0 for number in numbers)
            or max(found.decisive.values()) > found.cases
        ):
            return f"seam, cases, heard: {numbers}"
        for one in found.measured:
            counts = (one.cases, one.same, one.right)
            if any(type(count) is not int or count < 0 for count in counts) or max(one.same, one.right) > one.cases:
                return f"counts {counts}"
            figures = (one.cosine, one.decoded, one.ms)
            if not all(type(figure) in (int, float) and math.isfinite(figure) for figure in figures):
                return f"figures {figures}"
            if not all(isinstance(word, str) for word in (one.what, one.name, one.way)):
                return f"words {one}"
        return ""

"""Hostile profiles: output of `notes calibrate`, mutated, and then used."""

from __future__ import annotations

import json
import math
import random

from bench.faults.frame import ACCEPTED, REFUSED, Mutants, check, refused
from bench.faults.jobs import save_profile
from bench.faults.mutate import bytes_changed, json_changed
from notes_cli.editing.methods import Method
from notes_cli.engine.segment import Identity
from notes_cli.errors import NotesError
from notes_cli.library.profiles import Profile, Profiles

CACHE = "f16/f16"


class HostileProfiles(Mutants):
    """Mutants of one profile."""

    cases, patience, memory, suffix = 20_000, 10, 6 << 30, ".json"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.path = save_profile(self.folder())
        self.profiles = Profiles(self.path.parent)
        self.sound = self.path.read_bytes()
        self.identity = Identity.from_dict(json.loads(self.sound)["identity"])

    def mutant(self, rng: random.Random, number: int) -> bytes:
        if number == 0:
            return self.sound
        if rng.random() < 0.2:
            return bytes_changed(rng, self.sound, [self.sound])
        value = json.loads(self.sound)
        for _ in range(rng.choice((1, 1, 2))):
            value = json_changed(rng, value)
        return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="replace")

    def examine(self, rng: random.Random, number: int, data: bytes) -> str:
        self.path.write_bytes(data)
        try:
            found = self.profiles.find(self.identity, CACHE)
            if found is None:
                return REFUSED
            for method in found.methods.values():  # as users of a profile do
                Method.parse(method)
        except NotesError as error:
            check(number, f"the sound profile is refused: {error}")
            return refused(error)
        self._contradictions(found)
        return ACCEPTED

    def _contradictions(self, found: Profile) -> None:
        check(
            not found.identity.differences(self.identity) and found.cache == CACHE, f"another model: {found.identity}"
        )
        check(found.place in ("early", "late") and isinstance(found.wording, str), f"the place {found.place!r}")
        numbers = [found.seam, found.cases, *found.decisive.values()]
        for one in found.measured:
            numbers += [one.cases, one.same, one.right]
            figures = (one.cosine, one.decoded, one.ms)
            check(all(type(figure) in (int, float) and math.isfinite(figure) for figure in figures), f"{figures}")
            check(all(isinstance(word, str) for word in (one.what, one.name, one.way)), f"words {one}")
        check(all(type(number) is int and number >= 0 for number in numbers), f"numbers {numbers}")
        check(max(found.decisive.values()) <= found.cases, f"decisive {found.decisive} of {found.cases}")
        check(all(max(one.same, one.right) <= one.cases for one in found.measured), "more right than asked")

"""Phases of the load test (model, load, system), each saved in a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.random_model import with_words_of
from bench.selecting import chosen
from bench.serving.figures import Figures, figures
from bench.serving.load import Seen, arrivals, offer
from bench.serving.servers import FOLDER, PARALLEL, SYSTEMS, Setting, System, server
from bench.serving.texts import body, questions
from notes_cli.config import shipped_model

RATES = (2, 4, 8, 16, None)  # of TENTHS of the capacity, a second; None: all at once
TENTHS = 10
SEED = 7
PIECES = FOLDER / "phases"


@dataclass(frozen=True)
class Race:
    """A model, and how long and how often it is asked. A phase of a load that is too much is cut off, as it would have
    no end."""

    name: str
    title: str
    file: Callable[[], Path]
    count: int  # requests a phase
    limit: float  # seconds a phase
    tokens: int  # of an answer at most
    threads: int = 2
    flash: tuple[str, ...] = ()  # systems of llama-server that are faster with its flash attention; others go without

    @property
    def arriving(self) -> float:
        """Seconds of a phase in which requests arrive: later ones are left out, for all systems."""
        return 0.8 * self.limit


def _qwen3() -> Path:
    return with_words_of(shipped_model())


RACES = {
    one.name: one
    for one in (
        Race("random", "Random weights in the shape of Qwen3-0.6B", _qwen3, 12, 55, 8),
        Race("shipped", "The model that ships", shipped_model, 20, 30, 32, flash=("edited", "reuse")),
    )
}


@dataclass(frozen=True)
class Phase:
    """One model, one system, one load."""

    race: Race
    system: System
    rate: int | None

    @property
    def name(self) -> str:
        return f"{self.race.name}/{self.system.name}/{'all' if self.rate is None else self.rate}"

    @property
    def path(self) -> Path:
        return PIECES / f"{self.name.replace('/', '-')}.json"

    def settings(self, capacity: float | None) -> dict[str, Any]:
        """Return the settings that a phase depends on."""
        race = {name: value for name, value in asdict(self.race).items() if name != "file"}
        shared = {"parallel": PARALLEL, "seed": SEED, "capacity": capacity}
        return {**race, "flash": self.system.name in self.race.flash, **shared}


def phases(only: list[str]) -> list[Phase]:
    """Return phases below the names; by default all. The one that scales a model's rates comes first."""
    every = [
        Phase(race, system, rate) for race in RACES.values() for rate in RATES[::-1] for system in SYSTEMS.values()
    ]
    return chosen(every, only, "phase", "MODEL, MODEL/SYSTEM or MODEL/SYSTEM/RATE")


def capacity(race: Race) -> float | None:
    """Return llama-server's answers per second without edits when all requests arrive at once, None if not measured."""
    found = load(Phase(race, SYSTEMS["unedited"], None))
    return found[1].answers if found else None


def measure(phase: Phase) -> Figures:
    """Run a phase and save its measurements."""
    race, most = phase.race, None if phase.rate is None else capacity(phase.race)
    if phase.rate is not None and most is None:
        raise SystemExit(f"rates are scaled by {race.name}/unedited/all: measure that first")
    per_second = phase.rate / TENTHS * most if phase.rate and most else None
    due = arrivals(race.count, per_second, SEED, race.arriving)
    number = RATES.index(phase.rate)
    asked = questions(race.count, SEED + number, 1 + race.count * number)
    requests = [(at, body(one, phase.system.way, race.tokens)) for at, one in zip(due, asked, strict=False)]
    flash = "on" if phase.system.name in race.flash else "off"
    with server(phase.system, Setting(race.file(), race.threads, flash)) as url:
        seen = asyncio.run(offer(url, requests, race.limit))
    PIECES.mkdir(parents=True, exist_ok=True)
    kept = {"settings": phase.settings(most), "seen": [asdict(one) for one in seen]}
    phase.path.write_text(json.dumps(kept, indent=1) + "\n")
    return figures(seen, race.limit)


def load(phase: Phase) -> tuple[list[Seen], Figures] | None:
    """Load a phase measured with the current settings."""
    if not phase.path.exists():
        return None
    kept = json.loads(phase.path.read_text())
    if kept["settings"] != phase.settings(None if phase.rate is None else capacity(phase.race)):
        return None
    seen = [Seen(**one) for one in kept["seen"]]
    return seen, figures(seen, phase.race.limit)


def measured() -> dict[Phase, tuple[list[Seen], Figures]]:
    """All phases that go with each other, in the order of a table."""
    ordered = sorted(phases([]), key=lambda one: (list(RACES).index(one.race.name), RATES.index(one.rate)))
    found = {phase: load(phase) for phase in ordered}
    return {phase: one for phase, one in found.items() if one}

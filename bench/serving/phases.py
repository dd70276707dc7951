"""Phases of the load test (a model, a system, a load), each measured with a warm server and saved in a file."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.processes import LONG, llama_server, notes_serve, post
from bench.random_model import ROOT, with_words_of
from bench.selecting import chosen
from bench.serving.load import Figures, Seen, arrivals, figures, offer
from bench.serving.stock import stock
from bench.serving.texts import FIRST, SKILL, Asked, body, policy, questions
from notes_cli.config import shipped_model

FOLDER = ROOT / "build" / "serving"
PIECES = FOLDER / "phases"
PARALLEL = 4  # sequences that are answered at a time
CELLS = 4096  # of each of them
WARM = 0.95  # of a prompt is there already when a server is warm
RATES = (2, 4, 8, 16, None)  # of TENTHS of the capacity, a second; None: all at once
TENTHS = 10
SEED = 7


@dataclass(frozen=True)
class System:
    """A way of serving the policy with its date of today."""

    name: str
    title: str
    way: str  # of stating the date (texts.WAYS)
    reuse: int | None = None  # llama-server's --cache-reuse; None: it is ours


SYSTEMS = {
    one.name: one
    for one in (
        System("unedited", "llama-server, policy unedited", "said", 0),
        System("ours", "notes serve, erratum", "erratum"),
        System("edited", "llama-server, policy edited", "edited", 0),
        System("reuse", "`llama-server --cache-reuse 256`, policy edited", "edited", 256),
    )
}


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


SHAPE = "Random weights in the shape of Qwen3-0.6B"
RACES = {
    one.name: one
    for one in (
        Race("random", SHAPE, lambda: with_words_of(shipped_model()), 12, 55, 8),
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

    @property
    def flash(self) -> str:
        return "on" if self.system.name in self.race.flash else "off"

    @property
    def settings(self) -> dict[str, Any]:
        """All that a phase depends on."""
        race = {name: value for name, value in asdict(self.race).items() if name not in ("file", "flash")}
        most = None if self.rate is None else capacity(self.race)
        return {**race, "flash": self.flash, "parallel": PARALLEL, "seed": SEED, "capacity": most}


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
    race, per_second, settings = phase.race, None, phase.settings
    if phase.rate is not None:
        if settings["capacity"] is None:
            raise SystemExit(f"rates are scaled by {race.name}/unedited/all: measure that first")
        per_second = phase.rate / TENTHS * settings["capacity"]
    due = arrivals(race.count, per_second, SEED, race.arriving)
    number = RATES.index(phase.rate)
    asked = questions(race.count, SEED + number, 1 + race.count * number)
    requests = [(at, body(one, phase.system.way, race.tokens)) for at, one in zip(due, asked, strict=False)]
    with warm_server(phase) as url:
        seen = asyncio.run(offer(url, requests, race.limit))
    PIECES.mkdir(parents=True, exist_ok=True)
    phase.path.write_text(json.dumps({"settings": settings, "seen": [asdict(one) for one in seen]}, indent=1) + "\n")
    return figures(seen, race.limit)


def load(phase: Phase) -> tuple[list[Seen], Figures] | None:
    """Load a phase measured with the current settings."""
    if not phase.path.exists():
        return None
    kept = json.loads(phase.path.read_text())
    if kept["settings"] != json.loads(json.dumps(phase.settings)):
        return None
    seen = [Seen(**one) for one in kept["seen"]]
    return seen, figures(seen, phase.race.limit)


def measured() -> dict[Phase, tuple[list[Seen], Figures]]:
    """All phases that go with each other, in the order of a table."""
    ordered = sorted(phases([]), key=lambda one: (list(RACES).index(one.race.name), RATES.index(one.rate)))
    found = {phase: load(phase) for phase in ordered}
    return {phase: one for phase, one in found.items() if one}


@contextmanager
def warm_server(phase: Phase) -> Iterator[str]:
    """A server that has prefilled the policy with its first date in all sequences: its address."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    question = body(Asked("What is the return?", FIRST), phase.system.way, 4)
    with _ours(phase) if phase.system.reuse is None else _stock(phase) as url:
        for expected in (0.0, WARM):  # the first round may have to read, the second must not
            with ThreadPoolExecutor(PARALLEL) as pool:
                asked = pool.map(lambda _: post(f"{url}/v1/chat/completions", _whole(question)), range(PARALLEL))
                usages = [one["usage"] for one in asked]
            shares = [one["prompt_tokens_details"]["cached_tokens"] / one["prompt_tokens"] for one in usages]
            if min(shares) < expected:
                raise SystemExit(f"{phase.system.title}: not warm, {min(shares):.2f} of the prompt was there")
        yield url


def _whole(question: dict[str, Any]) -> dict[str, Any]:
    """The request without a stream."""
    return {name: value for name, value in question.items() if name not in ("stream", "stream_options")}


@contextmanager
def _ours(phase: Phase) -> Iterator[str]:
    home = FOLDER / f"home-{hashlib.sha256(policy().encode()).hexdigest()[:16]}"  # it is compiled there once
    options = ["--parallel", str(PARALLEL), "-t", str(phase.race.threads)]
    with notes_serve(phase.race.file(), home, FOLDER / "serve.log", *options) as server:
        text = {"name": SKILL, "text": policy()}
        reply = httpx.post(f"{server.url}/v1/notes/compile", json=text, timeout=LONG, trust_env=False)
        if '"skill"' not in reply.text:
            raise SystemExit(f"the policy could not be compiled: {reply.text[-400:]}")
        yield server.url


@contextmanager
def _stock(phase: Phase) -> Iterator[str]:
    """Its slots are filled from a file (an endpoint of its own), so that the policy is prefilled only once."""
    race, model, slots = phase.race, phase.race.file(), FOLDER / "slots"
    slots.mkdir(exist_ok=True)
    options = ["-np", str(PARALLEL), "-c", str(PARALLEL * CELLS), "-t", str(race.threads), "-fa", phase.flash]
    options += ["--cache-reuse", str(phase.system.reuse), "--slot-save-path", str(slots)]
    key = hashlib.sha256(f"{race.threads}{phase.flash}{model.stat()}{policy()}".encode()).hexdigest()[:16]
    kept = {"filename": f"{key}.bin"}
    with llama_server(stock(), model, FOLDER / "llama-server.log", *options) as server:
        if not (slots / kept["filename"]).exists():
            asked = _whole(body(Asked("What is the return?", FIRST), "edited", 1))
            post(f"{server.url}/v1/chat/completions", {**asked, "id_slot": 0})
            post(f"{server.url}/slots/0?action=save", kept)
        for slot in range(PARALLEL):
            post(f"{server.url}/slots/{slot}?action=restore", kept)
        yield server.url

"""Cells of the measurement (model, workload in a size, peer), each saved when done."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from bench.race.peers import PEERS, Peer, Run, Setting
from bench.race.workloads import ANSWER, Work, works
from bench.random_model import ROOT, SHALLOW, with_words_of
from bench.selecting import chosen
from notes_cli.config import shipped_model

KEPT = ROOT / "docs" / "results" / "race.json"
CAP = 40.0  # seconds after a cell's first answer, from when on no further prompt is begun
THREADS = 2  # of every program
STILL = 2.0  # seconds without a sign of life


MODELS: dict[str, tuple[str, Callable[[], Path]]] = {
    "random": ("Random weights in the shape of Qwen3-0.6B, Q8_0", lambda: with_words_of(shipped_model())),
    "shallow": (
        "The same with 4 of its 28 layers, for long texts",
        lambda: with_words_of(shipped_model(), SHALLOW),
    ),
    "shipped": ("The model that ships", shipped_model),
}
# Of all 28 layers a recompute of 16k tokens takes minutes, and the model that ships was trained for less: such sizes
# are none of their cells.
GRID = {
    "random": {
        "alone": ("1k", "4k"),
        "moved": ("1k", "4k"),
        "orders": ("1k",),
        "field": ("1k", "4k"),
        "turns": ("1k",),
    },
    "shallow": {"alone": ("16k", "32k"), "moved": ("16k",)},
    "shipped": dict.fromkeys(("alone", "moved", "orders", "field", "turns"), ("1k",)),
}


@dataclass(frozen=True)
class Cell:
    """One of the table."""

    model: str
    work: str
    size: str
    peer: Peer

    @property
    def name(self) -> str:
        return f"{self.model}/{self.work}-{self.size}/{self.peer.name}"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that a cell depends on besides its name."""
        return {"answer": ANSWER, "threads": THREADS, "version": 2}


Kept = dict[str, list[Run]]


def cells(only: list[str]) -> list[Cell]:
    """Return the cells with a name, or below one; by default all. Raises SystemExit for an unknown name."""
    every = [
        Cell(model, work, size, peer)
        for model, sizes in GRID.items()
        for work, of in sizes.items()
        for size in of
        for peer in PEERS.values()
        if work in peer.works
    ]
    return chosen(every, only, "cell", "MODEL, MODEL/WORK-SIZE or MODEL/WORK-SIZE/PEER")


def measure(cell: Cell) -> list[Run]:
    """Ask the prompts one after the other, for as long as CAP allows; a conversation to its end."""
    model = MODELS[cell.model][1]()
    work: Work = works()[cell.work](cell.size)
    started, runs, answers = 0.0, [], cell.peer.run(Setting(cell.model, model, THREADS), work)
    with Still() as still, ExitStack() as stack:
        stack.callback(getattr(answers, "close", lambda: None))  # servers end
        for run in answers:
            runs.append(run)
            started = started or time.monotonic()
            if still.longest > STILL:
                raise SystemExit(f"{cell.name}: nothing moved for {still.longest:.0f} seconds: measure it again")
            if time.monotonic() - started > CAP and cell.work != "turns":
                break
    return runs


class Still:
    """Measures the longest time for which this process was suspended, which would spoil a timing."""

    def __enter__(self) -> Still:
        self.longest, self._over = 0.0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(STILL / 10):
            now = time.monotonic()
            self.longest, before = max(self.longest, now - before), now


def load(path: Path = KEPT) -> Kept:
    """Load cells measured with the current settings."""
    known, kept = {cell.name: cell for cell in cells([])}, _read(path)
    return {
        name: [Run(*run) for run in one["runs"]]
        for name, one in kept.items()
        if name in known and one["settings"] == known[name].settings
    }


def keep(cell: Cell, runs: Sequence[Run], path: Path = KEPT) -> None:
    """Save a cell in the file, in the order of the table. Others stay, whatever their settings."""
    found = {cell.name: {"settings": cell.settings, "runs": [_rounded(run) for run in runs]}}
    found = {**_read(path), **found}
    lines = [
        f"{json.dumps(one.name)}:{json.dumps(found[one.name], separators=(',', ':'))}"
        for one in cells([])
        if one.name in found
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _rounded(run: Run) -> list[Any]:
    """The fields of a run in their order."""
    return [round(value, 4) if isinstance(value, float) else value for value in astuple(run)]

"""Defines the cells of the race (a model, a workload in a size, a peer), and stores each result once it is measured."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.race.peers import PEERS, Peer, Run, Setting
from bench.race.workloads import ANSWER, Work, works
from bench.random_model import ROOT, SHALLOW, with_words_of
from bench.selecting import chosen
from notes_cli.config import shipped_model

KEPT = ROOT / "docs" / "results" / "race.json"
CAP = 40.0  # seconds after a cell's first answer, from when on no further prompt is begun
THREADS = 2  # of every program
STILL = 2.0  # seconds without a sign of life
MB = 1_000_000
SETTINGS = {"answer": ANSWER, "threads": THREADS, "version": 2}  # of all cells of a file

MODELS: dict[str, tuple[str, Callable[[], Path]]] = {
    "random": ("Random weights in the shape of Qwen3-0.6B, Q8_0", lambda: with_words_of(shipped_model())),
    "shallow": ("The same with 4 of its 28 layers, for long texts", lambda: with_words_of(shipped_model(), SHALLOW)),
    "shipped": ("The model that ships", shipped_model),
}
# Of all 28 layers a recompute of 16k tokens takes minutes, and the model that ships was trained for less: such sizes
# are none of their cells.
BOTH = ("1k", "4k")
GRID: dict[str, dict[str, tuple[str, ...]]] = {
    "random": {"alone": BOTH, "moved": BOTH, "orders": ("1k",), "field": BOTH, "turns": ("1k",)},
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


Kept = dict[str, list[Run]]


def cells(only: list[str]) -> list[Cell]:
    """Those of a name, or below one; all without any. Raise SystemExit for a name that there is not."""
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
    """How long this process was not there at most: somebody has stopped it, and what it measures."""

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
    """The cells that were measured with the settings of now.

    The file has the answers once, in `answers`. A run in `cells` is [first, whole, processor, MB, index of its answer].
    """
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if stored.get("settings") != SETTINGS:
        return {}
    return {
        cell.name: [
            Run(first, whole, processor, memory * MB, stored["answers"][answer])
            for first, whole, processor, memory, answer in stored["cells"][cell.name]
        ]
        for cell in cells([])
        if cell.name in stored["cells"]
    }


def keep(cell: Cell, runs: Sequence[Run], path: Path = KEPT) -> None:
    """Put a cell into the file, which is in the order of the table, without cells of other settings."""
    found = {**load(path), cell.name: runs}
    answers: dict[str, int] = {}
    lines = []
    for one in cells([]):
        if one.name in found:
            rows = [
                [
                    *(round(seconds, 4) for seconds in (run.first, run.whole, run.processor)),
                    round(run.memory / MB),
                    answers.setdefault(run.text, len(answers)),
                ]
                for run in found[one.name]
            ]
            lines.append(f"{json.dumps(one.name)}:{json.dumps(rows, separators=(',', ':'))}")
    head = f'{{"settings":{json.dumps(SETTINGS)},\n"answers":{json.dumps([*answers])},\n"cells":{{\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + ",\n".join(lines) + "\n}}\n", encoding="utf-8")

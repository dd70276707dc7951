"""One model and the experiments on it: what was stopped goes on, and how long the rest will take is told.

Rows are kept case by case with the time that each took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from bench.experiments import EXPERIMENTS, agent, calibration
from bench.experiments.keeping import ROOT, Kept, digest
from bench.experiments.table import Row, Table
from bench.experiments.texts import First
from notes_cli.engine import limits, system
from notes_cli.errors import NotesError
from notes_cli.runtime.workspace import Workspace

# What decides which rows a case has, beside the model, its settings and the seed.
SOURCES = ("bench/experiments", "notes_cli", "prompts", "training/world.py", "training/model.py")
EVERY = 20  # seconds between two lines about how far it is


class Run:
    """Experiments on one model, with texts of one seed."""

    def __init__(self, workspace: Workspace, seed: int, cases: int | None, keep: Path) -> None:
        """`cases`: how many of each experiment, None: its own number. `keep`: rows are in a folder of this model."""
        self.seed = seed
        self._workspace, self._cases = workspace, cases
        self.folder = keep / workspace.weights[:16]
        options = workspace.options
        self._about = {
            "weights": workspace.weights,
            "settings": f"{options.cache} cache, flash attention {options.flash_attention}",
            "seed": str(seed),
            "sources": digest(ROOT / name for name in SOURCES),
            "engine": system.build(),
        }

    def cases(self, name: str) -> int:
        """How many are wanted."""
        return self._cases or EXPERIMENTS[name].CASES

    def measure(self, name: str, most: int | None = None) -> tuple[Table, str]:
        """The rows of an experiment, of which those that are there are not measured again, and why there are none if
        the model is refused. `most`: no more cases for now. Raise KeptError where what is kept is of something else."""
        kept, wanted = self._kept(name), self.cases(name)
        until = min(wanted, most or wanted)
        try:
            rows = EXPERIMENTS[name].measure(self._workspace, until, First(self.seed, kept.next))
            if kept.next <= until:
                for number in self._told(name, kept, rows):
                    if number >= until:
                        break
        except NotesError as error:
            return Table([]), str(error)
        return Table(row for row in kept.table if int(row["case"]) <= wanted), ""

    def expect(self, names: Sequence[str]) -> None:
        """Say what memory the model takes, and about how long the calibration and the experiments will take: by the
        first case of each, which is kept, and of the agent, whose cases are long, by a part of one."""
        model, options = self._workspace.model, self._workspace.options
        weights, there = sum(source.path.stat().st_size for source in model.sources), limits.available()
        _say(
            f"{model.name}: {limits.size(weights)} of weights; a context of {options.n_ctx:,} tokens takes "
            f"{limits.memory(model, options)}" + (f"; {limits.size(there)} are available" if there is not None else "")
        )
        _say("how long it will take, by one case of each experiment, which is kept:")
        whole = self._expected("calibration", "", calibration.seconds(self._workspace))
        for name in names:
            each, wanted = self._each(name), self.cases(name)
            missing = max(0, wanted + 1 - self._kept(name).next)
            whole += self._expected(name, f"{wanted} cases, {missing} missing", each * missing)
        self._expected("all", "", whole)

    def _each(self, name: str) -> float:
        """Seconds that a case takes; one is measured if none is there."""
        if not self._kept(name).cases:
            if EXPERIMENTS[name] is agent:
                return agent.seconds(self._workspace, First(self.seed))
            _, refused = self.measure(name, most=1)
            if refused:
                _say(f"  {name:14}this model is refused: {refused}")
        return fmean(self._kept(name).seconds.values() or [0.0])

    def _expected(self, name: str, what: str, seconds: float) -> float:
        _say(f"  {name:14}{what:30}about {span(seconds)}")
        return seconds

    def _kept(self, name: str) -> Kept:
        return Kept(self.folder / f"{name}.jsonl", {**self._about, "experiment": name})

    def _told(self, name: str, kept: Kept, rows: Iterator[Row]) -> Iterator[int]:
        """The cases as they come, told."""
        said = told(name)
        for number in kept.add(rows):
            said(number, self.cases(name))
            yield number


def told(name: str) -> Callable[[int, int], None]:
    """Says on standard error now and then how far it is, and how long the rest will take: by what was done since."""
    started = said = time.monotonic()
    first: int | None = None

    def update(done: int, of: int) -> None:
        nonlocal said, first
        first = done - 1 if first is None else first
        now = time.monotonic()
        if now - said > EVERY:
            said = now
            left = (now - started) / (done - first) * (of - done)
            _say(f"{name}: {done} of {of}, about {span(left)} left")

    return update


def span(seconds: float) -> str:
    """A time for people, to two digits or so."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()

"""Processes killed: at every change of a file, in the middle of every write, by a power cut, at random instants."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench.faults.events import Events, cut
from bench.faults.frame import ACCEPTED, chance, check
from bench.faults.jobs import Job, Listed

RANDOM = 700  # kills at random instants


class Case(NamedTuple):
    """`at`: the number of the event, or the share of the command's time, for a kill at random."""

    job: Job
    mode: str
    at: float


class Kills(Listed):
    """A case for each event of each command, and some at random."""

    share = 4

    def listed(self, rng: random.Random) -> list[Case]:
        jobs = self.jobs.jobs
        every = [Case(job, "power", len(self.jobs.events[job.name])) for job in jobs]
        for job in jobs:
            for number, event in enumerate(self.jobs.events[job.name]):
                modes = ("power", "kill", "torn") if event == "write" else ("power", "kill")
                every += [Case(job, mode, number) for mode in modes]
        return [*every, *(Case(rng.choice(jobs), "random", rng.random()) for _ in range(RANDOM))]

    def notes(self) -> str:
        events = sum(map(len, self.jobs.events.values()))
        return f"{len(self.jobs.jobs)} commands with {events} events in all, {RANDOM} kills at random"

    def judged(self, number: int, case: Case) -> str:
        jobs, job = self.jobs, case.job
        home, outcome = jobs.copied(job), None
        if case.mode == "random":
            self._at_random(case, home, chance(self.seed, number))
        else:
            journal = jobs.stage.folder / "journal"
            shutil.rmtree(f"{journal}.kept", ignore_errors=True)
            outcome = jobs.run(job, home, Events(home, journal, case.mode, int(case.at)).install)
            done = case.at == len(jobs.events[job.name])  # results that were reported survive a power cut
            check(outcome.code == (0 if done else -signal.SIGKILL), f"not killed: {outcome}", "crash")
            if case.mode == "power":
                cut(journal)
        jobs.judge(job, home, outcome)
        return ACCEPTED

    def _at_random(self, case: Case, home: Path, rng: random.Random) -> None:
        jobs, job = self.jobs, case.job
        jobs.write_text(job)
        seconds = jobs.seconds[job.name]
        if rng.random() < 0.25 and isinstance(job.command, str):
            process = jobs.stage.execute(job.command, home)
            time.sleep(case.at * (seconds + 0.5))
            process.kill()
            process.communicate()
            return
        child = jobs.stage.begin(job.command, home)
        time.sleep(case.at * seconds)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        jobs.stage.end(child)

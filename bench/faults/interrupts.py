"""Processes that are asked to end: SIGINT, SIGTERM and SIGHUP at random instants, from our first line on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

from bench.faults.frame import Budget, Row, Verdict, chance, tried
from bench.faults.kills import Job, Jobs, all_jobs
from bench.faults.stage import Outcome

TITLE = (
    "`notes`, executed again each time, gets SIGINT (three of five), SIGTERM or SIGHUP at a random instant from "
    "our first line to the end: the commands of the kills."
)
FAILS = (
    "a traceback, more than one line, another status than 130 (or, for the other signals, their own; 0 where it was "
    "done already), more than 20 s, and all that is a failure after a kill."
)
CASES, SHARE = 400, 2
SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(budget: Budget, seed: int) -> Row:
    return tried(Interrupts(all_jobs(), seed), budget, say="interrupts")


class Interrupts:
    def __init__(self, jobs: Jobs, seed: int) -> None:
        self.jobs, self.seed = jobs, seed
        self.chosen = [job for job in jobs.jobs if not callable(job.arguments)]
        self.seconds: dict[str, float] = {}  # how long each takes in a process of its own

    def _whole(self, job: Job) -> float:
        home = self.jobs.stage.copied(self.jobs.stage.home(job.home), "home")
        process = self._begun(job, home)
        begun = time.monotonic()
        process.communicate()
        return time.monotonic() - begun

    def _begun(self, job: Job, home: object) -> subprocess.Popen[str]:
        """Wait until the first line of the command has run; before that, Python starts."""
        self.jobs.text.write_text(job.text)
        arguments = self.jobs.arguments(job, home)  # type: ignore[arg-type]
        assert not callable(arguments)
        reading, telling = os.pipe()
        try:
            process = self.jobs.stage.apart(arguments, home, telling)  # type: ignore[arg-type]
        finally:
            os.close(telling)
        with os.fdopen(reading, "rb") as told:
            told.read()
        return process

    def __call__(self, number: int) -> Verdict:
        rng: random.Random = chance(self.seed, number)
        job, which, part = rng.choice(self.chosen), rng.choice(SIGNALS), rng.random()
        if job.name not in self.seconds:
            self.seconds[job.name] = self._whole(job)
        home = self.jobs.stage.copied(self.jobs.stage.home(job.home), "home")
        process = self._begun(job, home)
        time.sleep(part * 1.05 * self.seconds[job.name])
        process.send_signal(which)
        try:
            out, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Verdict("hang", f"{job.name} goes on after {which.name}")
        ended = Outcome(process.returncode, out, err)
        where = f"{job.name}, {which.name} at {part:.2f}"
        if "Traceback" in err or "Error" in err.split("notes:")[0]:
            return Verdict("crash", f"{where}: {err.strip()[-300:]}")
        right = {signal.SIGINT: (130, -signal.SIGINT)}.get(which, (-which, 128 + which))
        if ended.code != 0 and ended.code not in right:
            return Verdict("wrong", f"{where}: status {ended.code}: {err.strip()[-200:]}")
        said = [line for line in err.splitlines() if line.startswith("notes:")]
        if ended.code and len(said) > 1:
            return Verdict("wrong", f"{where}: {len(said)} lines: {said}")
        verdict = self.jobs.judge(job, home, ended=ended)
        return verdict._replace(why=f"{where}: {verdict.why}") if verdict.why else verdict

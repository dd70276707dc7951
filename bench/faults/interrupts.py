"""Processes that are asked to end: SIGINT, SIGTERM and SIGHUP at random instants, from our first line on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from bench.faults.frame import ACCEPTED, Failed, Kind, chance, check
from bench.faults.jobs import Job, Jobs, all_jobs
from bench.faults.stage import Outcome

SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts(Kind):
    """The commands of the kills, each executed from scratch."""

    cases, share = 400, 2

    def __init__(self, seed: int, jobs: Jobs | None = None) -> None:
        super().__init__(seed)
        self.jobs = jobs or all_jobs()
        self.chosen = [job for job in self.jobs.jobs if isinstance(job.command, str)]
        self.seconds: dict[str, float] = {}  # that each takes in a process of its own

    def _begun(self, job: Job, home: Path) -> subprocess.Popen[str]:
        """The process of a command, once its first line has run; before that, Python starts."""
        assert isinstance(job.command, str)
        self.jobs.write_text(job)
        reading, writing = os.pipe()
        try:
            process = self.jobs.stage.execute(job.command, home, writing)
        finally:
            os.close(writing)
        with os.fdopen(reading, "rb") as begun:
            begun.read()
        return process

    def judge(self, number: int) -> str:
        rng = chance(self.seed, number)
        job, which, part = rng.choice(self.chosen), rng.choice(SIGNALS), rng.random()
        if job.name not in self.seconds:
            process = self._begun(job, self.jobs.copied(job))
            started = time.monotonic()
            process.communicate()
            self.seconds[job.name] = time.monotonic() - started
        home = self.jobs.copied(job)
        process = self._begun(job, home)
        time.sleep(part * 1.05 * self.seconds[job.name])
        process.send_signal(which)
        try:
            out, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise Failed(f"{job.name} continues after {which.name}", "hang") from error
        code, where = process.returncode, f"{job.name}, {which.name} at {part:.2f}"
        tidy = "Traceback" not in err and "Error" not in err.split("notes:")[0]
        check(tidy, f"{where}: {err.strip()[-300:]}", "crash")
        right = (130, -signal.SIGINT) if which == signal.SIGINT else (-which, 128 + which)
        check(code in (0, *right), f"{where}: status {code}: {err.strip()[-200:]}")
        lines = [line for line in err.splitlines() if line.startswith("notes:")]
        check(code == 0 or len(lines) <= 1, f"{where}: {lines}")
        try:
            self.jobs.judge(job, home, Outcome(code, out, err))
        except Failed as error:
            raise Failed(f"{where}: {error}", error.outcome) from error
        return ACCEPTED

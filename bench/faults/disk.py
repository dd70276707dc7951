"""Full disks: every write refused, for once and from then on; files that may not grow; a file system that is full."""

from __future__ import annotations

import os
import random
import resource
import subprocess
from functools import partial
from pathlib import Path

from bench.faults.events import FILLS, Events
from bench.faults.frame import REFUSED, Budget, Row, Verdict, tried
from bench.faults.kills import Job, Jobs, all_jobs

TITLE = (
    "The commands of the kills on a disk that is full: at every open, write, fsync, rename, link and mkdir, for that "
    "one and for all from then on (ENOSPC); with a limit on the size of files (EFBIG) of 512 bytes to 16 kB; for root, "
    "on a file system in memory with 0 to 64 kB left."
)
FAILS = (
    "a traceback, an answer other than one clear line with the system's reason, status 0 where the work was not kept, "
    "status 1 where it was, and all that is a failure after a kill."
)
CASES, SHARE = 100_000, 2
SIZES = [*range(512, 16384, 512)]  # bytes that a file may have, the error output included
LEFT = [*range(0, 64, 4)]  # kB that a file system has left


def run(budget: Budget, seed: int) -> Row:
    full = Disk(all_jobs(), seed)
    row = tried(full, Budget(min(budget.cases, len(full.cases)), budget.until), say="disk")
    row.notes = "" if full.mounts else "no file system of its own could be mounted here, so that part was left out"
    return row


class Disk:
    def __init__(self, jobs: Jobs, seed: int) -> None:
        self.jobs = jobs
        self.mounts = mounted(jobs.stage.home("mounted"), 64)
        if self.mounts:
            unmounted(jobs.stage.home("mounted"))
        self.cases: list[tuple[Job, str, int]] = []
        for job in jobs.jobs:
            for number, event in enumerate(jobs.events[job.name]):
                if event in FILLS:
                    self.cases += [(job, "full", number), (job, "once", number)]
            self.cases += [(job, "size", size) for size in SIZES]
            self.cases += [(job, "left", left) for left in (LEFT if self.mounts else ())]
        random.Random(seed).shuffle(self.cases)

    def __call__(self, number: int) -> Verdict:
        job, mode, at = self.cases[number]
        home = self.jobs.stage.home("mounted" if mode == "left" else "home")
        try:
            verdict = self._judged(job, mode, at, home)
        finally:
            if mode == "left":
                unmounted(home)
        return verdict._replace(why=f"{job.name}, {mode} {at}: {verdict.why}") if verdict.why else verdict

    def _judged(self, job: Job, mode: str, at: int, home: Path) -> Verdict:
        stage = self.jobs.stage
        source = stage.home(job.home)
        if mode == "left":
            used = sum(-(-path.stat().st_size // 4096) * 4 + 4 for path in source.rglob("*"))
            mounted(home, used + at + 8)
            subprocess.run(["cp", "-a", f"{source}/.", str(home)], check=True)
            before = None
        else:
            stage.copied(source, "home")
            before = (
                partial(resource.setrlimit, resource.RLIMIT_FSIZE, (at, at))
                if mode == "size"
                else Events(home, stage.folder / "journal", mode, at).install
            )
        outcome = self.jobs.run(job, home, before)
        if outcome.untidy:
            return Verdict("crash", outcome.untidy)
        if mode == "left":  # there is space again
            subprocess.run(["mount", "-o", "remount,size=64m", str(home)], check=True)
        verdict = self.jobs.judge(job, home, ended=outcome)
        return REFUSED if verdict.outcome == "accepted" and outcome.code else verdict


def mounted(folder: Path, kilobytes: int) -> bool:
    """True if an empty file system of that size is mounted; requires root."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,mode=700", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def unmounted(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)

"""Full disks: every write refused, for once and from then on; files that may not grow; a file system that is full."""

from __future__ import annotations

import os
import random
import resource
import subprocess
from functools import partial
from pathlib import Path

from bench.faults.events import FILLS, Events
from bench.faults.frame import ACCEPTED, REFUSED
from bench.faults.jobs import Job, Listed

SIZES = [*range(512, 16384, 512)]  # bytes that a file may have, the error output included
LEFT = [*range(0, 64, 4)]  # kB that a file system has left


class Disk(Listed):
    """The commands of the kills on a disk that is full: at every event that needs space, and by limits."""

    share = 2
    mounts = False

    def listed(self, rng: random.Random) -> list[tuple[Job, str, int]]:
        self.mounts = mounted(self.jobs.stage.folder / "mounted", 64)
        if self.mounts:
            unmounted(self.jobs.stage.folder / "mounted")
        every: list[tuple[Job, str, int]] = []
        for job in self.jobs.jobs:
            numbers = [number for number, event in enumerate(self.jobs.events[job.name]) if event in FILLS]
            every += [(job, mode, number) for number in numbers for mode in ("full", "once")]
            every += [(job, "size", size) for size in SIZES]
            every += [(job, "left", left) for left in (LEFT if self.mounts else ())]
        return every

    def notes(self) -> str:
        return "" if self.mounts else "no file system could be mounted here, so that part was left out"

    def judged(self, number: int, case: tuple[Job, str, int]) -> str:
        home = self.jobs.stage.folder / ("mounted" if case[1] == "left" else "home")
        try:
            return self._judged(*case, home)
        finally:
            if case[1] == "left":
                unmounted(home)

    def _judged(self, job: Job, mode: str, at: int, home: Path) -> str:
        before = None
        if mode == "left":
            source = self.jobs.home(job)
            used = sum(-(-path.stat().st_size // 4096) * 4 + 4 for path in source.rglob("*"))
            mounted(home, used + at + 8)
            subprocess.run(["cp", "-a", f"{source}/.", str(home)], check=True)
        else:
            self.jobs.copied(job)
            before = Events(home, self.jobs.stage.folder / "journal", mode, at).install
            if mode == "size":
                before = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (at, at))
        outcome = self.jobs.run(job, home, before)
        outcome.check_tidy()
        if mode == "left":  # there is space again
            subprocess.run(["mount", "-o", "remount,size=64m", str(home)], check=True)
        self.jobs.judge(job, home, outcome)
        return REFUSED if outcome.code else ACCEPTED


def mounted(folder: Path, kilobytes: int) -> bool:
    """True if an empty file system of that size is mounted; requires root."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,mode=700", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def unmounted(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)

"""Files without read or write permission, and files that others may write."""

from __future__ import annotations

import ctypes
import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.faults.frame import ACCEPTED, REFUSED, check
from bench.faults.jobs import Job, Listed

CAPABILITY_VERSION = 0x20080522


class Bar(NamedTuple):
    """A restriction of a home: paths below it, and their mode or owner."""

    name: str
    paths: Sequence[str]
    mode: int = -1
    owner: int = -1
    reads: bool = True  # reading commands must still work
    unsafe: bool = False  # it must be refused


HOME = ("", "library", "library/.locks", "sessions", "sessions/.locks", "models", "profiles")
BARS = (
    Bar("read-only home", HOME, 0o500),
    Bar("read-only library", ["library"], 0o500),
    Bar("read-only sessions", ["sessions"], 0o500),
    Bar("read-only session", ["sessions/mine", "sessions/other"], 0o500),
    Bar("read-only ledger", ["sessions/mine/ledger.jsonl"], 0o400),
    Bar("locks that cannot be taken", ["library/.locks", "sessions/.locks"], 0o500),
    Bar("read-only segments", ["library/*.gguf"], 0o400),
    Bar("digests that cannot be kept", ["models"], 0o500),
    Bar("export folder closed", ["out"], 0o500),
    *(
        Bar(f"unreadable {path}", [path], 0o000, reads=False)
        for path in ("library/*.gguf", "sessions/*/ledger.jsonl", "sessions/*/*.gguf", "profiles/*", "library")
    ),
    Bar("library of all", ["library"], 0o777, reads=False, unsafe=True),
    Bar("sessions of all", ["sessions"], 0o777, reads=False, unsafe=True),
    Bar("home of all", [""], 0o777, reads=False, unsafe=True),
    Bar("library of a group", ["library"], 0o770, reads=False, unsafe=True),
    Bar("another's library", ["library"], owner=1, reads=False, unsafe=True),
    Bar("another's sessions", ["sessions"], owner=1, reads=False, unsafe=True),
)
# Commands that only read.
READS = (
    *("ls", "ls --json", "inspect returns", "session ls", "session show mine", "ask 'May I?' --splice returns"),
    "verify returns --question 'May I?'",
)


class Permissions(Listed):
    """Every command under every restriction, as an ordinary user."""

    def listed(self, rng: random.Random) -> list[tuple[Bar, Job | str]]:
        bars = [bar for bar in BARS if bar.owner < 0 or os.geteuid() == 0]
        commands: list[Job | str] = [*(job for job in self.jobs.jobs if job.home == "begun"), *READS]
        return [(bar, command) for bar in bars for command in commands]

    def notes(self) -> str:
        return "" if os.geteuid() == 0 else "run by no root, so nothing was another's"

    def judged(self, number: int, case: tuple[Bar, Job | str]) -> str:
        bar, what = case
        home = self.jobs.copied(self.jobs.jobs[0]._replace(home="begun"))
        return self._wrote(bar, what, home) if isinstance(what, Job) else self._read(bar, what, home)

    def _wrote(self, bar: Bar, job: Job, home: Path) -> str:
        undo = restricted(home, bar)
        outcome = self.jobs.run(job, home, drop_capabilities)
        undo()
        outcome.check_tidy()
        sessions = bool(job.session) or (isinstance(job.command, str) and job.command.startswith("session"))
        if job.name != "profile":
            self._check_safe(bar, "sessions" if sessions else "library", outcome.code)
        self.jobs.judge(job, home, outcome)
        return REFUSED if outcome.code else ACCEPTED

    def _read(self, bar: Bar, command: str, home: Path) -> str:
        undo = restricted(home, bar)
        outcome = self.jobs.stage.run(command, home, drop_capabilities)
        undo()
        if not command.startswith("verify"):  # its status 1 is a result
            outcome.check_tidy()
            check(outcome.code == 0 or not bar.reads, f"status {outcome.code}: {outcome.err.strip()[-200:]}")
        self._check_safe(bar, "sessions" if command.startswith("session") else "library", outcome.code)
        return REFUSED if outcome.code else ACCEPTED

    def _check_safe(self, bar: Bar, folder: str, code: int) -> None:
        used = bar.unsafe and code == 0 and bar.paths[0] in ("", folder)
        check(not used, "it was used, and others may write there")


def restricted(home: Path, bar: Bar) -> Callable[[], None]:
    """Set modes and owners; return a function that restores them."""
    paths = [path for pattern in bar.paths for path in (home.glob(pattern) if pattern else [home])]
    before = [(path, path.stat()) for path in paths]
    for path in paths:
        if bar.owner >= 0:
            os.chown(path, bar.owner, bar.owner)
        if bar.mode >= 0:
            path.chmod(bar.mode)

    def undo() -> None:
        for path, old in before:
            if path.exists():
                os.chown(path, old.st_uid, -1)
                path.chmod(old.st_mode & 0o7777)

    return undo


def drop_capabilities() -> None:
    """Make owners and modes apply to root, too."""
    if os.geteuid() == 0:
        head, none = struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.capset(head, none):
            raise OSError(ctypes.get_errno(), "capset")

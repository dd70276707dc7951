"""Files without read or write permission, and files that others may write."""

from __future__ import annotations

import ctypes
import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.faults.frame import ACCEPTED, REFUSED, Budget, Row, Verdict, tried
from bench.faults.kills import Job, Jobs, all_jobs
from bench.faults.stage import ANSWER

TITLE = (
    "The commands of the kills, and those that only read, with folders and files that may not be read or written (as "
    "an ordinary user, also where the campaign is root's), that anybody may write, or that are another's."
)
FAILS = (
    "a traceback, an answer other than one clear line, status 0 where the work was not kept, anything used or written "
    "where others may write, a refusal of what needs no writing, and all that is a failure after a kill."
)
CASES, SHARE = 100_000, 1
CAPABILITY_VERSION = 0x20080522


class Bar(NamedTuple):
    """A restriction of a home: paths below it, and their mode or owner."""

    name: str
    paths: Sequence[str]
    mode: int = -1
    owner: int = -1
    reads: bool = True  # True if reading commands must still work
    unsafe: bool = False  # whether it must be refused


BARS = (
    Bar(
        "read-only home", ["", "library", "library/.locks", "sessions", "sessions/.locks", "models", "profiles"], 0o500
    ),
    Bar("read-only library", ["library"], 0o500),
    Bar("read-only sessions", ["sessions"], 0o500),
    Bar("read-only session", ["sessions/mine", "sessions/other"], 0o500),
    Bar("read-only ledger", ["sessions/mine/ledger.jsonl"], 0o400),
    Bar("locks that cannot be taken", ["library/.locks", "sessions/.locks"], 0o500),
    Bar("read-only segments", ["library/*.gguf"], 0o400),
    Bar("unreadable segments", ["library/*.gguf"], 0o000, reads=False),
    Bar("unreadable ledgers", ["sessions/*/ledger.jsonl"], 0o000, reads=False),
    Bar("unreadable rows", ["sessions/*/*.gguf"], 0o000, reads=False),
    Bar("unreadable profile", ["profiles/*"], 0o000, reads=False),
    Bar("unreadable library", ["library"], 0o000, reads=False),
    Bar("digests that cannot be kept", ["models"], 0o500),
    Bar("export folder closed", ["out"], 0o500),
    Bar("library of all", ["library"], 0o777, reads=False, unsafe=True),
    Bar("sessions of all", ["sessions"], 0o777, reads=False, unsafe=True),
    Bar("home of all", [""], 0o777, reads=False, unsafe=True),
    Bar("library of a group", ["library"], 0o770, reads=False, unsafe=True),
    Bar("another's library", ["library"], owner=1, reads=False, unsafe=True),
    Bar("another's sessions", ["sessions"], owner=1, reads=False, unsafe=True),
)
# Reading commands, and the folder that each uses.
READS = (
    (["ls"], "library"),
    (["ls", "--json"], "library"),
    (["inspect", "returns", "MODEL"], "library"),
    (["session", "ls"], "sessions"),
    (["session", "show", "mine"], "sessions"),
    (["ask", "May I?", "--splice", "returns", "MODEL"], "library"),
    (["verify", "returns", "--question", "May I?", "MODEL"], "library"),
)


def run(budget: Budget, seed: int) -> Row:
    closed = Permissions(all_jobs(), seed)
    row = tried(closed, Budget(min(budget.cases, len(closed.cases)), budget.until), say="permissions")
    row.notes = "" if os.geteuid() == 0 else "run by no root, so nothing was another's"
    return row


class Permissions:
    def __init__(self, jobs: Jobs, seed: int) -> None:
        self.jobs = jobs
        bars = [bar for bar in BARS if bar.owner < 0 or os.geteuid() == 0]
        self.cases: list[tuple[Bar, Job | tuple[list[str], str]]] = [
            (bar, what) for bar in bars for what in (*jobs.jobs, *READS)
        ]
        random.Random(seed).shuffle(self.cases)

    def __call__(self, number: int) -> Verdict:
        bar, what = self.cases[number]
        home = self.jobs.stage.copied(self.jobs.stage.home("begun"), "home")
        if isinstance(what, Job) and what.home != "begun":
            return ACCEPTED
        verdict = self._job(bar, what, home) if isinstance(what, Job) else self._read(bar, *what, home)
        name = what.name if isinstance(what, Job) else " ".join(what[0][:2])
        return verdict._replace(why=f"{bar.name}, {name}: {verdict.why}") if verdict.why else verdict

    def _job(self, bar: Bar, job: Job, home: Path) -> Verdict:
        undo = _barred(home, bar)
        outcome = self.jobs.run(job, home, _ordinary)
        undo()
        if outcome.untidy:
            return Verdict("crash", outcome.untidy)
        about = job.session or (not callable(job.arguments) and "session" in job.arguments)
        folder = "sessions" if about else "library"
        if bar.unsafe and outcome.code == 0 and bar.paths[0] in ("", folder) and job.name != "profile":
            return Verdict("wrong", "it was used, and others may write there")
        verdict = self.jobs.judge(job, home, ended=outcome)
        return REFUSED if verdict.outcome == "accepted" and outcome.code else verdict

    def _read(self, bar: Bar, arguments: list[str], folder: str, home: Path) -> Verdict:
        model = [*self.jobs.stage.options(), *(ANSWER if arguments[0] == "ask" else ())]
        command = [part for argument in arguments for part in (model if argument == "MODEL" else [argument])]
        if arguments[0] == "inspect":
            command = ["inspect", "returns"]
        undo = _barred(home, bar)
        outcome = self.jobs.stage.run(command, home, before=_ordinary)
        undo()
        if outcome.untidy and not (arguments[0] == "verify" and outcome.code == 1):
            return Verdict("crash", outcome.untidy)
        if bar.reads and outcome.code != 0 and arguments[0] != "verify":
            return Verdict("wrong", f"status {outcome.code}: {outcome.err.strip()[-200:]}")
        if bar.unsafe and outcome.code == 0 and bar.paths[0] in ("", folder):
            return Verdict("wrong", "it was used, and others may write there")
        return ACCEPTED if outcome.code == 0 else REFUSED


def _barred(home: Path, bar: Bar) -> Callable[[], None]:
    """Set modes and owners; return a function that restores them."""
    before = []
    for pattern in bar.paths:
        for path in home.glob(pattern) if pattern else [home]:
            found = path.stat()
            before.append((path, found.st_mode & 0o7777, found.st_uid))
    for path, _, _ in before:
        if bar.owner >= 0:
            os.chown(path, bar.owner, bar.owner)
        if bar.mode >= 0:
            path.chmod(bar.mode)

    def undo() -> None:
        for path, mode, owner in before:
            if path.exists():
                os.chown(path, owner, -1)
                path.chmod(mode)

    return undo


def _ordinary() -> None:
    """Drop root's capabilities, so that owners and modes apply."""
    if os.geteuid() == 0:
        head, none = struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.capset(head, none):
            raise OSError(ctypes.get_errno(), "capset")

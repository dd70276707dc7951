"""Run numbered cases of a kind of fault in child processes, so that a crash or a hang ends only its case.

A kind is a subclass of `Kind`, in a module of its own. Its `judge` takes the number of a case and returns "accepted"
or "refused", or raises `Failed`. All that is random in a case comes from `chance(seed, number)`: it can be repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "build" / "faults"  # files that made a case fail
MEMORY = Path("/dev/shm")  # a folder in memory, where there is one: the campaign syncs a hundred thousand times
SCRATCH = (MEMORY if os.access(MEMORY, os.W_OK) else FOUND) / f"notes-faults-{os.getpid()}"
ACCEPTED, REFUSED = "accepted", "refused"
BAD = ("crash", "hang", "wrong", "loss")
OUTCOMES = (ACCEPTED, REFUSED, *BAD)
KEPT = 20  # failures printed per row
ALIKE = 3  # of them, of one sort


class Failed(Exception):
    """A case has failed.

    crash: a traceback, a signal, memory without bound. hang: longer than it may take. wrong: taken, and not as it
    should be. loss: something that was stored is gone, or what should continue does not.
    """

    def __init__(self, why: str, outcome: str = "wrong") -> None:
        super().__init__(why)
        self.outcome = outcome


def check(right: object, why: str, outcome: str = "wrong") -> None:
    """Raise Failed unless `right` is true."""
    if not right:
        raise Failed(why, outcome)


def refused(error: Exception) -> str:
    """The outcome of a refusal, which must be one clear line."""
    check(str(error).isprintable() and len(str(error)) <= 1000, f"no clear line: {str(error)[:300]!r}")
    return REFUSED


def chance(seed: int, number: int) -> random.Random:
    """Random numbers of one case: the same for the same seed and number."""
    return random.Random(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest())


class Kind:
    """A kind of fault."""

    cases: int  # of the full campaign
    share: ClassVar[int] = 1  # of the time of a slice, relative to the others
    patience: ClassVar[float] = 60.0  # seconds that a case may take
    memory: ClassVar[int] = 0  # address space in bytes; 0: any

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def folder(self) -> Path:
        """An empty folder for the files of this kind."""
        path = SCRATCH / self.name
        path.mkdir(parents=True, mode=0o700)
        return path

    def judge(self, number: int) -> str:
        """The outcome of a case. Raises Failed."""
        raise NotImplementedError

    def notes(self) -> str:
        """Figures for the report, after all cases."""
        return ""


class Mutants(Kind):
    """A kind whose cases are files. The file of a case that fails is kept."""

    suffix: ClassVar[str] = ""

    def mutant(self, rng: random.Random, number: int) -> bytes:
        """The file of a case."""
        raise NotImplementedError

    def examine(self, rng: random.Random, number: int, data: bytes) -> str:
        """The outcome of a file. Raises Failed."""
        raise NotImplementedError

    def judge(self, number: int) -> str:
        rng = chance(self.seed, number)
        data = self.mutant(rng, number)
        try:
            return self.examine(rng, number, data)
        except Exception:
            (FOUND / f"{self.name}-{number}{self.suffix}").write_bytes(data)
            raise


@dataclass
class Row:
    """Outcomes of one kind of fault."""

    kind: str
    seed: int
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    failures: list[str] = field(default_factory=list)  # the first of each sort: outcome, number and why
    notes: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return sum(self.counts[outcome] for outcome in BAD)


def run(kind: Kind, cases: int | None = None, until: float = float("inf")) -> Row:
    """Run the cases 0, 1, ... in a process, and continue in a new one after a crash or a hang.

    `cases`: how many at most, all by default. `until`: no case begins later (time.monotonic).
    """
    row, number, started = Row(kind.name, kind.seed), 0, time.monotonic()
    alike = Counter[str]()

    def count(outcome: str, why: str = "") -> None:
        row.counts[outcome] += 1
        sort = outcome + re.sub("[0-9]+", "", why)[:60]
        alike[sort] += outcome in BAD
        if outcome in BAD and alike[sort] <= ALIKE and len(row.failures) < KEPT:
            row.failures.append(f"{outcome} in case {number}: {' '.join(why.split())[:600]}")

    cases = kind.cases if cases is None else cases
    while number < cases and time.monotonic() < until:
        results, writing = os.pipe()
        parent, child = os.getpid(), os.fork()
        if not child:
            _judge(kind, range(number, cases), until, writing, parent)
        os.close(writing)
        status, data, since = None, b"", time.monotonic()
        while status is None:
            if select.select([results], [], [], 0.2)[0] and (part := os.read(results, 1 << 16)):
                *lines, data = (data + part).split(b"\n")
                for line in lines:
                    count(*json.loads(line))
                    number += 1
                since = time.monotonic()
            elif (ended := os.waitpid(child, os.WNOHANG))[0]:
                status = ended[1]
            elif time.monotonic() - since > kind.patience:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                count("hang", f"more than {kind.patience:.0f} s")
                break
        os.close(results)
        if status == 0:
            break
        if status is not None:
            count("crash", _exit_of(status))
        number += 1
    row.notes, row.seconds = kind.notes(), time.monotonic() - started
    return row


def _judge(kind: Kind, numbers: Sequence[int], until: float, results: int, parent: int) -> None:
    """The child's part: writes a line of JSON per case. Never returns."""
    os.setpgid(0, 0)
    me = os.getpid()
    if kind.memory:
        resource.setrlimit(resource.RLIMIT_AS, (kind.memory, kind.memory))
    try:
        for number in numbers:
            if time.monotonic() >= until or os.getppid() != parent:  # its parent no longer waits
                break
            why = ""
            try:
                outcome = kind.judge(number)
            except Failed as error:
                outcome, why = error.outcome, str(error)
            except BaseException as error:
                outcome, why = "crash", traced(error)
            if os.getpid() != me:  # a process that the judge forked came back: as a second judge it would fork more
                os._exit(70)
            os.write(results, json.dumps([outcome, why[:1000]]).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _exit_of(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def waited(child: int, seconds: float) -> tuple[int, resource.struct_rusage]:
    """Wait for a forked process; return its exit code and resource usage. Kills a slow one, and raises Failed."""
    until = time.monotonic() + seconds
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), used
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise Failed(f"more than {seconds:.0f} s", "hang")
        time.sleep(0.002)


def traced(error: BaseException) -> str:
    """An exception and where it came from, in one line."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in where)
    return f"{type(error).__name__}: {str(error)[:200]}{place}"

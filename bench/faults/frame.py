"""The frame of the fault campaign: judges numbered cases in processes, so that a crash ends only its case.

A kind of fault is a module of bench/faults with

    TITLE: str          what is tried, for the table
    FAILS: str          what counts as a failure, beside a crash and a hang
    CASES: int          how many cases the full campaign has
    SHARE: int          how much of the time of a slice it gets, relative to the others
    run(budget, seed)   -> Row

`run` makes a judge, which takes the number of a case and returns a Verdict, and hands it to `tried`. The judge draws
all that it does by chance from `chance(seed, number)`, so that a case can be had again by its seed and number.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import re
import resource
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "build" / "faults"  # files that made a case fail
MEMORY = Path("/dev/shm")  # a folder in memory, where there is one: the campaign syncs a hundred thousand times
SCRATCH = (MEMORY if os.access(MEMORY, os.W_OK) else FOUND) / f"notes-faults-{os.getpid()}"
GOOD = ("accepted", "refused")
BAD = ("crash", "hang", "wrong", "loss")
KEPT = 20  # failures printed per row
ALIKE = 3  # of them, of one sort
PATIENCE = 60.0  # seconds that a case may take


class Verdict(NamedTuple):
    """What came of one case.

    accepted: it was taken, and is what it should be. refused: with one clear line, and nothing changed. crash: a
    traceback, a signal, memory without bound. hang: longer than it may take. wrong: taken, and not what it should be.
    loss: something that was kept before is gone, or what should go on does not.
    """

    outcome: str
    why: str = ""


ACCEPTED, REFUSED = Verdict("accepted"), Verdict("refused")
Judge = Callable[[int], Verdict]


@dataclass
class Budget:
    """How many cases there may be, and until when (time.monotonic) another one may begin."""

    cases: int
    until: float = float("inf")

    @classmethod
    def of(cls, cases: int, seconds: float = float("inf")) -> Budget:
        return cls(cases, time.monotonic() + seconds)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until


@dataclass
class Row:
    """A line of the table: one kind of fault."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    crashes: int = 0
    hangs: int = 0
    wrong: int = 0
    losses: int = 0
    notes: str = ""  # further remarks
    failures: list[str] = field(default_factory=list)  # the first of them: number and why
    kind: str = ""  # from here on filled in by the campaign
    seed: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return self.crashes + self.hangs + self.wrong + self.losses

    def count(self, outcome: str, times: int = 1) -> None:
        name = {"crash": "crashes", "hang": "hangs", "loss": "losses"}.get(outcome, outcome)
        setattr(self, name, getattr(self, name) + times)
        self.cases += times

    def fail(self, outcome: str, number: int | str, why: str) -> None:
        """Report a failure that is counted elsewhere."""
        if len(self.failures) < KEPT:
            self.failures.append(f"{outcome} in case {number}: {why}")

    def __add__(self, other: Row) -> Row:
        """Two parts of one kind as one row."""
        mine, its = asdict(self), asdict(other)
        numbers = {name: mine[name] + its[name] for name in mine if isinstance(mine[name], int) and name != "seed"}
        notes = "; ".join(part for part in (self.notes, other.notes) if part)
        return Row(**{**mine, **numbers, "notes": notes, "failures": [*self.failures, *other.failures][:KEPT]})


def chance(seed: int, number: int) -> random.Random:
    """The chance of one case: the same for the same seed and number."""
    return random.Random(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest())


def tried(judge: Judge, budget: Budget, *, patience: float = PATIENCE, memory: int = 0, say: str = "") -> Row:
    """Judge the cases 0, 1, ... in a process, and continue in a new one after a crash. An exception from the judge is a
    crash, as is the end of the process; more than `patience` seconds is a hang. `memory`: address space per case in
    bytes. `say` names the kind."""
    row, begun, told = Row(), time.monotonic(), 0.0
    with _Shared() as shared:
        first = 0
        while first < budget.cases and not budget.over:
            parent = os.getpid()
            child = os.fork()
            if not child:
                _judge(judge, first, budget, shared, memory, parent)
            current, since = -1, time.monotonic()
            while True:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    break
                now = time.monotonic()
                if shared.current != current:
                    current, since = shared.current, now
                if now - since > patience:
                    with suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    status = -1
                    break
                if say and now - told > 2:
                    told = now
                    _progress(say, shared, budget, now - begun)
                time.sleep(0.02)
            first = shared.current
            if status == 0:
                break
            outcome = "hang" if status < 0 else "crash"
            why = f"more than {patience:.0f} s" if status < 0 else _ended(status)
            shared.add(outcome)
            shared.fail(outcome, first - 1, why)
        for outcome in (*GOOD, *BAD):
            row.count(outcome, shared.counted(outcome))
        for outcome, number, why in shared.failures():
            row.fail(outcome, number, why)
    if say and sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    return row


def waited(child: int, seconds: float) -> tuple[int, resource.struct_rusage]:
    """Wait for a forked process; return its status and resource usage. Kills a slow one, and raises TimeoutError."""
    until = time.monotonic() + seconds
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            return status, used
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"more than {seconds:.0f} s")
        time.sleep(0.002)


def _ended(status: int) -> str:
    number = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-number).name}" if number < 0 else f"status {number}"


def _judge(judge: Judge, first: int, budget: Budget, shared: _Shared, memory: int, parent: int) -> None:
    """The child's part. Never returns."""
    os.setpgid(0, 0)
    me = os.getpid()
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        for number in range(first, budget.cases):
            if budget.over or os.getppid() != parent:  # its parent no longer waits
                break
            shared.current = number + 1
            try:
                verdict = judge(number)
            except BaseException as error:
                verdict = Verdict("crash", traced(error))
            if os.getpid() != me:  # a process that the judge forked came back: as a second judge it would fork more
                os._exit(70)
            shared.add(verdict.outcome)
            if verdict.outcome in BAD:
                shared.fail(verdict.outcome, number, verdict.why)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def traced(error: BaseException) -> str:
    """An exception and where it came from, in one line."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in where)
    return f"{type(error).__name__}: {str(error)[:200]}{place}"


class _Shared:
    """Counts of a child in shared memory, which outlives the child."""

    def __init__(self) -> None:
        self._numbers = mmap.mmap(-1, 8 * (1 + len(GOOD) + len(BAD)))
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)  # failures that do not fit are counted, not printed
        self._told: Counter[str] = Counter()

    def __enter__(self) -> _Shared:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._read)
        os.close(self._write)
        self._numbers.close()

    @property
    def current(self) -> int:
        """One more than the number of the case at hand."""
        return int(struct.unpack_from("q", self._numbers, 0)[0])

    @current.setter
    def current(self, number: int) -> None:
        struct.pack_into("q", self._numbers, 0, number)

    def counted(self, outcome: str) -> int:
        return int(struct.unpack_from("q", self._numbers, 8 * (1 + (*GOOD, *BAD).index(outcome)))[0])

    def add(self, outcome: str) -> None:
        at = 8 * (1 + (*GOOD, *BAD).index(outcome))
        struct.pack_into("q", self._numbers, at, struct.unpack_from("q", self._numbers, at)[0] + 1)

    def fail(self, outcome: str, number: int, why: str) -> None:
        """Report a failure; of each sort the first few only."""
        self._told[sort := outcome + re.sub("[0-9]+", "", why)[:60]] += 1
        if self._told[sort] > ALIKE:
            return
        line = json.dumps([outcome, number, " ".join(why.split())[:600]]) + "\n"
        with suppress(BlockingIOError):
            os.write(self._write, line.encode())

    def failures(self) -> list[tuple[str, int, str]]:
        data = b""
        with suppress(BlockingIOError):
            while part := os.read(self._read, 1 << 16):
                data += part
        return [(outcome, number, why) for outcome, number, why in map(json.loads, data.splitlines())]


def _progress(say: str, shared: _Shared, budget: Budget, seconds: float) -> None:
    bad = sum(shared.counted(outcome) for outcome in BAD)
    line = f"{say}: case {shared.current} of {budget.cases}, {bad} failed, {seconds:.0f} s"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line}")
        sys.stderr.flush()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after a time, for Python code; it cannot interrupt C."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

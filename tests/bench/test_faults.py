"""The fault campaign catches faults: each kind finds one that is planted, and none where there is none."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.faults import __main__ as campaign
from bench.faults import archives, containers, disk, forgeries, frame, kills, snapshots, stale
from bench.faults.frame import ACCEPTED, BAD, REFUSED, Failed, Kind, Row, run
from bench.faults.jobs import Jobs
from bench.faults.stage import Stage
from notes_cli.library import container
from notes_cli.runtime import check_rows, token_runs
from notes_cli.sessions import state
from notes_cli.sessions.folder import SessionFolder

from ..sessions.snapshots import HEADER, asked


@pytest.fixture(autouse=True)
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the campaign go to the test's own folders; one thread a model."""
    monkeypatch.setattr(frame, "FOUND", tmp_path)
    monkeypatch.setattr(frame, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(forgeries, "FOUND", tmp_path)
    monkeypatch.setenv("NOTES_THREADS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage.make(tmp_path_factory.mktemp("stage") / "stage")


@pytest.fixture
def make_jobs(stage: Stage) -> Callable[..., Jobs]:
    return lambda *names: Jobs(stage, names)


def outcomes(kind: Kind, cases: int | range, until: str = "") -> set[str]:
    """The outcomes of cases, up to the first one of a kind that is looked for."""
    seen: set[str] = set()
    for number in range(cases) if isinstance(cases, int) else cases:
        try:
            seen.add(kind.judge(number))
        except Failed as error:
            seen.add(error.outcome)
        if until in seen:
            break
    return seen


class Odd(Kind):
    """Cases that die, hang, raise or come back twice."""

    patience = 1.0

    def judge(self, number: int) -> str:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 4:
            time.sleep(60)
        if number == 5:
            raise ValueError("no refusal")
        if number == 6 and not os.fork():
            raise ValueError("a process of the judge's own that comes back")
        return ACCEPTED if number % 2 else REFUSED


def test_a_case_that_dies_or_hangs_ends_nothing() -> None:
    """Crashes, hangs and exceptions are counted with their numbers, and the cases after them are judged."""
    row = run(Odd(1), 9)
    assert row.counts == {"accepted": 3, "refused": 3, "crash": 2, "hang": 1, "wrong": 0, "loss": 0} and row.failed == 3
    kinds = [failure.split(":")[0] for failure in row.failures]
    assert kinds == ["crash in case 2", "hang in case 4", "crash in case 5"]
    assert frame.chance(9, 7).random() == frame.chance(9, 7).random() != frame.chance(9, 8).random()


def test_the_table_keeps_what_was_not_run(tmp_path: Path) -> None:
    """A run of one kind replaces its own row; what is written by hand stays."""
    (tmp_path / "results").mkdir()
    path = tmp_path / "reliability.md"
    path.write_text(f"before\n{campaign.BEGIN}\nold\n{campaign.END}\nafter\n")
    none = dict.fromkeys(frame.OUTCOMES, 0)
    wrong = Row("disk", 0, {**none, "wrong": 5}, ["wrong in case 3: x"])
    campaign.write(path, [Row("kills", 0, {**none, "accepted": 1000}), wrong])
    campaign.write(path, [Row("kills", 0, {**none, "accepted": 2000})])
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| kills | 0 | 2,000 |" in text and "| disk | 0 | 5 |" in text and "**disk**: wrong in case 3: x" in text


class Snapshots(Kind):
    """Changes of one snapshot of two turns."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        begun = asked("?", "!")
        files = dict.fromkeys(("0001.gguf", "0002.gguf"), "0" * 32)
        self.data = state.serialize(state.Snapshot(state.FORMAT, HEADER, "turn", "!", "2026", "2026", begun, files))
        assert snapshots.examined(self.data) == ACCEPTED

    def judge(self, number: int) -> str:
        return snapshots.examined(snapshots.snapshot_changed(random.Random(number), self.data, [self.data]))


def nothing(*_: object) -> None:
    """In place of a check."""


def believed(data: Any, head: Any, values: Any) -> Any:
    return values["notes.checksum.head"]


def everywhere(index: Any, model: Any, sources: Any, made: Any = token_runs.TextIndex.__init__) -> None:
    """An index that finds texts from each of their tokens on."""
    made(index, model, [token_runs.Texts(one.tokens, range(len(one.tokens))) for one in sources])


# A kind of cases; a function that is replaced (module, name, replacement) to plant a fault; cases that pass without it;
# cases of which one finds it.
SIMPLE: dict[str, tuple[Callable[[], Kind], tuple[Any, str, Any], range, range]] = {
    "a checksum": (lambda: containers.Containers(1), (container, "_check", nothing), range(100), range(300)),
    "that of a head": (lambda: containers.Containers(1), (container, "_head_sum", believed), range(9), range(300)),
    "values of a snapshot": (lambda: Snapshots(1), (state, "_check", nothing), range(300), range(2000)),
    "a bar that no row exceeds": (
        lambda: forgeries.Forgeries(1, ("notes-tiny",)),
        (check_rows._Tensor, "wrong", nothing),
        *(range(6, 14), range(forgeries.INTACT, 14)),
    ),
    "text before a run": (
        lambda: stale.Stale(1),
        (token_runs.TextIndex, "__init__", everywhere),
        range(2, 8, 2),
        range(8, 9),
    ),
    "rows of an archive": (
        lambda: archives.Archives(1),
        (SessionFolder, "faults", lambda stored: ()),
        *(range(40), range(300)),
    ),
}


@pytest.mark.parametrize("what", SIMPLE)
def test_what_is_not_checked_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, planted, sound, cases = SIMPLE[what]
    judge = make()
    assert outcomes(judge, sound) <= {ACCEPTED, REFUSED}
    monkeypatch.setattr(*planted)
    assert "wrong" in outcomes(judge, cases, "wrong")


@contextlib.contextmanager
def in_place(path: Path) -> Iterator[Path]:
    """A writer without a temporary file."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    yield path


@contextlib.contextmanager
def unsynced(path: Path) -> Iterator[Path]:
    """A writer that renames what is not on the disk."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    temporary = path.with_name(".temporary")
    yield temporary
    temporary.replace(path)


@contextlib.contextmanager
def silent(path: Path) -> Iterator[Path]:
    """A writer that says nothing of a full disk."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True, mode=0o700)
        yield path


@pytest.mark.parametrize("writer", [in_place, unsynced])
def test_kills(make_jobs: Callable[..., Jobs], monkeypatch: pytest.MonkeyPatch, writer: Any) -> None:
    """A kill in the middle of a write, and a cut of the power after one."""
    monkeypatch.setattr(kills, "RANDOM", 0)
    judge = kills.Kills(1, make_jobs("export over", "undo"))
    assert outcomes(judge, 12) == {"accepted"}
    monkeypatch.setattr("notes_cli.library.safe_files.replacing", writer)
    judge = kills.Kills(1, make_jobs("export over"))
    assert outcomes(judge, judge.cases, "loss").intersection(BAD)


def test_disk(make_jobs: Callable[..., Jobs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 0 though nothing could be written."""
    monkeypatch.setattr(disk, "SIZES", [])
    monkeypatch.setattr(disk, "mounted", lambda *_: False)
    judge = disk.Disk(1, make_jobs("defaults"))
    assert outcomes(judge, judge.cases) == {"refused"}
    monkeypatch.setattr("notes_cli.library.safe_files.replacing", silent)
    judge = disk.Disk(1, make_jobs("defaults"))
    assert outcomes(judge, judge.cases, "wrong").intersection(BAD)

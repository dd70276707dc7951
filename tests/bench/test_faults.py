"""The fault campaign catches faults: each kind finds one that is planted, and none where there is none."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.faults import __main__ as campaign
from bench.faults import (
    archives,
    concurrency,
    containers,
    disk,
    documents,
    folders,
    forgeries,
    frame,
    interrupts,
    kills,
    ledgers,
    permissions,
    profiles,
    splices,
    templates,
)
from bench.faults.frame import ACCEPTED, BAD, REFUSED, Failed, Kind, Row, run
from bench.faults.jobs import Jobs
from bench.faults.stage import Stage
from notes_cli.library import container, segment_files
from notes_cli.library import profiles as kept
from notes_cli.runtime import check_rows
from notes_cli.sessions import archive, folder, ledger, state
from notes_cli.sessions.ledger import FORMAT, serialize
from notes_cli.text import skill, template


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
    """The commands of these names."""

    def make(*names: str) -> Jobs:
        return Jobs(stage, names)

    return make


def outcomes(kind: Kind, cases: int, until: str = "", first: int = 0) -> set[str]:
    """The outcomes of cases, up to the first one of a kind that is looked for."""
    seen: set[str] = set()
    for number in range(first, cases):
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
    assert [failure.split(":")[0] for failure in row.failures] == [
        *("crash in case 2", "hang in case 4", "crash in case 5"),
    ]


def test_the_same_seed_is_the_same_case() -> None:
    """A failure can be had again by its seed and number."""
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


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("_check", lambda *_: None),  # a reader that skips a checksum
        ("_head_sum", lambda data, head: head.metadata["notes.checksum.head"]),
    ],
)
def test_containers(monkeypatch: pytest.MonkeyPatch, name: str, planted: Any) -> None:
    """A checksum that is not asked."""
    judge = containers.Containers(1)
    assert not outcomes(judge, 100).intersection(BAD)
    monkeypatch.setattr(container, name, planted)
    assert "wrong" in outcomes(judge, 300, "wrong")


def test_splices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are taken without having been checked."""
    judge = splices.Splices(1)
    assert outcomes(judge, 40) == {"accepted", "refused"}
    monkeypatch.setattr(splices, "open_stored", splices.open_segment)
    monkeypatch.setattr(container, "_check", lambda *_: None)
    assert "wrong" in outcomes(judge, 300, "wrong")


def test_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that nobody checks."""
    piece = {"kind": "text", "name": "", "text": "x", "position": 0, "how": "decoded", "tokens": [1, 2, 3]}
    turn = {
        "op": "turn",
        "question": "?",
        "pieces": [piece],
        "skills": [],
        "said": {},
        "rows": "0001.gguf",
        "rows_checksum": "0" * 32,
        "changed": [],
    }
    edit = {"op": "edit", "field": "a", "value": "b", "method": "field", "says": "", "skills": []}
    edit |= {"patches": [{"first": 1, "last": 2, "tokens": [4]}], "changed": [[1, 2]], "rows": "0002.gguf"}
    edit |= {"rows_checksum": "0" * 32}
    identity = dict.fromkeys(
        ("model", "architecture", "quantization", "weights", "rope", "rope_text", "kv_type", "adapters"), ""
    )
    first = {"op": "open", "format": FORMAT, "identity": identity, "cache": "f16/f16", "whole": False, "model": "m"}
    lines = [{**line, "time": "2026-06-01T12:00:00Z"} for line in (first, turn, edit)]
    data = serialize(lines)

    class Changed(Kind):
        def judge(self, number: int) -> str:
            return ledgers.examined(ledgers.ledger_changed(random.Random(number), data, [data]))

    judge = Changed(1)
    assert ledgers.examined(data) == ACCEPTED and not outcomes(judge, 300).intersection(BAD)
    monkeypatch.setattr(state, "ids_of", list)
    assert "wrong" in outcomes(judge, 2000, "wrong")


def test_forgeries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that no row exceeds."""
    judge = forgeries.Forgeries(1, ("notes-tiny",))
    assert outcomes(judge, 14, first=6) == {"accepted", "refused"}
    monkeypatch.setattr(check_rows, "TOLERANCE", 10.0)
    assert "wrong" in outcomes(judge, 14, "wrong", first=forgeries.INTACT)


def test_folders(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred damages, each found or harmless; then lines that nobody checks, and a cut that nobody sees."""
    judge = folders.Folders(1, stage)
    assert outcomes(judge, 100) == {"accepted", "refused"}

    def unchecked(line: bytes, before: str, number: int) -> tuple[Any, str]:
        try:
            found = json.loads(line)
            return found, found.pop("checksum")
        except (AttributeError, LookupError, ValueError) as error:
            raise ledger.LedgerError from error

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_parse_line", unchecked)
        assert "wrong" in outcomes(judge, 300, "wrong")
    monkeypatch.setattr(folder, "read_ledger", lambda data, head=None: ledger.read_ledger(data))
    assert "wrong" in outcomes(judge, 300, "wrong")


def test_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that nobody looks into."""
    judge = archives.Archives(1)
    assert not outcomes(judge, 40).intersection(BAD)
    monkeypatch.setattr(archive, "_check_rows", lambda *_: None)
    assert "wrong" in outcomes(judge, 300, "wrong")


def test_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that may be anything."""
    judge = profiles.HostileProfiles(1)
    assert not outcomes(judge, 200).intersection(BAD)
    monkeypatch.setattr(kept, "_count", lambda data, key, *_, **__: data.get(key))
    assert "wrong" in outcomes(judge, 500, "wrong")


def test_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that are not where they are said to be."""
    judge = documents.Documents(1)
    find = skill.find_fields

    def shifted(*given: Any) -> Any:
        text, fields, warnings = find(*given)
        return " " + text, fields, warnings

    monkeypatch.setattr(skill, "find_fields", shifted)
    assert "wrong" in outcomes(judge, 100, "wrong")


def test_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of the user's that are lost on the way."""
    judge = templates.Templates(1)
    assert outcomes(judge, 25, first=1) <= {"accepted", "refused"}  # each 25th takes seconds
    monkeypatch.setattr(template.ChatTemplate, "cut_text", lambda _, text, markers: [text] * (len(markers) + 1))
    assert "wrong" in outcomes(judge, 25, "wrong", first=1)


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


def test_interrupts(make_jobs: Callable[..., Jobs], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody taught to be interrupted."""
    judge = interrupts.Interrupts(1, make_jobs("undo"))
    assert outcomes(judge, 3) == {"accepted"}

    def execute(*_: object) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        code = "import signal, time; signal.signal(2, signal.default_int_handler); time.sleep(9)"
        process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)  # type: ignore[call-overload]
        time.sleep(0.5)
        return process  # type: ignore[no-any-return]

    monkeypatch.setattr(Stage, "execute", execute)
    assert outcomes(judge, 20, "crash").intersection(("crash", "wrong"))


def test_disk(make_jobs: Callable[..., Jobs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 0 though nothing could be written."""
    monkeypatch.setattr(disk, "SIZES", [])
    monkeypatch.setattr(disk, "mounted", lambda *_: False)
    judge = disk.Disk(1, make_jobs("profile"))
    assert outcomes(judge, judge.cases) == {"accepted", "refused"}
    monkeypatch.setattr(kept, "replacing", silent)
    judge = disk.Disk(1, make_jobs("profile"))
    assert outcomes(judge, judge.cases, "wrong").intersection(BAD)


def test_permissions(make_jobs: Callable[..., Jobs], monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that others may write, and that is used all the same."""
    monkeypatch.setattr(permissions, "BARS", [bar for bar in permissions.BARS if bar.name == "library of all"])
    monkeypatch.setattr(permissions, "READS", ["ls", "inspect returns"])
    judge = permissions.Permissions(1, make_jobs("rm"))
    assert not outcomes(judge, judge.cases).intersection(BAD)
    monkeypatch.setattr(segment_files, "check_private", lambda *_: None)
    assert "wrong" in outcomes(judge, judge.cases, "wrong")


def test_concurrency(make_jobs: Callable[..., Jobs], monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that does nothing."""
    judge = concurrency.Concurrency(1, make_jobs("undo"))

    monkeypatch.setattr(concurrency, "COMMANDS", ("edit mine --field tier=gold-{n} --method erratum",))
    assert outcomes(judge, 2) == {"accepted"}
    monkeypatch.setattr("filelock.FileLock.acquire", lambda *_, **__: None)
    assert outcomes(judge, 20, "loss").intersection(BAD)

"""The race: all programs get the same text and question, answers are kept, and tables come from them alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.processes import watched
from bench.race import __main__ as race
from bench.race import report
from bench.race.peers import PEERS, Run
from bench.race.workloads import FIRST, Work, works

RUN = Run(0.5, 1.0, 0.8, 1_000_000, True)
WORKS = {work.name: work for work in works()}
ASK = PEERS[0]


def test_what_is_new_in_each_workload() -> None:
    """The question alone; a text above; a pair of texts; a date at the top: all else was answered before."""
    same = WORKS["same-2k"]
    assert same.seen and {one.message for one in same.asked} == {same.seen.message}
    assert same.seen.question not in [one.question for one in same.asked]
    moved = WORKS["moved"]
    assert moved.seen and all(one.message == f"{one.system}\n\n{moved.seen.message}" for one in moved.asked)
    pairs = WORKS["pairs"]
    assert pairs.seen and len({prompt.texts for prompt in (pairs.seen, *pairs.asked)}) == 1 + len(pairs.asked)
    for name in ("date", "turns"):
        days = [dict(one.changes)["Date"] for one in WORKS[name].asked]
        assert len(set(days)) == len(days) and FIRST.isoformat() not in days
        for prompt, day in zip(WORKS[name].asked, days, strict=True):
            (text,) = prompt.texts
            assert prompt.message == text.text.replace(FIRST.isoformat(), day)
            assert prompt.message.startswith(f"Date: {day}\n")
    assert len(WORKS["library"].texts) == 10


def test_each_question_has_its_answer_in_its_texts() -> None:
    for work in WORKS.values():
        for prompt in work.asked:
            assert prompt.question.right(prompt.message) and prompt.question.ask in prompt.rendered


def _peer(runs: list[Run]) -> race.Peer:
    def run(work: Work) -> Iterator[Run]:
        yield from runs

    return replace(ASK, run=run)


def test_a_long_cell_is_cut_short() -> None:
    """No prompt is begun after its time; where the sum is the figure, all are asked."""
    peer = _peer([RUN] * 3)
    assert len(race.measure(race.Cell(WORKS["moved"], peer))) == 3
    peer = replace(peer, cap=-1.0)
    assert len(race.measure(race.Cell(WORKS["moved"], peer))) == 1
    assert len(race.measure(race.Cell(WORKS["turns"], peer))) == 3


def test_answers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    assert report.load(path) == {}
    found = {"moved/ask": [RUN, replace(RUN, first=0.123, right=False)], "date/ask": [RUN]}
    report.keep(found, path)
    assert report.load(path) == found


def test_tables_have_medians_sums_and_right_answers(tmp_path: Path) -> None:
    """The tables replace the text between the marks; the rest of the page stays; writing twice changes nothing."""
    page = tmp_path / "race.md"
    page.write_text(f"before\n\n{report.BEGIN}\n\nold\n\n{report.END}\n\nafter\n")
    runs = [RUN, RUN, RUN, replace(RUN, first=9.0), replace(RUN, first=9.0, right=False)]
    prefill = [RUN, replace(RUN, right=False)]
    found = {"moved/ask": runs, "moved/prefill": prefill, "turns/serve": [replace(RUN, whole=0.25)] * 28}
    report.write(tmp_path, found)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| `notes ask` |  |  |  |  | 0.50 |  |  |\n" in text
    assert "| `notes ask` without a skill: full prefill |  |  |  |  | 0.50* |  |  |\n" in text
    assert "| `notes ask` |  |  |  |  | 2 / 1 of 2 |  |  |  |  |  |\n" in text
    assert "| `notes serve` (running) |  |  |  |  |  |  |  |  | 7.0 |  |\n" in text
    assert "| `notes serve` (running) |  |  |  |  |  |  |  |  | 28 of 28 |  |\n" in text
    report.write(tmp_path, found)
    assert page.read_text() == text


def test_a_process_is_watched(tmp_path: Path) -> None:
    """First byte, end, memory and processor time are those of the process; a failure shows its stderr."""
    code = "import time; print('a', flush=True); time.sleep(0.3); x = bytearray(50 << 20); print('b')"
    ended = watched([sys.executable, "-c", code], tmp_path / "log")
    assert ended.out == "a\nb\n" and ended.first + 0.25 < ended.whole and ended.memory > 50 << 20
    assert 0 < ended.processor < ended.whole + 1
    with pytest.raises(SystemExit, match="status 3\nno such thing"):
        watched(
            [sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(3)"], tmp_path / "log"
        )

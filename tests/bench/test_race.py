"""The race: all programs get the same text and question, answers are kept, and tables come from them alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.race import report
from bench.race.peers import Run
from bench.race.workloads import FIRST, works

RUN = Run(0.5, 1.0, 0.8, 1_000_000, True)
WORKS = {work.name: work for work in works()}


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

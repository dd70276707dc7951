"""The race of servers: who arrives when, what a wait is that was cut off, which shares are taken, what is written."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from bench.serving import phases as module
from bench.serving import report
from bench.serving.load import Seen, Wait, arrivals, figures, percentile, times
from bench.serving.phases import RACES, SYSTEMS, Phase, load, measured
from bench.serving.texts import FIRST, SYSTEM, WAYS, body, policy, questions
from notes_cli.text.skill import parse_skill

RACE = RACES["shipped"]


def answered(waited: float, *, arrival: float = 0.0, prompt: int = 100, cached: int = 50) -> Seen:
    return Seen(arrival, waited, True, waited + 1, prompt, cached, 10, "yes")


def cut(waited: float) -> Seen:
    return Seen(0.0, waited)


def test_arrivals_keep_their_gaps_at_every_rate() -> None:
    """Twice the rate is the same arrivals in half the time; their mean gap is that of the rate; without one all are
    there at once; and none comes after the time for arrivals."""
    slow, fast = arrivals(2000, 2.0, 5, 1e9), arrivals(2000, 4.0, 5, 1e9)
    assert slow == pytest.approx([2 * one for one in fast])
    assert mean(b - a for a, b in pairwise(slow)) == pytest.approx(0.5, rel=0.1)
    assert slow != arrivals(2000, 2.0, 6, 1e9)
    short = arrivals(2000, 2.0, 5, 30.0)
    assert short == slow[: len(short)] and slow[len(short)] > 30
    assert arrivals(3, None, 5, 0.0) == [0.0, 0.0, 0.0]


def test_a_percentile_that_hangs_on_who_was_cut_off_is_a_bound() -> None:
    """A wait that was cut off counts as what it was at least, and whatever it could have changed says so."""
    waits = [(float(number), False) for number in range(1, 11)]
    assert (percentile(waits, 0.5), percentile(waits, 0.9)) == (Wait(5.0), Wait(9.0))
    late = [*waits[:8], (30.0, True), (40.0, True)]
    assert (percentile(late, 0.5), percentile(late, 0.9)) == (Wait(5.0), Wait(30.0, True))
    early = [(0.5, True), *waits]  # given up so soon that it might have been any
    assert percentile(early, 0.5) == Wait(5.0, True)
    assert percentile([], 0.5) is None


def test_a_ratio_is_never_better_than_what_was_seen() -> None:
    """Over a bound, at least; under one, nothing can be said."""
    assert times(Wait(60.0, True), Wait(0.5)) == Wait(120.0, True)
    assert times(Wait(60.0), Wait(0.5)) == Wait(120.0)
    assert times(Wait(60.0), Wait(0.5, True)) is None and times(None, Wait(1.0)) is None
    assert [str(Wait(*one)) for one in ((60.4, True), (3.14159, False), (0.254, False))] == ["> 60", "3.1", "0.25"]


def test_figures_take_shares_of_what_was_answered_and_throughput_until_time_was_up() -> None:
    """Tokens of those who were cut off are not known; a phase in which some were took all of its time."""
    whole = figures([answered(1, prompt=100, cached=90), answered(2, arrival=3, prompt=300, cached=30)], 60)
    assert (whole.reused, whole.seconds, whole.answers, whole.tokens) == (0.3, 6.0, 2 / 6, 20 / 6)
    some = figures([answered(1, prompt=100, cached=90), cut(60), Seen(0.0, failed="status 500")], 60)
    assert (some.sent, some.answered, some.cut, some.failed) == (3, 1, 1, 1)
    assert (some.reused, some.seconds, some.answers, some.p90) == (0.9, 60, 1 / 60, Wait(60, True))
    begun = replace(answered(2), done=None)  # its first word had come
    assert figures([begun], 60).p50 == Wait(2) and figures([begun], 60).cut == 1
    none = figures([cut(60)], 60)
    assert (none.reused, none.prompt, none.answers) == (None, None, 0.0)


def test_a_first_token_is_a_word() -> None:
    """A chunk that has only a role, or nothing, is none; what comes later does not make the first one later."""
    seen = Seen(0.0)
    for since, delta in enumerate(({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}), 1):
        seen.hear({"choices": [{"delta": delta}]}, since)
    details = {"cached_tokens": 7}
    seen.hear(
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": details}}, 4
    )
    assert (seen.waited, seen.text, seen.prompt, seen.cached, seen.written) == (2, "ab", 9, 7, 2)
    begun = Seen(0.0)
    begun.hear({"choices": [{"delta": {"content": "a"}}], "timings": {"cache_n": 30, "prompt_n": 70}}, 1)
    assert (begun.prompt, begun.cached) == (100, 30) and figures([begun], 60).reused == 0.3
    seen.hear({"error": {"message": "no"}}, 5)
    assert "no" in seen.failed


def test_all_systems_are_asked_the_same() -> None:
    """The date is the only difference of an edited policy, near its beginning; the prompt that is not edited begins
    with the very policy; every request has a day of its own."""
    first, later = policy(), policy(FIRST + timedelta(40))
    differing = [(a, b) for a, b in zip(first.splitlines(), later.splitlines(), strict=True) if a != b]
    assert differing == [("date: 2026-05-01", "date: 2026-06-10")] and first.index("2026-05-01") < 0.01 * len(first)
    assert {one.name: one.value for one in parse_skill(first, source="x", default="x").fields}["date"] == "2026-05-01"
    asked = questions(200, 7)
    assert len({one.day for one in asked}) == 200 and len({one.question for one in asked[:148]}) == 148
    assert {one.day for one in questions(3, 7, 201)}.isdisjoint(one.day for one in asked)
    erratum, edited, said = (body(asked[39], way, 8) for way in WAYS)
    assert edited["messages"][0]["content"] == f"{SYSTEM}\n\n{later}"
    assert said["messages"][0]["content"].startswith(f"{SYSTEM}\n\n{first}\n\nCorrection: the date is now 2026-06-10.")
    assert erratum["notes"]["errata"] == {"date": "2026-06-10"}
    assert all(one["messages"][1]["content"] == asked[39].question for one in (erratum, edited, said))


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Phases of the model that ships: ours, and without an edit, all at once and at a load of 2."""
    monkeypatch.setattr(module, "PIECES", tmp_path)
    for name, waited in (("unedited", 1.0), ("ours", 0.5), ("edited", 30.0)):
        for rate in (None, 2):
            phase = Phase(RACE, SYSTEMS[name], rate)
            seen = [cut(waited) if name == "edited" else answered(waited) for _ in range(4)]
            kept = {"settings": phase.settings, "seen": [asdict(one) for one in seen]}
            phase.path.write_text(json.dumps(kept))
    return tmp_path


def test_phases_of_other_settings_are_not_reported_together(pieces: Path) -> None:
    """Rates are scaled by one phase: when that is measured again, those that were scaled by the old one are out."""
    assert len(measured()) == 6
    unit = Phase(RACE, SYSTEMS["unedited"], None)
    kept = json.loads(unit.path.read_text())
    kept["seen"][0]["done"] = 9.0
    unit.path.write_text(json.dumps(kept))
    assert {phase.rate for phase in measured()} == {None}
    assert load(Phase(RACE, SYSTEMS["ours"], 2)) is None and load(Phase(RACE, SYSTEMS["ours"], 16)) is None


def test_the_report_is_put_between_its_marks(pieces: Path, tmp_path: Path) -> None:
    """What is around stays; a second time gives the same; bounds are told as such."""
    folder = tmp_path / "docs"
    (folder / "results").mkdir(parents=True)
    page = folder / "serving.md"
    page.write_text(f"before\n\n{report.BEGIN}\n\nold\n\n{report.END}\n\nafter\n")
    report.write(folder, measured())
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert re.search(r"^\| notes serve, erratum \| .*, 50\.0%, 4 of 4 \|$", text, re.M)
    assert "| llama-server, policy edited | > 60 |" in text and "A load of 10 is 2.00 requests a second." in text
    records = json.loads((folder / report.KEPT).read_text())
    assert {(one["system"], one["rate"]) for one in records} >= {("edited", 2), ("ours", None)}
    assert next(one for one in records if one["system"] == "edited")["first_tokens"] == [">30.000"] * 4
    report.write(folder, measured())
    assert page.read_text() == text

"""Batteries of decisions, and generated pairs of skills."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from notes_cli.measure.battery import PAIRS, Asked, as_good, load_battery, pairs, shipped_battery

from notes_cli.errors import NotesError
from notes_cli.text.skill import Skill

GOOD = """cases:
  - text: |
      date: 2026-06-01

      Returns before 2026-06-15 are accepted.
    question: May I return this?
    choices: [accepted, refused]
    field: date
    value: 2026-07-01
    right: [accepted, refused]
"""


def test_a_case_is_read_as_it_is_written(tmp_path: Path) -> None:
    """Dates stay text, and the right answers keep their order."""
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    (case,) = load_battery(path)
    assert (case.question, case.choices, case.field, case.value) == (
        "May I return this?",
        ("accepted", "refused"),
        "date",
        "2026-07-01",
    )
    assert case.right == ("accepted", "refused") and case.skill.values == {"date": "2026-06-01"}


def test_a_skill_is_named_as_seen_from_the_file(tmp_path: Path) -> None:
    """A battery can be moved together with its skills."""
    (tmp_path / "policy.txt").write_text("date: 2026-06-01")
    path = tmp_path / "sub" / "mine.yaml"
    path.parent.mkdir()
    text = GOOD.split("    question")[1]
    path.write_text(f"cases:\n  - skill: ../policy.txt\n    question{text}")
    assert load_battery(path)[0].skill.name == "policy"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cases:", "case:", "must hold `cases:`"),
        ("[accepted, refused]\n    field", "accepted\n    field", "choices must be a list"),
        ("choices: [accepted, refused]", "choices: [accepted]", "two or more different"),
        ("field: date", "field: day", "no field 'day'. Its fields: date"),
        ("value: 2026-07-01", "value: 2026-06-01", "date is 2026-06-01 in the text already"),
        ("right: [accepted, refused]", "right: [accepted, perhaps]", "two different choices"),
        ("right: [accepted, refused]", "right: [accepted, accepted]", "two different choices"),
        ("question: May I return this?", "question: {}", "question must be text"),
        ("question: May I return this?", "ask: x", "'ask' is unknown"),
        ("    field: date", "    skill: x\n    field: date", "either text, or skill"),
        ("cases:", "cases: [", "not valid YAML"),
    ],
)
def test_what_is_no_decision_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """The error names the file, and the number of the case."""
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(NotesError, match=r"mine\.yaml") as caught:
        load_battery(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_battery_that_ships_is_sound() -> None:
    """At least 30 decisions, of words, dates and amounts, without duplicates."""
    cases = shipped_battery()
    assert len(cases) >= 30 and len({(case.skill.text, case.question) for case in cases}) == len(cases)
    assert {"date", "amount"} < {case.field for case in cases}


def answer(asked: Asked, *skills: Skill) -> str | None:
    """The answer that follows from these skills by their rules; None if none does."""
    topic = asked.question.removeprefix("What is the ").removesuffix("?")
    text, values = "\n".join(skill.text for skill in skills), {k: v for one in skills for k, v in one.values.items()}
    for field, value, outcome in re.findall(rf"If the (\w+) is (\w+) then the {topic} is (\w+)\.", text):
        if values.get(field) == value:
            return str(outcome)
    form = rf"If the (\w+) is over (\d+) then the {topic} is (\w+), otherwise the {topic} is (\w+)\."
    for field, limit, over, otherwise in re.findall(form, text):
        if field in values:
            return str(over if int(values[field]) > int(limit) else otherwise)
    return None


def test_a_question_takes_what_it_says() -> None:
    """Both skills together give the right answer; one alone gives it only for the first question, in either order."""
    for pair in pairs():
        alone, both = pair.asked
        for asked in pair.asked:
            assert answer(asked, pair.first, pair.second) == answer(asked, pair.second, pair.first) == asked.right
            assert asked.right in asked.choices and len(set(asked.choices)) == len(asked.choices)
        assert (alone.needs, both.needs) == (1, 2)
        assert [answer(alone, one) for one in (pair.first, pair.second)].count(alone.right) == 1
        assert answer(both, pair.first) is None and answer(both, pair.second) is None


def test_nothing_but_reading_answers() -> None:
    """No position among the choices is right too often, and no text is repeated."""
    found = pairs()
    assert len({pair.first.text + pair.second.text for pair in found}) == len(found) == PAIRS
    for needs in (0, 1):
        places = Counter(pair.asked[needs].choices.index(pair.asked[needs].right) for pair in found)
        assert max(places.values()) <= 0.6 * len(found)
    assert pairs(4) == found[:4] and pairs(4, seed=1) != found[:4]
    assert as_good([True] * (PAIRS - 2) + [False] * 2, [True] * PAIRS)  # enough pairs to prove it

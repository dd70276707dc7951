"""The decisions and pairs of skills that bench/calibrate.py asks, and its intervals."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from bench.battery import PAIRS, Asked, better, cases, interval, pairs
from bench.calibrate import Decided, report
from notes_cli.text.skill import Skill


def test_the_decisions_are_sound() -> None:
    """At least 30, of words, dates and amounts, without duplicates; the field is in the text, with another value."""
    found = cases()
    assert len(found) >= 30 and len({(case.skill.text, case.question) for case in found}) == len(found)
    assert {"date", "amount"} < {case.field for case in found}
    for case in found:
        assert case.skill.values[case.field] != case.value
        assert set(case.right) <= set(case.choices) and len(set(case.right)) == 2 <= len(set(case.choices))


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


def right(count: int, of: int = 52) -> list[bool]:
    """The first cases right, the others wrong."""
    return [number < count for number in range(of)]


def test_intervals_are_exact() -> None:
    """At each end the outcome has a probability of 1/40, also for thousands of cases."""
    for count, of in ((3, 7), (40, 52), (900, 1000), (7, 5000)):
        low, high = interval(count, of)

        def tail(first: int, end: int, share: float, of: int = of) -> float:
            logs = (
                math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
                + k * math.log(share) + (of - k) * math.log1p(-share)
                for k in range(first, end)
            )  # fmt: skip
            return sum(map(math.exp, logs))

        assert tail(count, of + 1, low) == pytest.approx(0.025, rel=1e-6)
        assert tail(0, count + 1, high) == pytest.approx(0.025, rel=1e-6)


def test_six_of_six_prove_it_and_five_do_not() -> None:
    """Cases where both are right or both wrong do not count."""
    assert better(right(40), right(34)) and not better(right(39), right(34))
    assert not better(right(34), right(40)) and not better(right(40), right(40))
    assert not better(right(30), right(30)[::-1])  # each wins where the other loses


def test_a_row_says_whether_it_is_proven_better() -> None:
    """Against the baseline, in each kind of question; empty where a way was not asked in all."""
    good, bad = Decided(True, True, 4), Decided(False, False, 2)
    table = {("erratum", "x"): [bad] * 6, ("suffix", "x"): [good] * 6, ("field", "x"): [good] * 5}
    rows = report(table, ("x",), "erratum").splitlines()
    assert rows[2] == "| erratum | 2 | 0 of 6 (0.00 to 0.46) | 0 |  |"
    assert rows[3] == "| suffix | 4 | 6 of 6 (0.54 to 1.00) | 6 | better |"
    assert rows[4] == "| field | 4 |  |  |  |"

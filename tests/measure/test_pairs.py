"""Pairs of skills: what needs both is in neither alone, and nothing but reading answers."""

from __future__ import annotations

import re
from collections import Counter

from notes_cli.measure.pairs import PAIRS, Asked, pairs
from notes_cli.measure.proof import as_good
from notes_cli.text.skill import Skill


def answer(asked: Asked, *skills: Skill) -> str | None:
    """What follows from these skills by reading them as a person does; None where nothing does."""
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
    """Of both skills follows the right answer; of one of them alone it follows for the first question, and nothing for
    the second, in whichever order they are."""
    for pair in pairs():
        alone, both = pair.asked
        for asked in pair.asked:
            assert answer(asked, pair.first, pair.second) == answer(asked, pair.second, pair.first) == asked.right
            assert asked.right in asked.choices and len(set(asked.choices)) == len(asked.choices)
        assert (alone.needs, both.needs) == (1, 2)
        assert [answer(alone, one) for one in (pair.first, pair.second)].count(alone.right) == 1
        assert answer(both, pair.first) is None and answer(both, pair.second) is None


def test_nothing_but_reading_answers() -> None:
    """No place among the choices is right too often, and no text is there twice."""
    found = pairs()
    assert len({pair.first.text + pair.second.text for pair in found}) == len(found) == PAIRS
    for needs in (0, 1):
        places = Counter(pair.asked[needs].choices.index(pair.asked[needs].right) for pair in found)
        assert max(places.values()) <= 0.6 * len(found)
    assert pairs(4) == found[:4] and pairs(4, seed=1) != found[:4]
    assert as_good([True] * (PAIRS - 2) + [False] * 2, [True] * PAIRS)  # there are enough of them to say so

"""The texts of the subject: their answers must be right, and what is held out must be held out."""

from __future__ import annotations

import random
import re

import pytest

from training import policies
from training.tiny import world

EVERY = world.Level(rules=(1, 3), spare=(0, 2), whole=0.3, kinds=("table", "date", "amount"), near=0.5, shared=0.3)


def read(text: str, topic: str) -> set[str]:
    """What a policy decides about a topic, by its English alone."""
    fields = dict(re.findall(r"^(\w+): (\S+)$", text, flags=re.M))
    found = set()
    for line in text.split("\n"):
        if table := re.fullmatch(r"- If the (\w+) is (\w+) then the (\w+) is (\w+)\.", line):
            name, value, about, said = table.groups()
            if about == topic and fields[name] == value:
                found.add(said)
        if limit := re.fullmatch(
            r"- If the (\w+) is (before|over) (\S+) then the (\w+) is (\w+), otherwise the \w+ is (\w+)\.", line
        ):
            name, relation, edge, about, yes, no = limit.groups()
            value = fields[name]
            holds = value < edge if relation == "before" else int(value) > int(edge)
            if about == topic:
                found.add(yes if holds else no)
    return found


@pytest.mark.parametrize("below", [False, True])
def test_a_case_whose_text_says_something_else(below: bool) -> None:
    """The right answers are what the text says, with the old value and with the new one, and they differ."""
    for case in world.cases(200, EVERY, "a test", held=False):
        old = case.draft.text(below=below)
        new = case.draft.text({**case.draft.values, case.rule.field: case.new}, below=below)
        assert (read(old, case.rule.topic), read(new, case.rule.topic)) == tuple({right} for right in case.right)
        assert case.right[0] != case.right[1]
        assert old.count(f"{case.rule.field}: {case.old}") == 1


def test_a_held_out_word_in_training() -> None:
    """No word of a training text or of its questions is a held-out one, unless it is of the pool; held-out texts
    take no other."""
    pool = set(world.POOL)
    for held in (False, True):
        rng = random.Random("words")
        level = world.Level(rules=(1, 3), spare=(0, 2), whole=0.0)
        for _ in range(100):
            draft = world.make_draft(rng, world.Names(rng, held, level), level)
            said = {*draft.values, *draft.values.values(), *(r.topic for r in draft.rules)}
            said |= {word for rule in draft.rules for pair in rule.table for word in pair}
            assert {policies.is_held_out(word) for word in said - pool} == {held}

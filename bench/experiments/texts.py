"""The texts of an experiment, from either world: it knows this interface, and not who draws them.

`First` is the world of the reversed model (training/world.py); bench/protocol/texts.py has that of the one that ships.
Rules, drafts and texts of skills are training/world.py's in both.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from training import world
from training.world import Draft, Rule, SkillText

__all__ = ["Case", "Draft", "First", "Rule", "Size", "SkillText", "Texts"]

Size = world.Level  # of a memory: how many skills, rules, rows, fields to spare and fillers


class Case(Protocol):
    """One decision about a memory, and the change of a field that flips it. A memory is asked once: a cluster each."""

    @property
    def skills(self) -> tuple[SkillText, ...]: ...
    @property
    def target(self) -> int:
        """The skill that the question is about."""

    @property
    def kind(self) -> str:
        """Of the asked rule: table, date or amount."""

    @property
    def question(self) -> str: ...
    @property
    def choices(self) -> tuple[str, ...]: ...
    @property
    def field(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...
    @property
    def answer(self) -> str:
        """Right with the old value."""

    @property
    def answer_new(self) -> str:
        """Right with the new one."""


class Texts(Protocol):
    """Draws what an experiment reads. Numbers of cases go up by one; the same arguments give the same texts."""

    def cases(self, experiment: str, count: int) -> Iterator[tuple[int, Case]]: ...

    def rngs(self, experiment: str, count: int) -> Iterator[tuple[int, random.Random]]:
        """For each case what an experiment draws from that makes its texts itself, by the following."""

    def memory(self, rng: random.Random, size: Size) -> list[Draft]:
        """Skills of which no two share a field or a topic."""

    def ask(self, rng: random.Random, rule: Rule) -> str:
        """A question about the rule's topic."""

    def flipped(self, rng: random.Random, rule: Rule, old: str) -> str | None:
        """Another value of the rule's field, with another outcome; None if none was found."""

    def heading(self, rng: random.Random, rules: Sequence[Rule]) -> str:
        """Of a section with these rules, or with none."""

    def spare(self, rng: random.Random, drafts: Sequence[Draft]) -> Iterable[tuple[str, str]]:
        """Fields, and their values, that no rule of the drafts asks for: each is drawn when it is asked for."""


class First:
    """Texts of training/world.py that training never saw."""

    def __init__(self, seed: int, begin: int = 1) -> None:
        """`begin`: the number of the first case."""
        self.seed, self.begin = seed, begin

    def cases(self, experiment: str, count: int) -> Iterator[tuple[int, Case]]:
        return islice(enumerate(world.held_out(count, self.seed), 1), self.begin - 1, None)

    def rngs(self, experiment: str, count: int) -> Iterator[tuple[int, random.Random]]:
        return (
            (number, random.Random(f"{experiment} {number} {self.seed}")) for number in range(self.begin, count + 1)
        )

    def memory(self, rng: random.Random, size: Size) -> list[Draft]:
        return world.make_drafts(rng, size, held=True)

    def ask(self, rng: random.Random, rule: Rule) -> str:
        return world.ask(rng, rule)

    def flipped(self, rng: random.Random, rule: Rule, old: str) -> str | None:
        for _ in range(100):
            new = world.other_value(rng, rule.kind, rule.field, old, rule)
            if rule.outcome(new) != rule.outcome(old):
                return new
        return None

    def heading(self, rng: random.Random, rules: Sequence[Rule]) -> str:
        title = world.TITLES[rules[0].topic if rules else rng.choice(list(world.TOPICS))]
        return rng.choice(world.HEADINGS).format(title=title, org=world.make_org(rng, True))

    def spare(self, rng: random.Random, drafts: Sequence[Draft]) -> Iterator[tuple[str, str]]:
        for field in (*world.WORD_FIELDS, *world.AMOUNT_FIELDS):
            if field not in world.FIELD_OF.values():
                yield field, world.other_value(rng, world.kind_of(field), field, "", None)

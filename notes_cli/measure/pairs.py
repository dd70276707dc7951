"""Pairs of skills with questions that one of them answers, and questions that need both. It knows no model.

The first skill has a value (an amount, a word), the second the rule for it (a limit, a table): neither says the answer
alone. Each has a field and a table of its own, too, for questions that it answers by itself. All is drawn from a seed,
so that only reading answers; the words are those that the model that ships knows, and plain English for others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from notes_cli.text.skill import Skill, parse_skill

PAIRS = 48  # with so many no or few losses are proven to be hardly any (proof.py)
SEED = 20261122
ROWS = 3  # of a table
SPACE = 120  # between an amount and its limit, at least: whether a model can compare is not the question
# By topic: the field that decides it, its values, and outcomes.
_WORDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "shipping": ("tier", ("gold", "silver", "basic", "bronze", "platinum"), ("free", "reduced", "full", "express")),
    "support": ("plan", ("starter", "family", "team", "student", "business"), ("daily", "weekly", "remote", "local")),
    "discount": ("season", ("spring", "summer", "autumn", "winter", "holiday"), ("large", "small", "medium", "frozen")),
    "invoice": ("channel", ("web", "phone", "store", "mail", "partner"), ("digital", "printed", "yearly", "combined")),
    "deposit": ("category", ("books", "toys", "tools", "music", "food"), ("fixed", "variable", "high", "low")),
}
_AMOUNTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "approval": ("amount", ("automatic", "manual", "delegated", "joint")),
    "delivery": ("distance", ("morning", "evening", "courier", "pickup")),
    "refund": ("total", ("complete", "half", "delayed", "capped")),
}
_PLACES = ("Harbor", "Milton", "Velmar", "Tarvik", "Belsen", "Cordal", "Fenwick", "Norbury", "Pelham", "Rosmere")
_TRADES = ("Books", "Tools", "Market", "Foods", "Garden", "Travel", "Records", "Supplies")


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its possible answers, and the right one. `needs`: how many of the two skills it takes."""

    question: str
    choices: tuple[str, ...]
    right: str
    needs: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two skills, and a question that one of them answers and one that needs both."""

    first: Skill
    second: Skill
    asked: tuple[Asked, Asked]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A field with its value, the lines that say what follows from each value, and the question."""

    field: str
    value: str
    lines: tuple[str, ...]
    asked: Asked

    @property
    def given(self) -> str:
        return f"{self.field}: {self.value}"


def pairs(count: int = PAIRS, seed: int = SEED) -> list[Pair]:
    """So many pairs; half of the questions that need both are about a limit, half about a table."""
    rng = random.Random(f"pairs {seed}")
    return [_pair(rng, number) for number in range(count)]


def _pair(rng: random.Random, number: int) -> Pair:
    topics = rng.sample(list(_WORDS), 3)
    limit = number % 2 == 0
    both = _limit(rng, over=number % 4 == 0) if limit else _table(rng, topics[2], needs=2)
    mine, other = (_table(rng, topic, needs=1) for topic in topics[:2])
    name = f"{rng.choice(_PLACES)} {rng.choice(_TRADES)}"
    first = [f"# Customers of {name}", "", *_mixed(rng, both.given, mine.given), "", *mine.lines]
    blocks = _mixed(rng, both.lines, other.lines)
    second = [f"# Rules of {name}", "", other.given, "", *(line for block in blocks for line in block)]
    alone = (mine if number % 4 < 2 else other).asked
    return Pair(_skill(first, f"values-{number + 1}"), _skill(second, f"rules-{number + 1}"), (alone, both.asked))


def _mixed(rng: random.Random, *what: Sequence[str] | str) -> list[Sequence[str] | str]:
    return rng.sample(what, len(what))


def _skill(lines: Sequence[Sequence[str] | str], name: str) -> Skill:
    return parse_skill("\n".join(map(str, lines)), source=name, default=name)


def _table(rng: random.Random, topic: str, needs: int) -> _Rule:
    field, values, outcomes = _WORDS[topic]
    rows = dict(zip(rng.sample(values, ROWS), rng.sample(outcomes, ROWS), strict=True))
    value = rng.choice(list(rows))
    lines = tuple(f"- If the {field} is {each} then the {topic} is {outcome}." for each, outcome in rows.items())
    return _Rule(field, value, lines, Asked(f"What is the {topic}?", tuple(rows.values()), rows[value], needs))


def _limit(rng: random.Random, over: bool) -> _Rule:
    topic = rng.choice(list(_AMOUNTS))
    field, outcomes = _AMOUNTS[topic]
    limit = 10 * rng.randint(20, 80)
    value = limit + SPACE + 10 * rng.randint(0, 8) if over else limit - SPACE - 10 * rng.randint(0, 7)
    yes, no = rng.sample(outcomes, 2)
    line = f"- If the {field} is over {limit} then the {topic} is {yes}, otherwise the {topic} is {no}."
    return _Rule(field, str(value), (line,), Asked(f"What is the {topic}?", (yes, no), yes if over else no, 2))

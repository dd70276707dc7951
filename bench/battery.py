"""Decisions with known answers, pairs of made-up skills, and exact 95% intervals, for bench/calibrate.py.

Correctness is paired by case. An alternative is proven better than another if, of the cases where exactly one of them
is right, the Clopper-Pearson interval of its share lies above one half: 6 of 6 suffice, 5 of 5 do not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from notes_cli.documents import read_yaml
from notes_cli.text.skill import Skill, parse_skill


@dataclass(frozen=True, slots=True)
class Case:
    """A decision. `right`: the correct choices with the value in the text, and with the new value."""

    skill: Skill
    question: str
    choices: tuple[str, ...]
    field: str
    value: str
    right: tuple[str, str]


def cases() -> list[Case]:
    """The decisions of battery.yaml."""
    found = []
    for number, entry in enumerate(read_yaml(Path(__file__).with_name("battery.yaml"))["cases"], 1):
        skill = parse_skill(entry["text"].strip(), source="text", default=f"case-{number}")
        choices, (before, after) = tuple(entry["choices"]), entry["right"]
        found.append(Case(skill, entry["question"], choices, entry["field"], entry["value"], (before, after)))
    return found


PAIRS = 48
SEED = 20261122
ROWS = 3  # of a table
SPACE = 120  # minimum distance of an amount from its limit, so that comparing them is easy
# By topic: the deciding field, its values, and outcomes.
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
    """A question with its choices and the correct one. `needs`: number of skills needed to answer it, 1 or 2."""

    question: str
    choices: tuple[str, ...]
    right: str
    needs: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two skills, a question that one of them answers, and one that needs both."""

    first: Skill
    second: Skill
    asked: tuple[Asked, Asked]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A field with its value, lines with the outcome of each value, and the question."""

    field: str
    value: str
    lines: tuple[str, ...]
    asked: Asked

    @property
    def given(self) -> str:
        return f"{self.field}: {self.value}"


def pairs(count: int = PAIRS, seed: int = SEED) -> list[Pair]:
    """Generate `count` pairs. The questions that need both skills are about limits and tables in turn."""
    rng = random.Random(f"pairs {seed}")
    return [_make_pair(rng, number) for number in range(count)]


def _make_pair(rng: random.Random, number: int) -> Pair:
    topics = rng.sample(list(_WORDS), 3)
    is_limit = number % 2 == 0
    both = _limit(rng, over=number % 4 == 0) if is_limit else _table(rng, topics[2], needs=2)
    in_first, in_second = (_table(rng, topic, needs=1) for topic in topics[:2])
    name = f"{rng.choice(_PLACES)} {rng.choice(_TRADES)}"
    first = [f"# Customers of {name}", "", *_shuffled(rng, both.given, in_first.given), "", *in_first.lines]
    blocks = _shuffled(rng, both.lines, in_second.lines)
    second = [f"# Rules of {name}", "", in_second.given, "", *(line for block in blocks for line in block)]
    single = (in_first if number % 4 < 2 else in_second).asked
    return Pair(_skill(first, f"values-{number + 1}"), _skill(second, f"rules-{number + 1}"), (single, both.asked))


def _shuffled(rng: random.Random, *items: Sequence[str] | str) -> list[Sequence[str] | str]:
    return rng.sample(items, len(items))


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


Right = Sequence[bool]  # correctness by case


def interval(count: int, of: int) -> tuple[float, float]:
    """Return the 95% Clopper-Pearson interval of the share `count` / `of`; (0, 1) if `of` is 0."""
    tail = 0.025
    low = 0.0 if count == 0 else _find_threshold(lambda p: _probability_at_least(count, of, p) >= tail)
    high = 1.0 if count == of else _find_threshold(lambda p: 1 - _probability_at_least(count + 1, of, p) < tail)
    return low, high


def better(candidate: Right, reference: Right) -> bool:
    """Return True if `candidate` is proven to be right more often."""
    pairs = [*zip(candidate, reference, strict=True)]
    wins, losses = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    return interval(wins, wins + losses)[0] > 0.5


def format_count(count: int, of: int) -> str:
    """Format a count with the interval of its share: "12 of 48 (0.14 to 0.40)"."""
    low, high = interval(count, of)
    return f"{count} of {of} ({low:.2f} to {high:.2f})"


def _probability_at_least(count: int, of: int, share: float) -> float:
    """Return the binomial probability of `count` or more successes out of `of`."""
    if count <= 0 or share >= 1:
        return 1.0
    if count > of or share <= 0:
        return 0.0
    every, yes, no = math.lgamma(of + 1), math.log(share), math.log1p(-share)
    logs = (
        every - math.lgamma(k + 1) - math.lgamma(of - k + 1) + k * yes + (of - k) * no for k in range(count, of + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def _find_threshold(true: Callable[[float], bool]) -> float:
    """Return the value in [0, 1] from which a monotonic condition is true, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if true(middle) else (middle, high)
    return high

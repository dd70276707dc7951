"""Decisions to measure a model by: batteries from YAML files (prompts/battery.yaml ships), and pairs of skills."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notes_cli.config import resource
from notes_cli.documents import read_yaml
from notes_cli.errors import NotesError
from notes_cli.text.fields import clean_value
from notes_cli.text.skill import Skill, load_skill, parse_skill

KEYS = {"text", "skill", "question", "choices", "field", "value", "right"}


@dataclass(frozen=True, slots=True)
class Case:
    """One decision. `right` are the right answers: with the value in the text, and with the new value."""

    skill: Skill
    question: str
    choices: tuple[str, ...]
    field: str
    value: str
    right: tuple[str, str]


def shipped_battery() -> list[Case]:
    """The cases that come with notes."""
    return load_battery(resource("prompts") / "battery.yaml")


def load_battery(path: Path) -> list[Case]:
    """The cases of a file, under `cases:`. Skill files are named as seen from there. Raise NotesError, with
    the number of the case, for anything that does not make a decision."""
    data = read_yaml(path)
    cases = data.get("cases") if isinstance(data, dict) else None
    if not isinstance(cases, list) or not cases:
        raise NotesError(f"{path} must hold `cases:`, a list of decisions")
    return [_case(entry, number, path) for number, entry in enumerate(cases, 1)]


def _case(entry: Any, number: int, path: Path) -> Case:
    try:
        return _read(entry, f"case-{number}", path.parent)
    except NotesError as error:
        raise NotesError(f"{path}, case {number}: {error.what}", error.remedy) from error


def _read(entry: Any, name: str, folder: Path) -> Case:
    if not isinstance(entry, dict):
        raise NotesError("it must be a mapping")
    unknown = sorted(set(entry) - KEYS)
    if unknown:
        raise NotesError(f"{unknown[0]!r} is unknown", f"Known: {', '.join(sorted(KEYS))}")
    skill = _skill_of_case(entry, name, folder)
    field, choices, right = _text(entry, "field"), _list(entry, "choices"), _list(entry, "right")
    value = clean_value(field, _text(entry, "value"))
    if field not in skill.values:
        raise NotesError(f"its text has no field {field!r}", f"Its fields: {', '.join(skill.values) or 'none'}")
    if skill.values[field] == value:
        raise NotesError(f"{field} is {value} in the text already")
    if len(choices) < 2 or len(set(choices)) < len(choices) or not all(choices):
        raise NotesError("choices must be two or more different answers")
    if len(right) != 2 or right[0] == right[1] or not set(right) <= set(choices):
        raise NotesError("right must be two different choices: with the old value, with the new one")
    return Case(skill, _text(entry, "question"), choices, field, value, (right[0], right[1]))


def _skill_of_case(entry: Mapping[str, Any], name: str, folder: Path) -> Skill:
    if ("text" in entry) == ("skill" in entry):
        raise NotesError("give it either text, or skill: a file")
    if "skill" in entry:
        return load_skill(folder / _text(entry, "skill"))
    return parse_skill(_text(entry, "text"), source="text", default=name)


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip():
        raise NotesError(f"{key} is missing" if key not in entry else f"{key} must be text")
    return value.strip()


def _list(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = entry.get(key)
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise NotesError(f"{key} must be a list")
    return tuple(part.strip() for part in value)


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

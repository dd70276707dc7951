"""The tasks: questions and corrections of the sample skills, and the author's facts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notes_cli.documents import read_yaml

ROOT = Path(__file__).resolve().parents[2]
SKILLS = ROOT / "skills"
FACTS = 104


@dataclass(frozen=True)
class Question:
    """A question, and the words of which one must be in an answer that is right."""

    ask: str
    accept: tuple[str, ...]

    def right(self, answer: str) -> bool:
        return contains(answer, self.accept)


@dataclass(frozen=True)
class Correction:
    """A new value of a field with questions: the field, a consequence, something else. `new` and `old`: words in an
    answer to the first two that show the value."""

    field: str
    value: str
    ask: str
    new: tuple[str, ...]
    old: tuple[str, ...]
    follows: Correction | None
    other: Question | None


@dataclass(frozen=True)
class Tasks:
    """The tasks of one skill."""

    skill: str  # the name of its folder in skills/
    questions: tuple[Question, ...]
    corrections: tuple[Correction, ...]


@dataclass(frozen=True)
class Fact:
    """A passage, and a question that it answers."""

    passage: str
    question: Question


def contains(answer: str, words: Sequence[str]) -> bool:
    """True if the answer contains one of the words as a whole word, case-insensitive."""
    return any(re.search(rf"(?<![\w.]){re.escape(one)}(?!\w|\.\d)", answer, re.I) for one in words)


def load_tasks() -> list[Tasks]:
    """Read the tasks of the sample skills."""
    found: dict[str, Any] = read_yaml(Path(__file__).with_name("tasks.yaml"))
    return [
        Tasks(name, tuple(map(_question, one["questions"])), tuple(map(_correction, one["corrections"])))
        for name, one in found.items()
    ]


def _question(entry: dict[str, Any]) -> Question:
    return Question(entry["ask"], tuple(map(str, entry["accept"])))


def _correction(entry: dict[str, Any]) -> Correction:
    field, value, follows = entry["field"], str(entry["value"]), entry.get("follows")
    return Correction(
        *(field, value, entry["ask"], tuple(map(str, entry["new"])), tuple(map(str, entry["old"]))),
        follows=_correction({"field": field, "value": value, **follows}) if follows else None,
        other=_question(entry["other"]) if "other" in entry else None,
    )


def load_facts(path: Path, count: int = FACTS) -> list[Fact]:
    """The facts of the paper's experiment, of a JSON file with the author's word lists and passages under `facts`,
    which are not ours to ship."""
    return facts_of(json.loads(path.read_text(encoding="utf-8"))["facts"], count)


def facts_of(data: dict[str, Any], count: int = FACTS) -> list[Fact]:
    """Draw the facts as the author draws them (esys/composable_facts.py, seed 0)."""
    draw, facts = random.Random(0), []
    padding = "\n".join(f"- background note {number}: routine context, no action required." for number in range(18))
    for number in range(count):
        template, slots = data["DOMAINS"][number % len(data["DOMAINS"])]
        words = {name: draw.choice(data[name.upper()]) for name in ("co", "city", "name", "drug")}
        words["n0"], words["n1"] = draw.sample(data["NUM"], 2)
        _, pool, asked = draw.choice(slots)
        passage = f"[RETRIEVED DOCUMENT]\n{template.format(**words)}\n{padding}"
        key = next(key for key in ("n0", "co", "city", "name", "drug") if words[key] in pool)
        question = f"Question: {asked} Answer with one word.\nAnswer:"
        facts.append(Fact(passage, Question(question, (words[key],))))
    return facts

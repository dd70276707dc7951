"""Workloads: prompts whose skills were prefilled before, and the new part of each.

Every prompt is a text that tokenizes to the very tokens that `notes` assembles for it, so that all are asked the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import permutations
from pathlib import Path

import notes_cli as notes
from bench.random_model import ROOT
from bench.serving.texts import FIRST, policy, questions
from notes_cli.config import shipped_model

FOLDER = ROOT / "build" / "race"
ANSWER = 8  # tokens of an answer at most
REPEATS = 5  # prompts of a workload, each with another question
TURNS = 28
SIZES = {"1k": 2, "4k": 9, "16k": 37, "32k": 74}  # sections of the policy
TITLES = {
    "alone": "a skill alone, another question",
    "moved": "the skill after another system text each time",
    "orders": "four skills in every order",
    "field": "a field changed at the top of the skill",
    "turns": f"a conversation of {TURNS} turns, the field changed before each",
}
SYSTEMS = (
    "You work for Harbor Books.",
    "Answer briefly.",
    "You are a clerk.",
    "Be polite and short.",
    "Think of shops.",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and how `notes` is asked for it."""

    text: str
    tokens: int
    splice: tuple[str, ...]  # skills
    question: str
    system: str = ""
    date: str = ""  # that the first skill has now, where it is another one than it was compiled with


@dataclass(frozen=True)
class Work:
    """`seen` was asked and cached before; then `asked` are measured, one after the other."""

    name: str
    size: str
    skills: dict[str, str]
    seen: Prompt | None
    asked: tuple[Prompt, ...]

    @property
    def longest(self) -> int:
        return max(prompt.tokens for prompt in self.asked)


def works() -> dict[str, Callable[[str], Work]]:
    """Each workload by its name, to be made in a size."""
    return {"alone": _alone, "moved": _moved, "orders": _orders, "field": _field, "turns": _turns}


def _alone(size: str) -> Work:
    skills = {f"policy-{size}": policy(sections=SIZES[size])}
    seen, *asked = _prompts(skills, [Draft(tuple(skills), question) for question in _questions(REPEATS + 1)])
    return Work("alone", size, skills, seen, tuple(asked))


def _moved(size: str) -> Work:
    skills = {f"policy-{size}": policy(sections=SIZES[size])}
    first, *rest = _questions(REPEATS + 1)
    drafts = [Draft(tuple(skills), first)]
    drafts += [Draft(tuple(skills), one, system) for one, system in zip(rest, SYSTEMS, strict=True)]
    seen, *asked = _prompts(skills, drafts)
    return Work("moved", size, skills, seen, tuple(asked))


def _orders(size: str) -> Work:
    each = max(1, SIZES[size] // 4)
    skills = {f"{name}-{size}": policy(seed=seed, sections=each) for seed, name in enumerate("abcd", 2)}
    orders = list(permutations(skills))
    asked = _questions(len(orders) + 1)
    drafts = [Draft(order, question) for order, question in zip([orders[0], *orders], asked, strict=True)]
    seen, *rest = _prompts(skills, drafts)
    return Work("orders", size, skills, seen, tuple(rest))


def _field(size: str) -> Work:
    skills = {f"policy-{size}": policy(sections=SIZES[size])}
    first, *rest = _questions(REPEATS + 1)
    days = [(FIRST + timedelta(30 + number)).isoformat() for number in range(REPEATS)]
    drafts = [Draft(tuple(skills), first)]
    drafts += [Draft(tuple(skills), one, date=day) for one, day in zip(rest, days, strict=True)]
    seen, *asked = _prompts(skills, drafts)
    return Work("field", size, skills, seen, tuple(asked))


def _turns(size: str) -> Work:
    """The context of a question depends on earlier answers: all peers get those of `notes` (peers.Session)."""
    skills = {f"policy-{size}": policy(sections=SIZES[size])}
    days = [(FIRST + timedelta(30 + number)).isoformat() for number in range(TURNS)]
    asked = [
        Prompt("", 0, tuple(skills), question, date=day) for question, day in zip(_questions(TURNS), days, strict=True)
    ]
    return Work("turns", size, skills, None, tuple(asked))


def _questions(count: int) -> list[str]:
    return [one.question for one in questions(count, seed=11)]


@dataclass(frozen=True)
class Draft:
    """A prompt whose tokens are not known yet."""

    splice: tuple[str, ...]
    question: str
    system: str = ""
    date: str = ""


def texts(skills: dict[str, str]) -> dict[str, Path]:
    """The skills as files, by their names."""
    folder = FOLDER / "skills"
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: folder / f"{name}.txt" for name in skills}
    for name, path in found.items():
        if not path.exists() or path.read_text() != skills[name]:
            path.write_text(skills[name])
    return found


def _prompts(skills: dict[str, str], drafts: list[Draft]) -> Iterator[Prompt]:
    """Each as `notes` assembles it; all models here have the tokenizer and the template of the one that ships."""
    files = texts(skills)
    with notes.open(shipped_model(), beyond_trained=True, paths=notes.Paths.under(FOLDER / "none")) as model:
        for one in drafts:
            changed = {"fields": {"date": one.date}, "method": "field"} if one.date else {}
            splice = [str(files[name]) for name in one.splice]
            plan = model.explain(one.question, splice=splice, system=one.system or None, max_tokens=ANSWER, **changed)  # type: ignore[arg-type]
            tokens = plan.sequence.tokens.tolist()
            own = model.workspace.model
            text = b"".join(own.token_bytes(token, special=True) for token in tokens).decode()
            if own.tokenize(text, special=True).tolist() != tokens:
                raise SystemExit(f"{one}: its text has other tokens than it")
            yield Prompt(text, len(tokens), one.splice, one.question, one.system, one.date)


def with_texts(work: Work, prompts: Path) -> Work:
    """Return a conversation with the texts of its prompts, from a session of `notes`."""
    kept = json.loads(prompts.read_text())
    prompts = [Prompt(**{**asdict(one), **text}) for one, text in zip(work.asked, kept, strict=True)]
    asked = tuple(Prompt(**{**asdict(one), "splice": tuple(one.splice)}) for one in prompts)
    return Work(work.name, work.size, work.skills, None, asked)

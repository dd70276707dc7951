"""Workloads: prompts whose skills were prefilled before, and the new part of each.

Every prompt is a text that tokenizes to the very tokens that `notes` assembles for it, so that all are asked the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """A prompt, and how `notes` is asked for it. Its text and number of tokens are not known at first."""

    splice: tuple[str, ...]  # skills
    question: str
    system: str = ""
    date: str = ""  # that the first skill has now, where it is another one than it was compiled with
    text: str = ""
    tokens: int = 0


@dataclass(frozen=True)
class Work:
    """`seen` was asked and cached before; then `asked` are measured, one after the other."""

    name: str
    size: str
    skills: dict[str, str]
    seen: Prompt | None
    asked: tuple[Prompt, ...]

    @property
    def every(self) -> tuple[Prompt, ...]:
        return (*((self.seen,) if self.seen else ()), *self.asked)

    @property
    def context(self) -> int:
        """Tokens of a context for each prompt and its answer."""
        return -(-(max(prompt.tokens for prompt in self.asked) + 2 * ANSWER) // 256) * 256


def works() -> dict[str, Callable[[str], Work]]:
    """Each workload by its name, to be made in a size."""
    return {"alone": _alone, "moved": _moved, "orders": _orders, "field": _field, "turns": _turns}


def _policy(size: str) -> dict[str, str]:
    return {f"policy-{size}": policy(sections=SIZES[size])}


def _days(count: int) -> list[str]:
    return [(FIRST + timedelta(30 + number)).isoformat() for number in range(count)]


def _questions(count: int) -> list[str]:
    return [one.question for one in questions(count, seed=11)]


def _alone(size: str) -> Work:
    skills = _policy(size)
    return _work("alone", size, skills, [Prompt(tuple(skills), question) for question in _questions(REPEATS + 1)])


def _moved(size: str) -> Work:
    skills, asked = _policy(size), zip(_questions(REPEATS + 1), ("", *SYSTEMS), strict=True)
    return _work("moved", size, skills, [Prompt(tuple(skills), question, system) for question, system in asked])


def _orders(size: str) -> Work:
    each = max(1, SIZES[size] // 4)
    skills = {f"{name}-{size}": policy(seed=seed, sections=each) for seed, name in enumerate("abcd", 2)}
    orders = list(permutations(skills))
    asked = zip([orders[0], *orders], _questions(len(orders) + 1), strict=True)
    return _work("orders", size, skills, [Prompt(order, question) for order, question in asked])


def _field(size: str) -> Work:
    skills, asked = _policy(size), zip(_questions(REPEATS + 1), ("", *_days(REPEATS)), strict=True)
    return _work("field", size, skills, [Prompt(tuple(skills), question, date=day) for question, day in asked])


def _turns(size: str) -> Work:
    """The context of a question depends on earlier answers: all peers get those of `notes` (peers.session)."""
    skills = _policy(size)
    asked = zip(_questions(TURNS), _days(TURNS), strict=True)
    return Work("turns", size, skills, None, tuple(Prompt(tuple(skills), one, date=day) for one, day in asked))


def texts(skills: dict[str, str]) -> dict[str, Path]:
    """The skills as files, by their names."""
    folder = FOLDER / "skills"
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: folder / f"{name}.txt" for name in skills}
    for name, path in found.items():
        if not path.exists() or path.read_text() != skills[name]:
            path.write_text(skills[name])
    return found


def _work(name: str, size: str, skills: dict[str, str], prompts: Sequence[Prompt]) -> Work:
    """A workload with the texts of its prompts as `notes` assembles them: all models here have the tokenizer and the
    template of the one that ships. The first prompt is asked before."""
    files, found = texts(skills), []
    with notes.open(shipped_model(), beyond_trained=True, paths=notes.Paths.under(FOLDER / "none")) as model:
        own = model.workspace.model
        for one in prompts:
            changed = {"fields": {"date": one.date}, "method": "field"} if one.date else {}
            splice = [str(files[name]) for name in one.splice]
            plan = model.explain(one.question, splice=splice, system=one.system or None, max_tokens=ANSWER, **changed)  # type: ignore[arg-type]
            tokens = plan.sequence.tokens.tolist()
            text = b"".join(own.token_bytes(token, special=True) for token in tokens).decode()
            if own.tokenize(text, special=True).tolist() != tokens:
                raise SystemExit(f"{one}: its text has other tokens than it")
            found.append(replace(one, text=text, tokens=len(tokens)))
    return Work(name, size, skills, found[0], tuple(found[1:]))


def with_texts(work: Work, prompts: Path) -> Work:
    """A conversation with the texts of its prompts, from a session of `notes`."""
    kept = json.loads(prompts.read_text())
    return replace(work, asked=tuple(replace(one, **text) for one, text in zip(work.asked, kept, strict=True)))

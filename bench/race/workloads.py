"""Workloads on real texts: the prompts that were answered before, and those that are measured.

The texts are the sample skills, whose questions and right answers are in bench/real/tasks.yaml. The longest has pages
of docs/ behind them, about which nothing is asked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import pairwise, permutations

from bench.real.tasks import ROOT, SKILLS, Question, contains, load_tasks
from notes_cli.text.skill import load_skill

ANSWER = 24  # tokens of an answer at most
ASKED = 10  # questions of a workload
TURNS = 28  # of the conversation
LIBRARY = 30  # questions about ten documents
MEMORY = 12  # turns of the conversation with a user's memory
SIZES = {"1k": 7, "2k": 15, "4k": 32, "7k": 44}  # sections of a text of so many tokens
PAGES = ("recipes.md", "skills.md")
SYSTEMS = ("Answer briefly.", "You are a clerk.", "Be polite and short.", "You work for a shop.", "You help new staff.")
FIRST = date(2026, 5, 1)
FACTS = {"Diet": "vegan", "City": "Bern", "Phone": "555-0101", "Color": "green", "Budget": "300 euro"}  # of a user
HABITS = ("walks to work", "reads history", "cooks on Sundays", "likes short answers", "plays chess", "sleeps early")
PROFILE = "\n".join(f"{key}: {value}" for key, value in FACTS.items()) + "\n\n"
PROFILE += "\n".join(f"The user {one}, and has done so for {years} years." for years, one in enumerate(HABITS * 4, 2))
EDITS = {4: ("City", "Oslo"), 7: ("Diet", "kosher"), 10: ("City", "Bern")}  # by turn
CHAT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Text:
    """A text, and the questions that it answers."""

    name: str
    text: str
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A question about texts, with a system text before them. `changes`: fields of the first text with new values."""

    texts: tuple[Text, ...]
    question: Question
    system: str = ""
    changes: tuple[tuple[str, str], ...] = ()

    @property
    def message(self) -> str:
        """The system message, for a program that has no skills."""
        first, *others = (text.text for text in self.texts)
        for name, value in self.changes:
            first = re.sub(rf"^{name}: .*$", f"{name}: {value}", first, count=1, flags=re.M)
        return "\n\n".join([*filter(None, [self.system]), first, *others])

    @property
    def rendered(self) -> str:
        """The prompt in the form of SmolLM2's chat template."""
        return CHAT.format(self.message, self.question.ask)


@dataclass(frozen=True)
class Work:
    """`seen` was answered before; then `asked` are measured, one after the other."""

    name: str
    title: str
    asked: tuple[Prompt, ...]
    seen: Prompt | None = None
    conversation: bool = False  # each question follows the earlier ones and their answers
    memory: bool = False  # the text is kept just before the question, as a user's memory

    @property
    def texts(self) -> list[Text]:
        return list(dict.fromkeys(text for prompt in self.asked for text in prompt.texts))

    @property
    def summed(self) -> bool:
        """Its figure is the time of all answers together."""
        return self.seen is None


def sections() -> list[Text]:
    """The sections of the sample skills, each with the questions that it alone answers, and those of the pages."""
    found = []
    for task in load_tasks():
        parts = _split(load_skill(SKILLS / task.skill).text)
        for part in parts:
            own = (one for one in task.questions if [contains(other, one.accept) for other in parts].count(True) == 1)
            found.append(Text("", part, tuple(one for one in own if contains(part, one.accept))))
    return found + [Text("", part) for page in PAGES for part in _split((ROOT / "docs" / page).read_text("utf-8"))]


def _split(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n(?=## )", text)]


def _joined(name: str, parts: Sequence[Text], head: str = "") -> Text:
    questions = (one for part in parts for one in part.questions)
    return Text(name, head + "\n\n".join(part.text for part in parts), tuple(questions))


def works() -> list[Work]:
    """The workloads, in the order of the report."""
    parts = sections()
    texts = {size: _joined(f"text-{size}", parts[:end]) for size, end in SIZES.items()}
    return [
        *(_work(f"same-{size}", f"same text, {size}", _prompts(text)) for size, text in texts.items()),
        _work("moved", "another system text above, 2k", _moved(texts["2k"])),
        _work("pairs", "two of five texts, 2k", _pairs(parts)),
        _work("date", "another date above, 2k", _dated(_joined("dated-2k", parts[: SIZES["2k"]], _date()))),
        Work("library", f"{LIBRARY} questions about ten documents", tuple(_library(parts))),
        Work("turns", f"{TURNS} turns, another date above each, 1k", tuple(_turns(parts)), conversation=True),
        Work("memory", f"{MEMORY} turns with a user's memory, changed in three", tuple(_memory()), None, True, True),
    ]


def _date() -> str:
    return f"Date: {FIRST.isoformat()}\n\n"


def _day(number: int) -> tuple[tuple[str, str], ...]:
    return (("Date", (FIRST + timedelta(30 + number)).isoformat()),)


def _work(name: str, title: str, prompts: Sequence[Prompt]) -> Work:
    return Work(name, title, tuple(prompts[1:]), prompts[0])


def _prompts(*texts: Text, count: int = ASKED + 1) -> list[Prompt]:
    """Questions about the texts in a random order, none twice before all were asked."""
    questions = [one for text in texts for one in text.questions]
    turn = random.Random(11)
    asked = [one for _ in range(0, count, len(questions)) for one in turn.sample(questions, len(questions))]
    return [Prompt(texts, one) for one in asked[:count]]


def _moved(text: Text) -> list[Prompt]:
    first, *others = _prompts(text)
    return [first, *(replace(one, system=SYSTEMS[at % len(SYSTEMS)]) for at, one in enumerate(others))]


def _dated(text: Text, count: int = ASKED + 1) -> list[Prompt]:
    first, *others = _prompts(text, count=count)
    return [first, *(replace(one, changes=_day(at)) for at, one in enumerate(others))]


def _documents(parts: Sequence[Text], cuts: Sequence[int]) -> list[Text]:
    """Cut the sections into documents, each a part of one sample skill or of two."""
    return [_joined(f"document-{begin}-{end}", parts[begin:end]) for begin, end in pairwise(cuts)]


def _pairs(parts: Sequence[Text]) -> list[Prompt]:
    """Questions about two of five documents, in orders that were not there before."""
    turn = random.Random(11)
    pairs = turn.sample([*permutations(_documents(parts, (0, 7, 14, 21, 28, 34)), 2)], ASKED + 1)
    return [Prompt(pair, turn.choice(turn.choice(pair).questions)) for pair in pairs]


def _library(parts: Sequence[Text]) -> list[Prompt]:
    """Questions about one of ten documents, in a random order."""
    documents, turn = _documents(parts, (0, 3, 6, 9, 11, 14, 17, 22, 26, 30, 34)), random.Random(11)
    chosen = turn.sample(documents * (LIBRARY // len(documents)), LIBRARY)
    return [Prompt((one,), turn.choice(one.questions)) for one in chosen]


def _turns(parts: Sequence[Text]) -> list[Prompt]:
    return _dated(_joined("dated-1k", parts[: SIZES["1k"]], _date()), count=TURNS + 1)[1:]


def _memory() -> Iterator[Prompt]:
    """A question about the profile's facts in turn; their values change by EDITS."""
    facts, changes = dict(FACTS), dict[str, str]()
    for turn in range(MEMORY):
        changes |= dict([EDITS[turn]] if turn in EDITS else [])
        name = list(facts)[turn % len(facts)]
        question = Question(f"What is the user's {name.lower()}?", ((facts | changes)[name],))
        yield Prompt((Text("profile", PROFILE),), question, changes=tuple(changes.items()))

"""Lives to ask about: sessions of a few dated lines each, in their order, and questions after the last one.

A session says facts (`name: value`) and now and then a rule with its field; a later session may say a fact or a field
anew, and the last word counts. Rules never ask for a field that only another session has: that is H17's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date, timedelta

from bench.protocol.texts import KINDS, Next
from training import world as first
from training.tiny import world

# How many questions of each sort a life has. Facts that no session changes, by the third of the sessions that says
# them; facts that a later session changes; rules; rules whose field a later session changes so that they decide
# otherwise, which a note that was made in the rule's own session cannot know of.
SORTS = {"early": 1, "middle": 1, "late": 1, "changed": 2, "rule": 3, "overruled": 2}
RULES = ("rule", "overruled")
ROWS = (2, 3)  # of a table: sessions are short
SPARE = (0, 1)  # facts of a session that nobody asks for
AGAIN = 0.3  # of sessions that change such a fact
FILLER = 0.25  # of sessions with a sentence that says nothing


@dataclass(frozen=True)
class Question:
    """`sort`: one of SORTS. `kind`: of the fact or the rule. `before`: what was right before a later session changed
    it; empty where none did."""

    sort: str
    kind: str
    text: str
    choices: tuple[str, ...]
    answer: str
    before: str = ""


@dataclass(frozen=True)
class Life:
    """The texts of the sessions, and what is asked after all of them."""

    sessions: tuple[str, ...]
    questions: tuple[Question, ...]


class _Diary:
    """A life while it is drawn."""

    def __init__(self, texts: Next, rng: random.Random, count: int) -> None:
        self.texts, self.rng, self.count = texts, rng, count
        self.names, self.level = texts.names(rng), replace(texts.level, rows=ROWS)
        self.days = [world.Draft("", {}, {}, [], []) for _ in range(count)]
        self.said: dict[str, str] = {}  # each value of a fact, and its kind

    def fact(self, at: int, name: str = "", kind: str = "", old: str = "") -> tuple[str, str, str]:
        """Say a new fact in a session, or the one with this name anew; its name, kind and value."""
        name, kind = name or self.names.draw(), kind or self.rng.choice(world.KINDS)
        value = world.make_value(self.rng, self.names, kind, None, self.level, old)
        self.days[at].values[name] = value
        self.said[value] = kind
        return name, kind, value

    def two(self) -> list[int]:
        """A session, and a later one."""
        return sorted(self.rng.sample(range(self.count), 2))

    def rule(self, sort: str) -> Question:
        """A rule with its field in one session, and if it is overruled another value of the field in a later one."""
        rng, kind, new = self.rng, self.rng.choice(KINDS), None
        while new is None:
            rule = world.make_rule(rng, self.names, self.level, kind, self.names.draw(), self.names.draw(), ())
            old = world.make_value(rng, self.names, kind, rule, self.level)
            new = self.texts.flipped(rng, rule, old) if sort == "overruled" else old
        at, later = self.two()
        self.days[at].values[rule.field] = old
        self.days[at].lines += rule.lines()
        if new != old:
            self.days[later].values[rule.field] = new
        before = rule.outcome(old) if new != old else ""
        return Question(sort, kind, self.texts.ask(rng, rule), rule.choices, rule.outcome(new), before)

    def recall(self, sort: str, part: range | None = None) -> Question:
        """A fact of one of these sessions; without them one that a later session changes."""
        at, later = (self.rng.choice(part), None) if part else self.two()
        name, kind, value = self.fact(at)
        before = "" if later is None else value
        if later is not None:
            *_, value = self.fact(later, name, kind, value)
        asked = self.rng.choice(first.RECALL).format(field=name)
        return Question(sort, kind, asked, (value,), value, before)

    def spare(self) -> None:
        """Facts that nobody asks for, some of them changed, so that each session says something."""
        known: list[tuple[str, str, str]] = []
        for at, day in enumerate(self.days):
            more = max(self.rng.randint(*SPARE), not day.values)
            if known and self.rng.random() < AGAIN:
                which = self.rng.randrange(len(known))
                known[which] = self.fact(at, *known[which])
            known += [self.fact(at) for _ in range(more)]
            if self.rng.random() < FILLER:
                day.lines.append(f"- {self.rng.choice(first.FILLERS)}")

    def text(self) -> Iterator[str]:
        """Each session, a few days after the one before."""
        when = date.fromisoformat(first.make_date(self.rng))
        for number, day in enumerate(self.days, 1):
            values = self.rng.sample(list(day.values.items()), len(day.values))
            heading = f"# Session {number}, {when.isoformat()}"
            yield replace(day, heading=heading, values=dict(values)).text().strip()
            when += timedelta(days=self.rng.randint(1, 9))

    def choices(self, question: Question) -> tuple[str, ...]:
        """What a question may be answered by: of a rule its outcomes; of a fact its values, and others of its kind
        before others."""
        if question.sort in RULES:
            return question.choices
        others = sorted(self.said, key=lambda value: self.said[value] != question.kind)
        own = [each for each in (question.answer, question.before) if each]
        return tuple(dict.fromkeys([*own, *others]))[:4]


def live(texts: Next, rng: random.Random, sessions: int) -> Life:
    """Draw a life of so many sessions, three at least."""
    diary = _Diary(texts, rng, sessions)
    thirds = {
        name: range(sessions * i // 3, sessions * (i + 1) // 3) for i, name in enumerate(("early", "middle", "late"))
    }
    questions = [
        diary.rule(sort) if sort in RULES else diary.recall(sort, thirds.get(sort))
        for sort, count in SORTS.items()
        for _ in range(count)
    ]
    diary.spare()
    return Life(tuple(diary.text()), tuple(replace(each, choices=diary.choices(each)) for each in questions))

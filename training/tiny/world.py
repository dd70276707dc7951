"""Policies whose every word is drawn: fields, rules, questions, errata, reasons, and their right answers.

Any field decides any topic. Everything random comes from a `random.Random` that the caller seeds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from training import policies
from training.tiny import words

CANNOT = "I cannot tell from this."
ODD = (  # no policy of this form answers these
    "Who pays the {word}?",
    "How many {word} are there?",
    "When does the {word} open?",
    "Where is the {word}?",
    "Write a poem about the {word}.",
    "Do I need a {word}?",
    "Who is {word}?",
    "Hello.",
    "Who are you?",
    "How much?",
    "Why?",
    "What time is it?",
)
KINDS = ("table", "date", "amount")
SAMPLES = {"table": tuple(policies.WORD_FIELDS), "date": policies.DATE_FIELDS, "amount": policies.AMOUNT_FIELDS}
WHAT_IF = "What if the {field} is {value}?"
TAILED = ("What is the {topic}?", "What about the {topic}?", "And the {topic}?", "Tell me the {topic}.")


@dataclass(frozen=True)
class Level:
    """How hard a text is. Ranges are (lowest, highest), both included; shares are of 1."""

    skills: tuple[int, int] = (1, 1)
    rules: tuple[int, int] = (1, 2)
    rows: tuple[int, int] = (2, 3)
    spare: tuple[int, int] = (0, 1)
    fillers: tuple[int, int] = (0, 0)
    heading: float = 0.3
    preamble: float = 0.2
    below: float = 0.03  # texts whose fields are below their rules
    whole: float = 1.0  # words that are one token
    invented: float = 0.5  # of the others: words that are in no list
    kinds: tuple[str, ...] = ("table",)
    near: float = 0.1  # comparisons of dates of one month, or of amounts a few apart
    shared: float = 0.1  # rules whose field another rule has already
    alike: float = 0.0  # values that another field has as well
    versions: float = 0.0  # texts with an older version of the first skill before it
    sample: float = 0.0  # rules in the words of the samples that ship, which have questions of their own
    plain: float = 0.0  # texts whose rules are sentences, not a list


@dataclass
class Draft:
    """A skill and the rules in it. `values` are the fields, in order."""

    heading: str
    values: dict[str, str]
    kinds: dict[str, str]
    rules: list[policies.Rule]
    lines: list[str]
    below: bool = False

    def text(self, values: dict[str, str] | None = None, below: bool | None = None) -> str:
        """As it is in a file, perhaps with other values or the fields on the other side of the rules."""
        keys = [f"{k}: {v}" for k, v in (values or self.values).items()]
        head = [self.heading, ""] if self.heading else []
        parts = [self.lines, keys] if (self.below if below is None else below) else [keys, self.lines]
        return "\n".join([*head, *parts[0], "", *parts[1]])


@dataclass
class Names:
    """Words that no two roles of one prompt share."""

    rng: random.Random
    held: bool
    level: Level
    taken: set[str] = field(default_factory=set)

    def draw(self, pool: Sequence[str] = ()) -> str:
        """A word: one of the pool that is left; without such a one of POOL where it is one token, else any."""
        if left := [word for word in pool if word not in self.taken]:
            self.taken.add(word := self.rng.choice(left))
            return word
        while True:
            if self.rng.random() < self.level.whole:
                word = self.rng.choice(POOL)
            else:
                word = words.draw(self.rng, self.held, self.level.invented)
            if word not in self.taken:
                self.taken.add(word)
                return word


POOL = tuple(
    dict.fromkeys(
        [v for values in (*policies.WORD_FIELDS.values(), *policies.TOPICS.values()) for v in values]
        + [*policies.WORD_FIELDS, *policies.TOPICS, *policies.DATE_FIELDS, *policies.AMOUNT_FIELDS]
    )
)


def near_to(rng: random.Random, kind: str, limit: str, close: bool) -> str:
    """A value to compare with a limit: one of the same month or a few apart if `close`."""
    while True:
        if kind == "date":
            value = f"{limit[:8]}{rng.randint(1, 28):02d}" if close else policies.make_date(rng, limit)
        else:
            n = int(limit)
            value = str(min(999, max(1, n + rng.randint(-9, 9)))) if close else make_amount(rng)
        if value != limit and (close or not policies.too_near(kind, value, limit)):
            return value


def make_amount(rng: random.Random) -> str:
    """An amount up to 999, round ones more often."""
    return str(10 * rng.randint(1, 99) if rng.random() < 0.5 else rng.randint(2, 998))


def make_value(
    rng: random.Random, names: Names, kind: str, rule: policies.Rule | None, level: Level, old: str = ""
) -> str:
    """A value for a field, other than the old one; one of the rule's rows, or near or far from its limit."""
    while True:
        if kind == "table":
            new = rng.choice(rule.table)[0] if rule else names.draw()
        elif rule:
            new = near_to(rng, kind, rule.limit, rng.random() < level.near)
        else:
            new = policies.make_date(rng) if kind == "date" else make_amount(rng)
        if new != old:
            return new


def make_rule(
    rng: random.Random,
    names: Names,
    level: Level,
    kind: str,
    name: str,
    topic: str,
    have: Sequence[str],
    pools: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> policies.Rule:
    """A rule about a field; a table takes `have` (values another table of this field has) policies.

    `pools` are words for values and for outcomes.
    """
    if kind == "table":
        rows = max(rng.randint(*level.rows), 2)
        values = list(have) if have else [names.draw(pools[0]) for _ in range(rows)]
        outcomes = [names.draw(pools[1]) for _ in range(max(2, len(values) - (rng.random() < 0.3)))]
        column = outcomes[: len(values)] + [rng.choice(outcomes) for _ in range(len(values) - len(outcomes))]
        rng.shuffle(column)
        pairs = list(zip(values, column, strict=True))
        rng.shuffle(pairs)
        return policies.Rule(kind, topic, name, tuple(pairs))
    limit = policies.make_date(rng) if kind == "date" else make_amount(rng)
    return policies.Rule(kind, topic, name, limit=limit, yes=names.draw(pools[1]), no=names.draw(pools[1]))


def make_draft(rng: random.Random, names: Names, level: Level) -> Draft:
    """A random skill."""
    values: dict[str, str] = {}
    kinds: dict[str, str] = {}
    rules: list[policies.Rule] = []
    for _ in range(rng.randint(*level.rules)):
        sample = level.sample > 0 and rng.random() < level.sample  # drawn only if wanted: texts of a seed stay
        if rules and rng.random() < level.shared:
            old = rng.choice(rules)
            name, kind = old.field, old.kind
            have = [v for v, _ in old.table]
        else:
            kind, have = rng.choice(level.kinds), []
            name = names.draw(SAMPLES[kind] if sample else ())
        topic = names.draw(tuple(policies.TOPICS) if sample else ())
        pools = (policies.WORD_FIELDS.get(name, ()), policies.TOPICS.get(topic, ())) if sample else ((), ())
        rule = make_rule(rng, names, level, kind, name, topic, have, pools)
        rules.append(rule)
        kinds[name] = kind
        if name not in values:
            values[name] = make_value(rng, names, kind, rule, level)
    for _ in range(rng.randint(*level.spare)):
        name, kind = names.draw(), rng.choice(level.kinds)
        kinds[name] = kind
        alike = [v for k, v in values.items() if kinds[k] == kind]
        values[name] = (
            rng.choice(alike) if alike and rng.random() < level.alike else make_value(rng, names, kind, None, level)
        )
    order = list(values)
    rng.shuffle(order)
    blocks = [rule.lines() for rule in rules]
    rng.shuffle(blocks)
    lines = [line for block in blocks for line in block]
    if rng.random() < 0.1:
        rng.shuffle(lines)
    for filler in rng.sample(policies.FILLERS, rng.randint(*level.fillers)):
        lines.insert(rng.randint(0, len(lines)), f"- {filler}")
    if level.plain and rng.random() < level.plain:
        lines = [line.removeprefix("- ") for line in lines]
    heading = ""
    if rng.random() < level.heading:
        title = rng.choice(rules).topic.capitalize()
        heading = rng.choice(policies.HEADINGS).format(title=title, org=policies.make_org(rng, names.held))
    ordered = {k: values[k] for k in order}
    return Draft(heading, ordered, kinds, rules, lines, rng.random() < level.below)


def make_drafts(rng: random.Random, level: Level, held: bool = False) -> list[Draft]:
    """The skills of one prompt; no two share a word."""
    names = Names(rng, held, level)
    return [make_draft(rng, names, level) for _ in range(rng.randint(*level.skills))]


def ask(rng: random.Random, rule: policies.Rule) -> str:
    """A question about the rule's topic."""
    pick = rng.random()
    if rule.topic in policies.VERBS and pick < 0.3:
        return rng.choice(policies.VERBS[rule.topic])
    if pick < 0.8 or len(rule.choices) < 2:
        return rng.choice(TAILED).format(topic=rule.topic)
    if pick < 0.9:
        a, b = rng.sample(rule.choices, 2)
        return f"Is the {rule.topic} {a} or {b}?"
    return f"Which {rule.topic} applies?"


def thought(rule: policies.Rule, value: str) -> list[tuple[str, bool]]:
    """A line of reasoning as pieces of text; true marks the ones that carry information."""
    said = [("The", False), (f" {rule.field}", True), (" is", False), (f" {value}", True), (". So the", False)]
    return [*said, (f" {rule.topic}", True), (" is", False), (f" {rule.outcome(value)}", True), (".", False)]


@dataclass(frozen=True)
class Case:
    """One decision about one text, with the change that flips it."""

    draft: Draft
    rule: policies.Rule
    question: str
    old: str
    new: str

    @property
    def right(self) -> tuple[str, str]:
        """The right answers: with the old value, and with the new one."""
        return self.rule.outcome(self.old), self.rule.outcome(self.new)


def cases(n: int, level: Level, seed: str, held: bool) -> list[Case]:
    """`n` decisions that a change of one field flips. `held`: of words that training never saw."""
    rng = random.Random(f"cases {seed}")
    found: list[Case] = []
    while len(found) < n:
        drafts = make_drafts(rng, level, held)
        draft = rng.choice(drafts)
        rule = rng.choice(draft.rules)
        old = draft.values[rule.field]
        for _ in range(60):
            new = make_value(rng, Names(rng, held, level), rule.kind, rule, level, old)
            if rule.outcome(new) != rule.outcome(old):
                found.append(Case(draft, rule, ask(rng, rule), old, new))
                break
    return found

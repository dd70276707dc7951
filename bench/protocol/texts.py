"""Texts of training/tiny/world.py, as docs/protocol.md has them, for the experiments.

Sizes are those of the last stage of training. Of the asked rules half are tables and half limits, dates and amounts in
turn; memories of one, two and three skills take turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.experiments.texts import Size
from bench.protocol.seeds import rng_of
from notes_cli.errors import NotesError
from training import world as first
from training.tiny import world

WORDS = ("held-out", "known")  # several tokens each, that training never saw; one token each, that it did
KINDS = ("table", "date", "table", "amount")
LEVEL = world.Level(
    rules=(1, 3),
    rows=(2, 5),
    spare=(0, 2),
    fillers=(0, 2),
    heading=0.6,
    preamble=0.0,  # the prompt's system text
    below=0.0,
    kinds=world.KINDS,
    near=0.1,
    shared=0.1,
    alike=0.2,
)
DRAWS = 2000  # of a memory
TRIES = 60  # to find a value that flips the outcome


@dataclass(frozen=True)
class Policies:
    """One decision about a memory of policies (bench.experiments.texts.Case)."""

    drafts: tuple[world.Draft, ...]
    target: int
    rule: first.Rule
    question: str
    new: str

    @property
    def draft(self) -> world.Draft:
        return self.drafts[self.target]

    @property
    def skills(self) -> tuple[first.SkillText, ...]:
        return tuple(_skill(draft) for draft in self.drafts)

    @property
    def below(self) -> Policies:
        """The same with fields below the rules."""
        return replace(self, drafts=tuple(replace(draft, below=True) for draft in self.drafts))

    @property
    def kind(self) -> str:
        return self.rule.kind

    @property
    def choices(self) -> tuple[str, ...]:
        return self.rule.choices

    @property
    def field(self) -> str:
        return self.rule.field

    @property
    def old(self) -> str:
        return self.draft.values[self.field]

    @property
    def answer(self) -> str:
        return self.rule.outcome(self.old)

    @property
    def answer_new(self) -> str:
        return self.rule.outcome(self.new)


def _skill(draft: world.Draft) -> first.SkillText:
    return first.SkillText("policy", draft.text(), draft.values)


@dataclass
class Several(world.Names):
    """Words of the pool for known ones; else of several tokens, and none of the pool, which training saw all of."""

    several: Callable[[str], bool] = lambda word: True

    def draw(self, pool: Sequence[str] = ()) -> str:
        while True:
            word = super().draw(pool)
            if self.level.whole or (word not in world.POOL and self.several(word)):
                return word


class Next:
    """Draws policies; each case from a seed of its own, so they may begin anywhere (bench.experiments.texts.Texts)."""

    def __init__(
        self,
        commit: str,
        words: str,
        begin: int = 1,
        fits: Callable[[str], bool] = lambda text: True,
        several: Callable[[str], bool] = lambda word: True,
    ) -> None:
        """`begin`: the number of the first case. `fits`: whether a memory may be so long; another is drawn if not.
        `several`: whether a word takes several tokens, which a held-out one must."""
        self.commit, self.begin, self.fits, self.several = commit, begin, fits, several
        self.level = replace(LEVEL, whole=float(words == "known"))

    def policies(
        self,
        experiment: str,
        count: int,
        skills: Sequence[int] = (1, 2, 3),
        rules: tuple[int, int] = LEVEL.rules,
        kinds: Sequence[str] = KINDS,
    ) -> Iterator[tuple[int, Policies]]:
        """Cases up to number `count`, of so many skills in turn, with so many rules each; the asked rules are of these
        kinds in turn."""
        for number, rng in self.rngs(experiment, count):
            size = skills[(number - 1) % len(skills)]
            level = replace(self.level, skills=(size, size), rules=rules)
            yield number, self._drawn(rng, level, kinds[(number - 1) % len(kinds)])

    def cases(self, experiment: str, count: int) -> Iterator[tuple[int, Policies]]:
        return self.policies(experiment, count)

    def rngs(self, experiment: str, count: int) -> Iterator[tuple[int, random.Random]]:
        return ((number, rng_of(self.commit, experiment, number)) for number in range(self.begin, count + 1))

    def memory(self, rng: random.Random, size: Size) -> list[first.Draft]:
        level = replace(
            self.level, skills=size.skills, rules=size.rules, rows=size.rows, spare=size.spare, fillers=size.fillers
        )
        drafts = self._drafts(rng, level)
        return [first.Draft(_skill(draft), tuple(draft.rules)) for draft in drafts]

    def names(self, rng: random.Random) -> world.Names:
        """Words of this sort that no two roles of one prompt share."""
        return Several(rng, True, self.level, several=self.several)

    def ask(self, rng: random.Random, rule: first.Rule) -> str:
        return world.ask(rng, rule)

    def flipped(self, rng: random.Random, rule: first.Rule, old: str) -> str | None:
        for _ in range(TRIES):
            new = world.make_value(rng, self.names(rng), rule.kind, rule, self.level, old)
            if rule.outcome(new) != rule.outcome(old):
                return new
        return None

    def heading(self, rng: random.Random, rules: Sequence[first.Rule]) -> str:
        title = rules[0].topic if rules else self.names(rng).draw()
        org = first.make_org(rng, True)
        return rng.choice(first.HEADINGS).format(title=title.capitalize(), org=org)

    def spare(self, rng: random.Random, drafts: Sequence[first.Draft]) -> Iterator[tuple[str, str]]:
        names = self.names(rng)
        for draft in drafts:
            names.taken.update(draft.skill.fields)
            for rule in draft.rules:
                names.taken.update((rule.topic, *rule.choices, *(value for value, _ in rule.table)))
        for _ in range(4):
            kind = rng.choice(world.KINDS)
            yield names.draw(), world.make_value(rng, names, kind, None, self.level)

    def _drafts(self, rng: random.Random, level: world.Level) -> list[world.Draft]:
        """As world.make_drafts, with these names."""
        names = self.names(rng)
        return [world.make_draft(rng, names, level) for _ in range(rng.randint(*level.skills))]

    def _drawn(self, rng: random.Random, level: world.Level, kind: str) -> Policies:
        for _ in range(DRAWS):
            drafts = self._drafts(rng, level)
            pairs = [(i, rule) for i, draft in enumerate(drafts) for rule in draft.rules]
            asked = [(i, rule) for i, rule in pairs if rule.kind == kind and len(rule.choices) > 1]
            if not asked or not self.fits("\n\n".join(draft.text() for draft in drafts)):
                continue
            target, rule = rng.choice(asked)
            new = self.flipped(rng, rule, drafts[target].values[rule.field])
            if new:
                return Policies(tuple(drafts), target, rule, world.ask(rng, rule), new)
        raise NotesError(
            f"of {DRAWS} memories of {level.skills[0]} skills none fits: this tokenizer makes too much of them"
        )

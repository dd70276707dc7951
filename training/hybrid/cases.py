"""Held-out questions about two policies, of which the second is a skill that may be carried after the first.

Which value a field has: one of the second policy (`skill`), one of the first (`before`), or one of the first that the
second has redefined (`redefined`). The first needs what the skill says, the second what was there before it, the third
that the later one counts. `corrected` is any of them with an erratum at the end: every second one is about the field
that is asked for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from training import world

LEVEL = world.Level(skills=(1, 2), rules=(1, 2), rows=(2, 3), spare=(0, 2), fillers=(0, 2), preamble=0.5)
ABOUT = ("skill", "before", "redefined")
SEED = 20261123


@dataclass(frozen=True)
class Case:
    """A question of which the right answer is known."""

    opening: str  # system text
    first: str
    second: str
    about: str
    question: str
    choices: tuple[str, ...]
    answer: str
    erratum: tuple[str, str] | None = None  # field and new value


def redefining(first: world.Draft, second: world.Draft, field: str, value: str) -> world.Draft:
    """The second skill with a line more at its field lines: another value for a field of the first."""
    name = next(iter(second.skill.fields))
    line = f"{name}: {second.skill.fields[name]}"
    text = second.skill.text.replace(line, f"{field}: {value}\n{line}", 1)
    assert field in first.skill.fields and text != second.skill.text
    return replace(second, skill=replace(second.skill, text=text, fields={**second.skill.fields, field: value}))


def held_out(count: int, *, corrected: bool = False, seed: int = SEED) -> list[Case]:
    """`count` cases over texts that training never saw; what they are about takes turns."""
    rng = random.Random(f"hybrid {corrected} {seed}")
    level = replace(LEVEL, skills=(2, 2))
    found: list[Case] = []
    while len(found) < count:
        about = ABOUT[len(found) % len(ABOUT)]
        first, second = world.make_drafts(rng, level, held=True, kinds=("table",))
        asked = second if about == "skill" else first
        field = rng.choice([name for name in asked.skill.fields if name in world.WORD_FIELDS])
        words, value = world.WORD_FIELDS[field], asked.skill.fields[field]
        if about == "redefined":
            value = _other(rng, words, value)
            second = redefining(first, second, field, value)
        erratum = None
        if corrected:
            told = first.skill.fields | second.skill.fields
            others = [name for name in told if name in world.WORD_FIELDS and name != field]
            name = rng.choice(others) if others and len(found) % 2 else field
            erratum = (name, _other(rng, world.WORD_FIELDS[name], told[name]))
            value = erratum[1] if name == field else value
        opening = " ".join(
            [rng.choice(world.PREAMBLES).format(org=world.make_org(rng, True)), *rng.sample(world.FILLERS, 2)]
        )
        question = rng.choice(world.RECALL).format(field=field)
        found.append(Case(opening, first.skill.text, second.skill.text, about, question, words, value, erratum))
    return found


def _other(rng: random.Random, words: tuple[str, ...], old: str) -> str:
    return rng.choice([word for word in words if word != old])

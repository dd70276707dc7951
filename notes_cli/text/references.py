"""References: what `date`, `returns.date` and `*.date` stand for where several skills have fields.

A field that one skill has is called by its name alone; one that several have by skill and name. That is its key, as
ledgers and messages call it. It knows names only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from notes_cli.errors import SkillError
from notes_cli.text.keys import field_name, listed

ALL = "*"


class Reference(NamedTuple):
    """One field of one skill."""

    skill: str
    field: str
    key: str  # what it is called: `date`, or `returns.date` where other skills have one, too

    @property
    def shared(self) -> bool:
        """Whether other skills have a field of that name."""
        return self.key != self.field


class Known(Collection[str]):
    """The fields of some skills. What is `in` it is a reference to one or more of them; iterating gives the keys."""

    def __init__(self, skills: Iterable[tuple[str, Iterable[str]]]) -> None:
        """`skills`: the name of each, and those of its fields."""
        self._fields: dict[str, dict[str, None]] = {}  # skill -> fields, in order
        self._owners: dict[str, dict[str, None]] = {}  # field -> skills
        for skill, fields in skills:
            for field in fields:
                self._fields.setdefault(skill, {})[field] = None
                self._owners.setdefault(field, {})[skill] = None

    def __contains__(self, reference: object) -> bool:
        return isinstance(reference, str) and bool(self.find(reference))

    def __iter__(self) -> Iterator[str]:
        return (self.key(skill, field) for skill, fields in self._fields.items() for field in fields)

    def __len__(self) -> int:
        return sum(map(len, self._fields.values()))

    def key(self, skill: str, field: str) -> str:
        return field if len(self._owners.get(field, ())) < 2 else f"{skill}.{field}"

    def find(self, reference: str) -> list[Reference]:
        """All fields that a reference may mean: one without a skill those of every skill that has it."""
        skill, dot, field = reference.rpartition(".")
        field, skill = field_name(field), skill.strip()
        owners = self._owners.get(field, {})
        named = owners if not dot or skill == ALL else [skill] if skill in owners else ()
        return [Reference(owner, field, self.key(owner, field)) for owner in named]

    def resolve(self, reference: str, whose: str = "no spliced skill has") -> list[Reference]:
        """The fields that a reference stands for: one, or with `*.` all of that name.

        Raise SkillError for a field that no skill has, naming the known, and for one that several have, naming each.
        """
        found = self.find(reference)
        if not found:
            raise SkillError(f"{whose} a field {reference!r}", f"Known fields: {listed(sorted(self))}")
        if len(found) > 1 and "." not in reference:
            which = listed([one.key for one in found])
            raise SkillError(
                f"several skills have a field {reference!r}: name one of {which}, or all: {ALL}.{reference}"
            )
        return found

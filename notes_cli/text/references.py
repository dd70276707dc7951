"""References: which fields `date`, `returns.date` and `*.date` mean when several skills have fields.

The key of a field is its name if only one skill has such a field, else the skill and the name. Ledgers and messages use
keys. It knows names only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from notes_cli.errors import SkillError
from notes_cli.text.keys import field_name, known, listed

ALL = "*"


class Reference(NamedTuple):
    """One field of one skill."""

    skill: str
    field: str
    key: str  # `date`, or `returns.date` if other skills have a field of that name, too

    @property
    def shared(self) -> bool:
        """Whether other skills have a field of that name."""
        return self.key != self.field


class Known(Collection[str]):
    """The fields of some skills. A reference to one or more of them is `in` it; iterating gives the keys."""

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
        """All fields that a reference may mean; without a skill, that field of every skill that has it. A name may be
        written in other case where one field alone has it so."""
        skill, dot, field = reference.rpartition(".")
        field, skill = field_name(field), skill.strip()
        known = self._owners if not dot or skill == ALL else self._fields.get(skill, {})
        if field not in known:
            alike = [one for one in known if one.casefold() == field.casefold()]
            field = alike[0] if len(alike) == 1 else field
        owners = self._owners.get(field, {})
        named = owners if not dot or skill == ALL else [skill] if skill in owners else ()
        return [Reference(owner, field, self.key(owner, field)) for owner in named]

    def resolve(self, reference: str, subject: str = "no spliced skill has") -> list[Reference]:
        """The fields that a reference means: one, or with `*.` all of that name.

        Raise SkillError for a field that no skill has, with the known ones, and for one that several have, with each.
        `subject` is how the former begins.
        """
        found = self.find(reference)
        if not found:
            raise SkillError(f"{subject} a field {reference!r}", known(self, reference))
        if len(found) > 1 and "." not in reference:
            which = listed([one.key for one in found])
            raise SkillError(
                f"several skills have a field {reference!r}: name one of {which}, or all: {ALL}.{reference}"
            )
        return found

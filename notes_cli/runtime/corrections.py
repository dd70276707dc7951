"""Errata and new values as users write them, and the fields of which skills they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from notes_cli.engine.segment import FieldSpan, Segment
from notes_cli.errors import Help, SkillError
from notes_cli.text.erratum import Erratum, read_errata
from notes_cli.text.keys import ALL, Known, Reference

T = TypeVar("T")


class Fielded(Protocol):
    """A skill with fields: a segment, or one that is in a session."""

    @property
    def name(self) -> str: ...
    @property
    def fields(self) -> tuple[FieldSpan, ...]: ...


def known_fields(*skills: Fielded) -> Known:
    """The fields of skills, by name."""
    return Known((skill.name, [span.name for span in skill.fields]) for skill in skills)


def parse_errata(given: Sequence[str], segments: Sequence[Segment]) -> list[Erratum]:
    """Errata as the user wrote them. Raise SkillError for a field that no spliced skill has, or that several have."""
    return read_errata(given, known_fields(*segments))


def describe_wildcards(given: Iterable[str], known: Known) -> list[str]:
    """What each `*.field` among errata and references stands for, for people."""
    names = [text.partition("=")[0].strip() for text in given]
    return [
        f"{name} is {', '.join(one.key for one in known.find(name))}"
        for name in names
        if name.startswith(f"{ALL}.") and name in known
    ]


def resolve_values(values: Mapping[str, str], segments: Sequence[Segment]) -> list[tuple[Reference, str]]:
    """The field of one skill for each value, of `*.field` for each skill that has it.

    Raise SkillError for a field that no skill has, for one without a skill that several have, and for one that has two
    values, by two references to it.
    """
    known = known_fields(*segments)
    given = ((one, value) for name, value in values.items() for one in known.resolve(name))
    return list(unique_values(given, lambda one: one.key).items())


def unique_values(given: Iterable[tuple[T, str]], key: Callable[[T], str] = str) -> dict[T, str]:
    """The new value of each field. Raise SkillError for one that is given two, with its `key`."""
    found: dict[T, str] = {}
    for one, value in given:
        if found.setdefault(one, value).strip() != value.strip():
            raise SkillError(f"{key(one)} is given two new values, {found[one]!r} and {value!r}", Help.ONE_VALUE())
    return found


def as_new_values(
    errata: Iterable[str], fields: Mapping[str, str], segments: Sequence[Segment]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """New values of fields, with those that errata give them (the last of a field counts), and the errata that are free
    text. Raise SkillError as `parse_errata` and `check_values` do."""
    check_values(fields, errata := tuple(errata), segments)
    values, free = dict(fields), []
    known = known_fields(*segments)
    given = {one for name in fields for one in known.resolve(name)}
    for text in errata:
        for erratum in read_errata([text], known):
            if erratum.field is None or erratum.value is None:
                free.append(text)
            elif (reference := known.find(erratum.key)[0]) not in given:
                values[reference.key] = erratum.value
    return values, tuple(free)


def check_values(values: Mapping[str, str], errata: Sequence[str], segments: Sequence[Segment]) -> None:
    """Raise SkillError where an erratum says something else of a field than its new value: they come in by different
    ways, so neither is the later one. Of several errata of a field the last counts."""
    if not values:
        return
    known = known_fields(*segments)
    said = {known.find(one.key)[0]: one.value or "" for one in read_errata(errata, known) if one.field}
    for one, value in resolve_values(values, segments):
        if said.get(one, value).strip() != value.strip():
            what = f"{one.key} is given the new value {value!r}, and {said[one]!r} by an erratum"
            raise SkillError(what, Help.ONE_VALUE())

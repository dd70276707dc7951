"""Parses errata and new field values as users write them, and resolves the fields of skills that they refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from notes_cli.engine.segment import FieldSpan, Segment
from notes_cli.errors import Help, SkillError
from notes_cli.text.erratum import ALL, Erratum, Known, Reference, read_errata

T = TypeVar("T")


class Fielded(Protocol):
    """A skill with fields: a segment, or an entry of a session."""

    @property
    def name(self) -> str: ...
    @property
    def fields(self) -> tuple[FieldSpan, ...]: ...


def known_fields(*skills: Fielded) -> Known:
    """Return the fields of skills, by name."""
    return Known((skill.name, [span.name for span in skill.fields]) for skill in skills)


def parse_errata(texts: Sequence[str], segments: Sequence[Segment]) -> list[Erratum]:
    """Parse errata. Raises SkillError for a field that no spliced skill has, or that several have."""
    return read_errata(texts, known_fields(*segments))


def describe_wildcards(texts: Iterable[str], known: Known) -> list[str]:
    """Describe the fields that each `*.field` in errata and references stands for."""
    names = [text.partition("=")[0].strip() for text in texts]
    return [
        f"{name} is {', '.join(reference.key for reference in known.find(name))}"
        for name in names
        if name.startswith(f"{ALL}.") and name in known
    ]


def resolve_values(values: Mapping[str, str], segments: Sequence[Segment]) -> list[tuple[Reference, str]]:
    """Return the field of one skill for each value; for `*.field`, one for each skill that has it. Raises SkillError
    for an unknown field, for an unqualified one that several skills have, and for one with two values."""
    known = known_fields(*segments)
    pairs = ((reference, value) for name, value in values.items() for reference in known.resolve(name))
    return list(unique_values(pairs, lambda reference: reference.key).items())


def unique_values(pairs: Iterable[tuple[T, str]], key: Callable[[T], str] = str) -> dict[T, str]:
    """Return the value of each field. Raises SkillError for one with two values, naming it by `key`."""
    values: dict[T, str] = {}
    for field, value in pairs:
        if values.setdefault(field, value).strip() != value.strip():
            raise SkillError(f"{key(field)} is given two new values, {values[field]!r} and {value!r}", Help.ONE_VALUE())
    return values


def as_new_values(
    errata: Iterable[str], fields: Mapping[str, str], segments: Sequence[Segment]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Combine field values and errata: the new value of each field (the last erratum counts), and the free-text errata.
    Raises SkillError as `parse_errata` and `resolve_values` do, and where an erratum and a new value of a field differ:
    neither is the later one."""
    known, stated, free = known_fields(*segments), dict[Reference, str](), []
    for text in errata:
        for erratum in read_errata([text], known):
            if erratum.field is None or erratum.value is None:
                free.append(text)
            else:
                stated[known.find(erratum.key)[0]] = erratum.value
    for field, value in resolve_values(fields, segments):
        other = stated.pop(field, value)
        if other.strip() != value.strip():
            text = f"{field.key} is given the new value {value!r}, and {other!r} by an erratum"
            raise SkillError(text, Help.ONE_VALUE())
    return {**fields, **{field.key: value for field, value in stated.items()}}, tuple(free)

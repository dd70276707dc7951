"""Fields: named values in a text, and the characters where they stand.

A field stands in a text in three ways:

* `{{date}}`: replaced by the value that the front matter (or a line of the text) gives. Every occurrence is a
  span. `\\{{date}}` stays as it is, without the backslash.
* a line `date: 2026-06-01`: see FIELD_LINE for what counts as one.
* declared in the front matter only: the one place where the value stands in the text as a whole word. With
  more than one such place the author must say which, by `{{date}}`.

A field may be hoisted (`date: {value: 2026-06-01, hoist: true}` in the front matter): its value then stands on a
line `date: 2026-06-01` at the end of the text, behind a blank line, and nowhere else. Lines that give it in the text
are taken out, and every other place says its name instead: `[date]`. What a model concludes from it while reading then
stands behind all the rest, so another value is a matter of the last few tokens: the edit method `suffix` decodes these
alone and equals a recompute. Several hoisted fields have a line each, in the order of the front matter.

It knows no files and no front matter: it gets the body of a skill and the declared values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from notes_cli.errors import SkillError

FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
PLACEHOLDER = re.compile(r"(\\)?\{\{[ \t]*([A-Za-z0-9_-]+)[ \t]*\}\}")

# A key of one word or slug, a colon with a blank after it (so no URL and no time of day), and a value of at
# most 80 characters on the same line that does not end as a sentence does ("Note: ask first." is not a
# field). The line may be a list item; indented by four or more it is Markdown code.
FIELD_LINE = re.compile(
    r"^ {0,3}(?:[-*+] )?(?P<key>[A-Za-z][A-Za-z0-9_-]{0,63}):[ \t]+"
    r"(?P<value>\S(?:[^\n]{0,78}[^\s.!?:;,])?)[ \t]*$",
    re.M,
)
FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n]*\n.*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.M | re.S)


class Field(NamedTuple):
    """One place where a field's value stands: characters [start, end) of the text."""

    name: str
    value: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Hole:
    """Characters [start, end) to be replaced by the value of `name`; without a name by `literal`."""

    start: int
    end: int
    name: str
    literal: str = ""


def clean_value(name: str, value: str) -> str:
    """The value without blanks around it. Raise SkillError if it is empty or of several lines."""
    value = value.strip()
    if not value:
        raise SkillError(f"field {name!r} has no value. Give it one: {name}=VALUE")
    if len(value.splitlines()) > 1:
        raise SkillError(f"the value of field {name!r} has more than one line. Write it on one line")
    return value


def fill(text: str, holes: Iterable[Hole], values: Mapping[str, str]) -> tuple[str, tuple[Field, ...]]:
    """Put values into holes that do not overlap. Return the new text and where each value stands in it."""
    parts: list[str] = []
    fields: list[Field] = []
    done = length = 0  # characters read of the old text, written of the new
    for hole in sorted(holes, key=lambda hole: hole.start):
        value = values[hole.name] if hole.name else hole.literal
        length += hole.start - done
        parts += [text[done : hole.start], value]
        if hole.name:
            fields.append(Field(hole.name, value, length, length + len(value)))
        length += len(value)
        done = hole.end
    parts.append(text[done:])
    return "".join(parts), tuple(fields)


def find_fields(
    body: str, declared: Mapping[str, str], hoisted: Collection[str] = ()
) -> tuple[str, tuple[Field, ...], list[str]]:
    """Find the fields of a skill's body and fill its placeholders. `hoisted`: those declared ones that go to its end.

    Return the text, its fields in the order in which they stand, and warnings. Raise SkillError for a
    placeholder without a value, a declared value that another line contradicts, or one that stands nowhere.
    """
    body, end = _hoist(body, declared, hoisted)
    lines, warnings = _line_fields(body, declared)
    marks = [_placeholder(match, hoisted if match.start() < end else ()) for match in PLACEHOLDER.finditer(body)]
    values = dict(declared) | {name: body[hole.start : hole.end] for name, found in lines.items() for hole in found}
    for mark in marks:
        if mark.name and mark.name not in values:
            raise SkillError(f"{{{{{mark.name}}}}} stands in the text, but no such field has a value. {_known(values)}")
    holes = [hole for found in lines.values() for hole in found]
    placed = {hole.name for hole in [*holes, *marks]}
    for name in declared:
        if name not in placed:
            only = _only_place(body, name, declared[name])
            # A line such as "deadline: 2026-06-01" gives way to the field that the author declared.
            taken = [hole for hole in holes if hole.start < only.end and only.start < hole.end]
            for hole in taken:
                if hole.name in declared:
                    raise SkillError(
                        f"the values of fields {hole.name!r} and {name!r} stand in one place of the text. "
                        f"Write {{{{{hole.name}}}}} and {{{{{name}}}}} where they belong"
                    )
            holes = [hole for hole in holes if hole not in taken]
            holes.append(only)
    text, fields = fill(body, [*holes, *marks], values)
    return text, fields, warnings


def _hoist(body: str, declared: Mapping[str, str], hoisted: Collection[str]) -> tuple[str, int]:
    """The body with a placeholder for each hoisted field on a line of its own at the end, and where these begin.

    A line that contradicts the declared value stays, and is refused as any other is.
    """
    if not hoisted:
        return body, len(body)
    for name in hoisted:
        body = _mark(body, name, declared[name])
    code = [match.span() for match in FENCE.finditer(body)]
    for match in reversed([*FIELD_LINE.finditer(body)]):
        name, inside = match["key"], any(first <= match.start() < last for first, last in code)
        if name in hoisted and not inside and _gives(match["value"], name, declared[name]):
            before, after = body[: match.start()], body[match.end() + 1 :]
            alone = (not before or before.endswith("\n\n")) and after.startswith("\n")
            body = before + (after[1:] if alone else after)
    body = body.strip()
    lines = "\n".join(f"{name}: {{{{{name}}}}}" for name in hoisted)
    return (f"{body}\n\n{lines}" if body else lines), len(body)


def _mark(body: str, name: str, value: str) -> str:
    """The body with a placeholder where a declared value stands, if neither a line nor a placeholder says where that
    is. It need not stand anywhere."""
    marked = any(not match[1] and match[2] == name for match in PLACEHOLDER.finditer(body))
    lined = any(match["key"] == name for match in FIELD_LINE.finditer(body))
    if marked or lined or not _places(body, value):
        return body
    only = _only_place(body, name, value)
    return f"{body[: only.start]}{{{{{name}}}}}{body[only.end :]}"


def _gives(text: str, name: str, value: str) -> bool:
    """Whether what stands behind `name:` is its value, or its placeholder."""
    mark = PLACEHOLDER.fullmatch(text)
    return text == value or (mark is not None and not mark[1] and mark[2] == name)


def _line_fields(body: str, declared: Mapping[str, str]) -> tuple[dict[str, list[Hole]], list[str]]:
    """Values of `key: value` lines, by name, and warnings. A name with several values is no field."""
    code = [match.span() for match in FENCE.finditer(body)]
    found: dict[str, list[Hole]] = {}
    for match in FIELD_LINE.finditer(body):
        start, end = match.span("value")
        if PLACEHOLDER.search(body, start, end) or any(first <= start < last for first, last in code):
            continue
        found.setdefault(match["key"], []).append(Hole(start, end, match["key"]))
    warnings = []
    for name in list(found):
        values = {body[hole.start : hole.end] for hole in found[name]}
        if name in declared and values != {declared[name]}:
            other = sorted(values - {declared[name]})[0]
            raise SkillError(
                f"the front matter says {name} is {declared[name]!r}, a line of the text says {other!r}. "
                "Keep one of them"
            )
        if len(values) > 1:
            warnings.append(f"{name!r} stands with {len(values)} different values, so it is not taken as a field")
            del found[name]
    return found, warnings


def _placeholder(match: re.Match[str], hoisted: Collection[str]) -> Hole:
    """The hole of a placeholder. Where its value does not stand here but at the end, its name does."""
    if match[1] is not None:
        return Hole(*match.span(), "", match[0][1:])
    name = match[2]
    return Hole(*match.span(), "", f"[{name}]") if name in hoisted else Hole(*match.span(), name)


def _places(body: str, value: str) -> list[tuple[int, int]]:
    """Where the value stands as a whole word."""
    marks = [match.span() for match in PLACEHOLDER.finditer(body)]
    found = [match.span() for match in re.finditer(rf"(?<![\w-]){re.escape(value)}(?![\w-])", body)]
    return [span for span in found if not any(first < span[1] and span[0] < last for first, last in marks)]


def _only_place(body: str, name: str, value: str) -> Hole:
    """Where a declared value stands, as a whole word. Raise SkillError unless that is one place."""
    places = _places(body, value)
    if len(places) != 1:
        often = f"{len(places)} times" if places else "nowhere"
        raise SkillError(
            f"field {name!r} is declared, but its value {value!r} stands {often} in the text. "
            f"Write {{{{{name}}}}} where it belongs"
        )
    return Hole(*places[0], name)


def _known(names: Iterable[str]) -> str:
    known = ", ".join(sorted(set(names)))
    return f"Known fields: {known}" if known else "Give it one under `fields:` in the front matter"

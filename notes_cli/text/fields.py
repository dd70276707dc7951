"""Fields: named values in a text, and the characters where they stand.

A field stands in a text in three ways:

* `{{date}}`: replaced by the value that the front matter (or a line of the text) gives. Every occurrence is a
  span. `\\{{date}}` stays as it is, without the backslash. So does a `{{name}}` that nothing gives a value, as in texts
  about Jinja, Vue or Helm, with a warning; if it is nearly the name of a field, it is refused.
* a line `date: 2026-06-01`: keys.py has what counts as one.
* declared in the front matter only: the one place where the value stands in the text as a whole word. With
  more than one such place the author must say which, by `{{date}}`.

A field may be hoisted (`date: {value: 2026-06-01, hoist: true}` in the front matter): its value then stands on a
line `date: 2026-06-01` at the end of the text, behind a blank line, and nowhere else. Lines that give it in the text
are taken out, and every other place says its name instead: `[date]`. What a model concludes from it while reading then
stands behind all the rest, so another value is a matter of the last few tokens: the edit method `suffix` decodes these
alone and equals a recompute. Several hoisted fields have a line each, in the order of the front matter.

It knows no files and no front matter: it gets the body of a skill and the declared values. All of it takes time in
proportion to the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from notes_cli.errors import SkillError
from notes_cli.text.keys import KeyLine, field_name, key_lines, listed

SLUG = re.compile(r"[A-Za-z0-9_-]+")
PLACEHOLDER = re.compile(r"(\\)?\{\{[ \t]*([^\s{}](?:[^{}\n]{0,62}[^\s{}])?)[ \t]*\}\}")
FENCE = re.compile(r" {0,3}(```+|~~~+)")

Span = tuple[int, int]  # characters [first, last)


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
        raise SkillError(f"field {name!r} has no value", f"Give it one: {name}=VALUE")
    if len(value.splitlines()) > 1:
        raise SkillError(f"the value of field {name!r} has more than one line", "Write it on one line")
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


def fences(text: str) -> list[Span]:
    """The blocks of fenced code in a text, in their order. One that is not closed goes to the end."""
    found: list[Span] = []
    mark, begun, first = "", 0, 0
    for line in text.split("\n"):
        last = first + len(line)
        fence = FENCE.match(line)
        if not mark and fence and last < len(text):
            mark, begun = fence[1], first
        elif mark and fence and fence[1].startswith(mark) and not line[fence.end() :].rstrip(" \t").strip("`~"):
            found.append((begun, last))
            mark = ""
        first = last + 1
    return [*found, (begun, len(text))] if mark else found


def find_fields(
    body: str, declared: Mapping[str, str], hoisted: Collection[str] = ()
) -> tuple[str, tuple[Field, ...], list[str]]:
    """Find the fields of a skill's body and fill its placeholders. `hoisted`: those declared ones that go to its end.

    Return the text, its fields in the order in which they stand, and warnings. Raise SkillError for a declared value
    that another line contradicts, or one that stands nowhere, and for a placeholder that is a typo.
    """
    body, end = _hoist(body, declared, hoisted)
    lines, warnings = _line_fields(body, declared)
    values = dict(declared) | {name: body[hole.start : hole.end] for name, found in lines.items() for hole in found}
    marks, unknown = [], []
    for match in PLACEHOLDER.finditer(body):
        name = field_name(match[2])
        if name in values or (match[1] and SLUG.fullmatch(name)):
            marks.append(_placeholder(match, hoisted if match.start() < end else ()))
        elif SLUG.fullmatch(name):
            unknown.append(name)
    if unknown:
        warnings.append(_left(list(dict.fromkeys(unknown)), declared, values))
    holes = sorted((hole for found in lines.values() for hole in found), key=lambda hole: hole.start)
    placed, spans = {hole.name for hole in [*holes, *marks]}, _mark_spans(body)
    for name in declared:
        if name not in placed:
            only = _only_place(body, spans, name, declared[name])
            # A line such as "deadline: 2026-06-01" gives way to the field that the author declared.
            first = bisect_right(holes, only.start, key=lambda hole: hole.end)
            last = bisect_left(holes, only.end, key=lambda hole: hole.start)
            for hole in holes[first:last]:
                if hole.name in declared:
                    raise SkillError(
                        f"the values of fields {hole.name!r} and {name!r} stand in one place of the text. "
                        f"Write {{{{{hole.name}}}}} and {{{{{name}}}}} where they belong"
                    )
            holes[first:last] = [only]
    text, fields = fill(body, [*holes, *marks], values)
    return text, fields, warnings


def _left(unknown: Sequence[str], declared: Mapping[str, str], values: Mapping[str, str]) -> str:
    """The warning about placeholders that stay as they are. Raise SkillError for one that is a typo."""
    near_to: dict[str, list[str]] = {}
    for known in values:
        for part in _shortened(known):
            near_to.setdefault(part, []).append(known)
    for name in unknown:
        others = (known for part in _shortened(name) for known in near_to.get(part, ()))
        near = next((known for known in others if _is_typo(name, known, known in declared)), None)
        if near:
            raise SkillError(
                f"{{{{{name}}}}} is in the text, but no such field has a value. Did you mean {near!r}?",
                f"Known fields: {listed(sorted(values))}. Write \\{{{{{name}}}}} if it is no field",
            )
    shown = listed([f"{{{{{name}}}}}" for name in unknown], most=3)
    stays = (
        "stays as it is: no such field has a value"
        if len(unknown) == 1
        else "stay as they are: no such field has a value"
    )
    return f"{shown} {stays}. Declare it under `fields:`, or write \\{{{{{unknown[0]}}}}} where it is meant so"


def _is_typo(name: str, known: str, declared: bool) -> bool:
    """Whether a name is another one with one letter changed or two exchanged; of a declared one also with one too many
    or too few. Names of three letters and less are often near to others."""
    if min(len(name), len(known)) < 4:
        return False
    if len(name) == len(known):
        differ = [index for index, (one, other) in enumerate(zip(name, known, strict=True)) if one != other]
        swapped = len(differ) == 2 and differ[1] == differ[0] + 1
        return len(differ) == 1 or (
            swapped and name[differ[0]] == known[differ[1]] and name[differ[1]] == known[differ[0]]
        )
    short, long = sorted((name, known), key=len)
    return declared and short in _shortened(long)


def _shortened(name: str) -> set[str]:
    """A name, and all that it is without one of its letters: two names that differ by one share one of these."""
    return {name, *(name[:index] + name[index + 1 :] for index in range(len(name)))}


def _hoist(body: str, declared: Mapping[str, str], hoisted: Collection[str]) -> tuple[str, int]:
    """The body with a placeholder for each hoisted field on a line of its own at the end, and where these begin.

    A line that contradicts the declared value stays, and is refused as any other is.
    """
    if not hoisted:
        return body, len(body)
    body = _marked(body, declared, hoisted)
    code = fences(body)
    kept: list[str] = []  # what is kept of the text, its end first
    end = len(body)
    for line in reversed(key_lines(body)):
        if (
            line.name not in hoisted
            or within(code, line.first)
            or not _gives(line.value, line.name, declared[line.name])
        ):
            continue
        kept.append(body[line.last + 1 : end])
        while kept and not kept[-1]:
            kept.pop()
        alone = line.first == 0 or body.endswith("\n\n", 0, line.first)
        if alone and kept and kept[-1].startswith("\n"):
            kept[-1] = kept[-1][1:]
        end = line.first
    body = "".join([body[:end], *reversed(kept)]).strip()
    lines = "\n".join(f"{name}: {{{{{name}}}}}" for name in hoisted)
    return (f"{body}\n\n{lines}" if body else lines), len(body)


def _marked(body: str, declared: Mapping[str, str], hoisted: Collection[str]) -> str:
    """The body with a placeholder where a hoisted value stands, if neither a line nor a placeholder says where that
    is. It need not stand anywhere."""
    said = {field_name(match[2]) for match in PLACEHOLDER.finditer(body) if not match[1]}
    said |= {line.name for line in key_lines(body)}
    taken, holes = _mark_spans(body), []
    for name in hoisted:
        if name not in said and _places(body, taken, declared[name]):
            only = _only_place(body, taken, name, declared[name])
            insort(taken, (only.start, only.end))
            holes.append(Hole(only.start, only.end, "", f"{{{{{name}}}}}"))
    return fill(body, holes, {})[0]


def _gives(text: str, name: str, value: str) -> bool:
    """Whether what stands behind `name:` is its value, or its placeholder."""
    mark = PLACEHOLDER.fullmatch(text)
    return text == value or (mark is not None and not mark[1] and field_name(mark[2]) == name)


def _line_fields(body: str, declared: Mapping[str, str]) -> tuple[dict[str, list[Hole]], list[str]]:
    """Values of `key: value` lines, by name, and warnings. A name with several values is no field."""
    code, lines = fences(body), key_lines(body)
    names = {line.name for line in lines} | declared.keys()
    found: dict[str, list[Hole]] = {}
    for line in lines:
        if not within(code, line.start) and not any(_is_mark(match, names) for match in _marks_in(line)):
            found.setdefault(line.name, []).append(Hole(line.start, line.end, line.name))
    warnings = []
    for name in list(found):
        values = {body[hole.start : hole.end] for hole in found[name]}
        if name in declared and values != {declared[name]}:
            other = sorted(values - {declared[name]})[0]
            raise SkillError(
                f"the front matter says {name} is {_start(declared[name])!r}, a line of the text says {other!r}. "
                "Keep one of them"
            )
        if len(values) > 1:
            warnings.append(f"{name!r} stands with {len(values)} different values, so it is not taken as a field")
            del found[name]
    return found, warnings


def _marks_in(line: KeyLine) -> Iterator[re.Match[str]]:
    return PLACEHOLDER.finditer(line.value)


def _is_mark(match: re.Match[str], names: Collection[str]) -> bool:
    """Whether it could be a placeholder: of one of the names, or of any that is one plain word."""
    return field_name(match[2]) in names or SLUG.fullmatch(match[2]) is not None


def _placeholder(match: re.Match[str], hoisted: Collection[str]) -> Hole:
    """The hole of a placeholder. Where its value does not stand here but at the end, its name does."""
    if match[1] is not None:
        return Hole(*match.span(), "", match[0][1:])
    name = field_name(match[2])
    return Hole(*match.span(), "", f"[{name}]") if name in hoisted else Hole(*match.span(), name)


def _mark_spans(body: str) -> list[Span]:
    return [match.span() for match in PLACEHOLDER.finditer(body)]


def within(spans: Sequence[Span], position: int) -> bool:
    """Whether one of the spans, which are in order, holds the position."""
    index = bisect_right(spans, position, key=lambda span: span[0]) - 1
    return index >= 0 and position < spans[index][1]


def _places(body: str, marks: Sequence[Span], value: str) -> list[Span]:
    """Where the value stands as a whole word, and not in a placeholder."""
    literal = re.escape(value)  # first in the pattern, so that it is searched for as such
    found = [match.span() for match in re.finditer(rf"{literal}(?<![\w-]{literal})(?![\w-])", body)]

    def touches(span: Span) -> bool:
        index = bisect_left(marks, span[1], key=lambda mark: mark[0]) - 1
        return index >= 0 and span[0] < marks[index][1]

    return [span for span in found if not touches(span)]


def _only_place(body: str, marks: Sequence[Span], name: str, value: str) -> Hole:
    """Where a declared value stands, as a whole word. Raise SkillError unless that is one place."""
    places = _places(body, marks, value)
    if len(places) != 1:
        often = f"{len(places)} times" if places else "nowhere"
        raise SkillError(
            f"field {name!r} is declared, but its value {_start(value)!r} stands {often} in the text. "
            f"Write {{{{{name}}}}} where it belongs"
        )
    return Hole(*places[0], name)


def _start(value: str) -> str:
    """The beginning of a long value, for a message."""
    return value if len(value) <= 80 else value[:79] + "\u2026"

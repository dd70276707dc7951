"""Fields: named values in a text, and the characters that hold them.

A text can have a field in three ways:

* `{{date}}`: replaced by the value that the front matter (or a line of the text) gives. Every occurrence is a
  span. `\\{{date}}` becomes `{{date}}` and is no field. A `{{name}}` without a value, as in texts about Jinja, Vue or
  Helm, is left as it is, with a warning; if it is nearly the name of a field, it is refused.
* a line `date: 2026-06-01`: keys.py defines what counts as one.
* declared in the front matter only: the one place in the text that has the value as a whole word. If there is more
  than one such place, the author must mark the right one with `{{date}}`.

A field may be hoisted (`date: {value: 2026-06-01, hoist: true}` in the front matter): its value is then on a line
`date: 2026-06-01` at the end of the text, after an empty line, and nowhere else. Lines of the text that give the value
are removed, and every other place has the field's name instead: `[date]`. No token but the last few then depends on the
value: the edit method `suffix` decodes only these and equals a recompute. Several hoisted fields have a line each, in
the order of the front matter.

It knows no files and no front matter: it gets the body of a skill and the declared values. All of it takes time
proportional to the length of the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from notes_cli.errors import Help, SkillError
from notes_cli.text.keys import BREAKS, KeyLine, field_name, key_lines, listed

SLUG = re.compile(r"[A-Za-z0-9_-]+")
PLACEHOLDER = re.compile(rf"(\\)?\{{\{{[ \t]*([^\s{{}}](?:[^{{}}{BREAKS}]{{0,62}}[^\s{{}}])?)[ \t]*\}}\}}")
BREAK = re.compile(f"[{BREAKS}]")
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # but what is white space
FENCE = re.compile(r" {0,3}(```+|~~~+)")

Span = tuple[int, int]  # characters [first, last)


class Field(NamedTuple):
    """One place that holds a field's value: characters [start, end) of the text."""

    name: str
    value: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Hole:
    """Characters [start, end) to be replaced by the value of `name`, or by `literal` if there is no name."""

    start: int
    end: int
    name: str
    literal: str = ""


def clean_value(name: str, value: str) -> str:
    """The value without white space around it. Raise SkillError if it is empty, has several lines or a control
    character, or begins with =."""
    value = value.strip()
    if value.startswith("="):
        raise SkillError(f"the value of field {name!r} begins with =", f"Write {name}=VALUE")
    if not value:
        raise SkillError(f"field {name!r} has no value", f"Give it one: {name}=VALUE")
    if BREAK.search(value):
        raise SkillError(f"the value of field {name!r} has more than one line", "Write it on one line")
    if CONTROL.search(value):
        raise SkillError(f"the value of field {name!r} has a control character", "Write it without")
    return value


def fill(text: str, holes: Iterable[Hole], values: Mapping[str, str]) -> tuple[str, tuple[Field, ...]]:
    """Put values into holes that do not overlap. Return the new text and the place of each value in it."""
    parts: list[str] = []
    fields: list[Field] = []
    done = length = 0  # characters of the old text that were read, of the new one that were written
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
    """The blocks of fenced code in a text, in order. One that is not closed goes on to the end of the text."""
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
    """Find the fields of a skill's body and fill its placeholders. `hoisted`: the declared fields to move to its end.

    Return the text, its fields in the order of the text, and warnings. Raise SkillError for a declared value that a
    line contradicts or that is nowhere in the text, and for a placeholder that is nearly the name of a field.
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
            # A declared field takes the place of a line such as "deadline: 2026-06-01".
            first = bisect_right(holes, only.start, key=lambda hole: hole.end)
            last = bisect_left(holes, only.end, key=lambda hole: hole.start)
            for hole in holes[first:last]:
                if hole.name in declared:
                    raise SkillError(
                        f"the values of fields {hole.name!r} and {name!r} are in the same place of the text",
                        f"Write {{{{{hole.name}}}}} and {{{{{name}}}}} where they belong",
                    )
            holes[first:last] = [only]
    text, fields = fill(body, [*holes, *marks], values)
    return text, fields, warnings


def _left(unknown: Sequence[str], declared: Mapping[str, str], values: Mapping[str, str]) -> str:
    """The warning about placeholders that stay as they are. Raise SkillError for one that is
    nearly the name of a field."""
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
                f"Known fields: {listed(sorted(values))}. Write \\{{{{{name}}}}} if it is not a field",
            )
    shown = listed([f"{{{{{name}}}}}" for name in unknown], most=3)
    stays = (
        "stays as it is: no such field has a value"
        if len(unknown) == 1
        else "stay as they are: no such field has a value"
    )
    return f"{shown} {stays}. Declare it under `fields:`, or write \\{{{{{unknown[0]}}}}} if it is meant literally"


def _is_typo(name: str, known: str, declared: bool) -> bool:
    """Whether a name is another one with one letter changed or two neighbours exchanged; for a declared one also with a
    letter more or less. Names of up to three letters are not compared: they are often close to others."""
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
    """A name, and each form of it with one letter left out: two names that differ by one letter share one of these."""
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
    for line in reversed(key_lines(body, declared)):
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
    """The body with a placeholder in the place of each hoisted value, if neither a line nor a placeholder shows where
    that is. The value need not be in the text."""
    named = {field_name(match[2]) for match in PLACEHOLDER.finditer(body) if not match[1]}
    named |= {line.name for line in key_lines(body, declared)}
    taken, holes = _mark_spans(body), []
    for name in hoisted:
        if name not in named and _places(body, taken, declared[name]):
            only = _only_place(body, taken, name, declared[name])
            insort(taken, (only.start, only.end))
            holes.append(Hole(only.start, only.end, "", f"{{{{{name}}}}}"))
    return fill(body, holes, {})[0]


def _gives(text: str, name: str, value: str) -> bool:
    """Whether the text after `name:` is its value, or its placeholder."""
    mark = PLACEHOLDER.fullmatch(text)
    return text == value or (mark is not None and not mark[1] and field_name(mark[2]) == name)


def _line_fields(body: str, declared: Mapping[str, str]) -> tuple[dict[str, list[Hole]], list[str]]:
    """Values of `key: value` lines, by name, and warnings. A name with several values is not a field."""
    code, lines = fences(body), key_lines(body, declared)
    names = {line.name for line in lines} | declared.keys()
    found: dict[str, list[Hole]] = {}
    for line in lines:
        if not within(code, line.start) and not any(_is_mark(match, names) for match in _marks_in(line)):
            found.setdefault(line.name, []).append(Hole(line.start, line.end, line.name))
    several: dict[str, int] = {}
    for name in list(found):
        values = {body[hole.start : hole.end] for hole in found[name]}
        if name in declared and values != {declared[name]}:
            other = sorted(values - {declared[name]})[0]
            raise SkillError(
                f"the front matter says {name} is {_start(declared[name])!r}, but a line of the text says {other!r}",
                "Keep one of them",
            )
        if len(values) > 1:
            several[name] = len(values)
            del found[name]
    if len(several) > 1:
        shown = listed(list(map(repr, several)), most=3)
        return found, [f"{shown} have different values in the text, so they are not taken as fields"]
    return found, [
        f"{name!r} has {count} different values in the text, so it is not taken as a field"
        for name, count in several.items()
    ]


def _marks_in(line: KeyLine) -> Iterator[re.Match[str]]:
    return PLACEHOLDER.finditer(line.value)


def _is_mark(match: re.Match[str], names: Collection[str]) -> bool:
    """Whether it could be a placeholder: it has one of the names, or is a single plain word."""
    return field_name(match[2]) in names or SLUG.fullmatch(match[2]) is not None


def _placeholder(match: re.Match[str], hoisted: Collection[str]) -> Hole:
    """The hole of a placeholder. It gets the name of the field if the value is hoisted, else the value."""
    if match[1] is not None:
        return Hole(*match.span(), "", match[0][1:])
    name = field_name(match[2])
    return Hole(*match.span(), "", f"[{name}]") if name in hoisted else Hole(*match.span(), name)


def _mark_spans(body: str) -> list[Span]:
    return [match.span() for match in PLACEHOLDER.finditer(body)]


def within(spans: Sequence[Span], position: int) -> bool:
    """Whether the position is in one of the spans, which are in order."""
    index = bisect_right(spans, position, key=lambda span: span[0]) - 1
    return index >= 0 and position < spans[index][1]


def _places(body: str, marks: Sequence[Span], value: str) -> list[Span]:
    """Where the text has the value as a whole word, and not in a placeholder."""
    literal = re.escape(value)  # first in the pattern, so that it is searched for as such
    found = [match.span() for match in re.finditer(rf"{literal}(?<![\w-]{literal})(?![\w-])", body)]

    def touches(span: Span) -> bool:
        index = bisect_left(marks, span[1], key=lambda mark: mark[0]) - 1
        return index >= 0 and span[0] < marks[index][1]

    return [span for span in found if not touches(span)]


def _only_place(body: str, marks: Sequence[Span], name: str, value: str) -> Hole:
    """The one place that has a declared value as a whole word. Raise SkillError unless there is exactly one."""
    places = _places(body, marks, value)
    if len(places) != 1:
        often = f"{len(places)} times" if places else "nowhere"
        raise SkillError(
            f"field {name!r} is declared, but its value {_start(value)!r} occurs {often} in the text",
            f"Write {{{{{name}}}}} where it belongs",
        )
    return Hole(*places[0], name)


def _start(value: str) -> str:
    """The beginning of a long value, for a message."""
    return value if len(value) <= 80 else value[:79] + "\u2026"


def parse_values(given: Sequence[str]) -> dict[str, str]:
    """New values of fields, each as `name=value`; the last of a name counts. Raise SkillError for anything else."""
    values = {}
    for text in given:
        given_name, equals, value = text.partition("=")
        name = field_name(given_name)
        if not equals or not name:
            raise SkillError(f"{text!r} is not a field and its value", Help.FIELD_VALUE())
        values[name] = clean_value(name, value)
    return values

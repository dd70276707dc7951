"""Finds the fields of a text: named values, and the characters that hold them.

A text can have a field in three ways:

* `{{date}}`: replaced by the value from the front matter or from a line of the text. Every occurrence is a span.
  `\\{{date}}` becomes `{{date}}` and is no field. A `{{name}}` without a value, as in texts about Jinja, Vue or Helm,
  stays, with a warning; if it is nearly the name of a field, it is refused.
* a line `date: 2026-06-01`, or a row of a table of two columns, as keys.py defines them.
* declared in the front matter only: the single place in the text that has the value as a whole word. With several such
  places, the author must mark the right one with `{{date}}`.

A field may be hoisted (`date: {value: 2026-06-01, hoist: true}` in the front matter): its value is then only on a line
`date: 2026-06-01` at the end of the text, after an empty line. Lines that give the value are removed, and every other
place has the name of the field instead: `[date]`. Only the last tokens then depend on the value: the edit method
`suffix` decodes only these and equals a recompute. Several hoisted fields have a line each, in the order of the front
matter.

All functions take time proportional to the length of the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from notes_cli.errors import SkillError
from notes_cli.text.keys import BREAKS, field_name, key_lines, listed, table_lines

SLUG = re.compile(r"[A-Za-z0-9_-]+")
PLACEHOLDER = re.compile(rf"(\\)?\{{\{{[ \t]*([^\s{{}}](?:[^{{}}{BREAKS}]{{0,62}}[^\s{{}}])?)[ \t]*\}}\}}")
BREAK = re.compile(f"[{BREAKS}]")
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # except white space
FENCE = re.compile(r" {0,3}(```+|~~~+)")

ARROW = re.compile(r"(?:^|\s+)=>(?:\s+|$)")  # between an old text and a new one (quotations.py)

Span = tuple[int, int]  # characters [first, last)


class Field(NamedTuple):
    """A place that holds a field's value: characters [start, end) of the text."""

    name: str
    value: str
    start: int
    end: int


class Hole(NamedTuple):
    """Characters [start, end) to replace by the value of `name`, or by `literal` if there is no name."""

    start: int
    end: int
    name: str
    literal: str = ""


def clean_value(name: str, value: str) -> str:
    """Return the value without surrounding white space. Raises SkillError if it is empty, has several lines or a
    control character, or begins with =."""
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
    """Put values into holes that do not overlap. Returns the new text and the place of each value in it."""
    parts: list[str] = []
    fields: list[Field] = []
    read = written = 0  # characters of the old text read, of the new one written
    for hole in sorted(holes):
        value = values[hole.name] if hole.name else hole.literal
        written += hole.start - read
        parts += [text[read : hole.start], value]
        if hole.name:
            fields.append(Field(hole.name, value, written, written + len(value)))
        written += len(value)
        read = hole.end
    parts.append(text[read:])
    return "".join(parts), tuple(fields)


def fences(text: str) -> list[Span]:
    """Return the spans of fenced code in a text, in order. An unclosed block extends to the end."""
    spans: list[Span] = []
    mark, opened, first = "", 0, 0
    for line in text.split("\n"):
        last = first + len(line)
        fence = FENCE.match(line)
        if not mark and fence and last < len(text):
            mark, opened = fence[1], first
        elif mark and fence and fence[1].startswith(mark) and not line[fence.end() :].rstrip(" \t").strip("`~"):
            spans.append((opened, last))
            mark = ""
        first = last + 1
    return [*spans, (opened, len(text))] if mark else spans


def find_fields(
    body: str, declared: Mapping[str, str], hoisted: Collection[str] = ()
) -> tuple[str, tuple[Field, ...], list[str]]:
    """Find the fields of a skill's body and fill its placeholders. `hoisted`: the declared fields to move to its end.

    Returns the text, its fields in order, and warnings. Raises SkillError for a declared value that a line contradicts
    or that is not in the text, and for a placeholder that is nearly the name of a field.
    """
    body, end = _hoist(body, declared, hoisted)
    lines, warnings = _line_fields(body, declared)
    values = dict(declared) | {name: body[hole.start : hole.end] for name, some in lines.items() for hole in some}
    marks, unknown = [], []
    for match in PLACEHOLDER.finditer(body):
        name = field_name(match[2])
        if name in values or (match[1] and SLUG.fullmatch(name)):
            marks.append(_placeholder(match, hoisted if match.start() < end else ()))
        elif SLUG.fullmatch(name):
            unknown.append(name)
    if unknown:
        warnings.append(_unfilled_warning(list(dict.fromkeys(unknown)), declared, values))
    holes = sorted((hole for some in lines.values() for hole in some), key=lambda hole: hole.start)
    placed, spans = {hole.name for hole in [*holes, *marks]}, _mark_spans(body)
    for name in declared:
        if name not in placed:
            only = _only_place(body, spans, name, declared[name])
            # A declared field replaces one of a line such as "deadline: 2026-06-01".
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


def _unfilled_warning(unknown: Sequence[str], declared: Collection[str], values: Mapping[str, str]) -> str:
    """Return the warning about placeholders without a value. Raises SkillError for one that is nearly the name of a
    field: one letter is another, or two are exchanged; for a declared one also with a letter more or less."""
    near_to: dict[str, list[str]] = {}
    for known in values:
        for part in _shortened(known):
            near_to.setdefault(part, []).append(known)
    for name in unknown:
        for known in (known for part in _shortened(name) for known in near_to.get(part, ())):
            if min(len(name), len(known)) > 3 and (known in declared or len(name) == len(known)):
                raise SkillError(
                    f"{{{{{name}}}}} is in the text, but no such field has a value. Did you mean {known!r}?",
                    f"Known fields: {listed(sorted(values))}. Write \\{{{{{name}}}}} if it is not a field",
                )
    shown = listed([f"{{{{{name}}}}}" for name in unknown], most=3)
    stays = "stays as it is" if len(unknown) == 1 else "stay as they are"
    remedy = f"Declare it under `fields:`, or write \\{{{{{unknown[0]}}}}} if it is meant literally"
    return f"{shown} {stays}: no such field has a value. {remedy}"


def _shortened(name: str) -> set[str]:
    """Return a name and each form of it without one letter: names that differ by one letter share one of these."""
    return {name, *(name[:index] + name[index + 1 :] for index in range(len(name)))}


def _hoist(body: str, declared: Mapping[str, str], hoisted: Collection[str]) -> tuple[str, int]:
    """Move each hoisted field to a placeholder on its own line at the end of the body. Returns the body, and where
    these lines begin.

    A line that contradicts the declared value stays, and is refused as any other is.
    """
    if not hoisted:
        return body, len(body)
    body = _mark_hoisted(body, declared, hoisted)
    code = fences(body)
    kept: list[str] = []  # parts of the text to keep, last first
    end = len(body)
    for line in reversed(key_lines(body, declared)):
        if (
            line.name not in hoisted
            or within(code, line.first)
            or not _is_value_or_mark(line.value, line.name, declared[line.name])
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


def _mark_hoisted(body: str, declared: Mapping[str, str], hoisted: Collection[str]) -> str:
    """Put a placeholder in the place of each hoisted value that has neither a line nor a placeholder. The value may be
    missing."""
    named = {field_name(match[2]) for match in PLACEHOLDER.finditer(body) if not match[1]}
    named |= {line.name for line in key_lines(body, declared)}
    taken, holes = _mark_spans(body), []
    for name in hoisted:
        if name not in named and _places(body, taken, declared[name]):
            only = _only_place(body, taken, name, declared[name])
            insort(taken, (only.start, only.end))
            holes.append(Hole(only.start, only.end, "", f"{{{{{name}}}}}"))
    return fill(body, holes, {})[0]


def _is_value_or_mark(text: str, name: str, value: str) -> bool:
    """Return True if the text after `name:` is its value, or its placeholder."""
    mark = PLACEHOLDER.fullmatch(text)
    return text == value or (mark is not None and not mark[1] and field_name(mark[2]) == name)


def _line_fields(body: str, declared: Mapping[str, str]) -> tuple[dict[str, list[Hole]], list[str]]:
    """Return the values of lines and tables by name, and warnings. A name with several values is not a field."""
    code = fences(body)
    found = key_lines(body, declared) + [line for line in table_lines(body) if line.name not in declared]
    names = {line.name for line in found} | declared.keys()
    holes: dict[str, list[Hole]] = {}
    for line in found:
        marks = PLACEHOLDER.finditer(line.value)
        if not within(code, line.start) and not any(_is_mark(mark, names) for mark in marks):
            holes.setdefault(line.name, []).append(Hole(line.start, line.end, line.name))
    several: list[str] = []
    for name in list(holes):
        values = {body[hole.start : hole.end] for hole in holes[name]}
        if name in declared and values != {declared[name]}:
            value = sorted(values - {declared[name]})[0]
            raise SkillError(
                f"the front matter says {name} is {_start(declared[name])!r}, but a line of the text says {value!r}",
                "Keep one of them",
            )
        if len(values) > 1:
            several.append(repr(name))
            del holes[name]
    shown = listed(several, most=3)
    return holes, [f"no fields, as they have several values in the text: {shown}"] if several else []


def _is_mark(match: re.Match[str], names: Collection[str]) -> bool:
    """Return True if the match may be a placeholder: it has one of the names, or is a single plain word."""
    return field_name(match[2]) in names or SLUG.fullmatch(match[2]) is not None


def _placeholder(match: re.Match[str], hoisted: Collection[str]) -> Hole:
    """Return the hole of a placeholder, to fill with `[name]` if the field is hoisted, else with the value."""
    if match[1] is not None:
        return Hole(*match.span(), "", match[0][1:])
    name = field_name(match[2])
    return Hole(*match.span(), "", f"[{name}]") if name in hoisted else Hole(*match.span(), name)


def _mark_spans(body: str) -> list[Span]:
    return [match.span() for match in PLACEHOLDER.finditer(body)]


def within(spans: Sequence[Span], position: int) -> bool:
    """Return True if the position is in one of the spans, which are in order."""
    index = bisect_right(spans, position, key=lambda span: span[0]) - 1
    return index >= 0 and position < spans[index][1]


def _places(body: str, marks: Sequence[Span], value: str) -> list[Span]:
    """Return the places of the value as a whole word, outside placeholders."""
    literal = re.escape(value)  # first in the pattern, which makes the search fast
    spans = [match.span() for match in re.finditer(rf"{literal}(?<![\w-]{literal})(?![\w-])", body)]

    def touches(span: Span) -> bool:
        index = bisect_left(marks, span[1], key=lambda mark: mark[0]) - 1
        return index >= 0 and span[0] < marks[index][1]

    return [span for span in spans if not touches(span)]


def _only_place(body: str, marks: Sequence[Span], name: str, value: str) -> Hole:
    """Return the only place of a declared value as a whole word. Raises SkillError unless there is exactly one."""
    places = _places(body, marks, value)
    if len(places) != 1:
        often = f"{len(places)} times" if places else "nowhere"
        raise SkillError(
            f"field {name!r} is declared, but its value {_start(value)!r} occurs {often} in the text",
            f"Write {{{{{name}}}}} where it belongs",
        )
    return Hole(*places[0], name)


def _start(value: str) -> str:
    """Return the beginning of a long value, for a message."""
    return value if len(value) <= 80 else value[:79] + "\u2026"


def quoted(text: str) -> str:
    """Return the name of a place that is named by its text."""
    return '"{}"'.format(text.replace('"', "'"))


def is_quoted(name: str) -> bool:
    return len(name) > 2 and name[0] == name[-1] == '"'


def any_quoted(texts: Iterable[str]) -> bool:
    """Return True if one of these errata or names of fields may name a place by its text (quotations.py)."""
    return any("=>" in text or text.startswith('"') for text in texts)


def parse_values(texts: Sequence[str]) -> dict[str, str]:
    """Parse new values of fields, each `name=value` or `OLD => NEW`; the last of a name counts. Raises SkillError."""
    values = {}
    for text in texts:
        written, equals, value = text.partition("=")
        name = field_name(written)
        if arrow := ARROW.search(text, 1):
            name, value = quoted(field_name(text[: arrow.start()])), text[arrow.end() :]
        if not equals or not name:
            raise SkillError(f"{text!r} is not a field and its value", "Write NAME=VALUE")
        values[name] = clean_value(name, value)
    return values


def token_spans(text: str, token_bytes: Sequence[bytes], places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return for each place, characters [start, end) of the text, the tokens [first, last) that overlap it.

    `token_bytes`: the bytes of each token of the text, in order; a tokenizer may put one space before the text
    (SentencePiece). Raises SkillError for bytes that are not those of the text.
    """
    if not places:
        return []
    data = text.encode()
    joined = b"".join(token_bytes)
    if joined not in (data, b" " + data):
        raise SkillError("the bytes of this model's tokens are not those of the text, so its fields cannot be located")
    shift, at = len(joined) - len(data), byte_offsets(text)
    ends = list(accumulate(map(len, token_bytes)))  # of tokens, in bytes
    return [(bisect_right(ends, shift + at[start]), bisect_left(ends, shift + at[end]) + 1) for start, end in places]


def byte_offsets(text: str) -> Sequence[int]:
    """Return the UTF-8 offset of each character of a text, and of its end."""
    return range(len(text) + 1) if text.isascii() else [0, *accumulate(len(char.encode()) for char in text)]


Blocks = int | Literal["headings"]  # a number, or one for each heading

PLACES = {
    "headings": re.compile(r"^ {0,3}#{1,6}[ \t]+(?=\S)", re.M),
    "paragraphs": re.compile(r"(?<=\n)[ \t]*\n(?P<place>)(?![ \t]*\n)"),
    "lines": re.compile(r"\n(?P<place>)(?![ \t]*\n)"),
}


def check_blocks(blocks: Blocks | None) -> None:
    """Raise SkillError for an invalid number of blocks."""
    if blocks not in (None, "headings") and (type(blocks) is not int or blocks < 1):
        raise SkillError(f"a skill is compiled in 1 block or more, or in one for each heading, not in {blocks!r}")


def block_starts(text: str, token_bytes: Sequence[bytes], blocks: Blocks) -> tuple[int, ...]:
    """Return the first token of each block, beginning with 0; empty for a single block.

    `token_bytes` as for `token_spans`. A number of blocks gives parts of about equal length in tokens, divided between
    paragraphs if there are enough, else between lines; fewer parts where there are too few places. Raises SkillError
    for an invalid number, for headings where the text has none, and for tokens whose bytes are not those of the text.
    """
    check_blocks(blocks)
    if blocks == 1:
        return ()
    if blocks == "headings":
        starts = block_starts_at(text, token_bytes, _division_places(text, "headings"))
        if not starts:
            raise SkillError("there are no headings to cut it at", "Give a number of blocks instead")
        return starts
    for kind in ("paragraphs", "lines"):
        places = _tokens_at(text, token_bytes, _division_places(text, kind))
        if len(places) >= blocks - 1:
            break
    return (0, *_choose_evenly(places, len(token_bytes), blocks)) if places else ()


def block_starts_at(text: str, token_bytes: Sequence[bytes], places: Sequence[int]) -> tuple[int, ...]:
    """As `block_starts`, for blocks that begin at these characters, unless one is inside a token."""
    starts = _tokens_at(text, token_bytes, places)
    return (0, *starts) if starts else ()


def references(texts: Sequence[str], blocks_of: Mapping[str, set[int]]) -> list[str]:
    """Return warnings about blocks that name a field whose value is in another block.

    `texts`: those of the blocks; `blocks_of`: the blocks with the value of each field, counted from 0.
    """
    parts = {name: set(_words(name)) for name in blocks_of}
    warnings = []
    for number, text in enumerate(texts):
        words = set(_words(text))
        for name in blocks_of:
            if number not in blocks_of[name] and parts[name] <= words and _names(text, name):
                warnings.append(
                    f"block {number + 1} refers to {name}, whose value is in {_blocks(blocks_of[name])}: decisions may "
                    "suffer; keep them in one block"
                )
    return warnings


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _names(text: str, name: str) -> bool:
    """Return True if the text names the field, as a whole word; `ship_to` may be written `ship to`."""
    spelled = re.sub(r"[_-]", "[ _-]", re.escape(name).replace(r"\-", "-"))
    return re.search(rf"(?<![\w-]){spelled}(?![\w-])", text, re.I) is not None


def _blocks(numbers: set[int]) -> str:
    shown = [str(number + 1) for number in sorted(numbers)]
    return f"block {shown[0]}" if len(shown) == 1 else f"blocks {', '.join(shown[:-1])} and {shown[-1]}"


def _division_places(text: str, kind: str) -> list[int]:
    """Return the characters before which the text may be divided, without the first."""
    code = fences(text)
    matches = PLACES[kind].finditer(text)
    places = [match.start() if kind == "headings" else match.start("place") for match in matches]
    return [place for place in places if place and not within(code, place - 1)]


def _tokens_at(text: str, token_bytes: Sequence[bytes], places: Sequence[int]) -> list[int]:
    """Return the tokens that begin at these characters, without places inside tokens."""
    data, joined = text.encode(), b"".join(token_bytes)
    if joined not in (data, b" " + data):  # SentencePiece puts a space before the text
        raise SkillError("the bytes of this model's tokens are not those of the text, so it cannot be cut into blocks")
    shift = len(joined) - len(data)
    begins = [0, *accumulate(map(len, token_bytes))][:-1]  # of tokens, in bytes
    starts, at = [], byte_offsets(text)
    for place in places:
        byte = shift + at[place]
        token = bisect_left(begins, byte)
        if token < len(begins) and begins[token] == byte:
            starts.append(token)
    return starts


def _choose_evenly(places: Sequence[int], total: int, blocks: int) -> list[int]:
    """Choose among ascending places, from the left, those that divide `total` tokens most evenly."""
    cuts = min(blocks - 1, len(places))
    chosen: list[int] = []
    low = 0
    for number in range(1, cuts + 1):
        high = len(places) - (cuts - number)  # leaves a place for each further cut
        target = total * number / (cuts + 1)
        low = min(range(low, high), key=lambda index: abs(places[index] - target)) + 1
        chosen.append(places[low - 1])
    return chosen

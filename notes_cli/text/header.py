"""Front matter: the name, the description and the fields that the file of a skill gives before its text.

It is YAML between two lines of ---. Much of what people write there is no valid YAML, and agents read it all the same:
`description: Plans trips: ferries and buses.` Then `name`, `description` and `fields` are read line by line, with a
warning that has the line. What would have to be guessed is refused: front matter without an end, and fields that cannot
be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import dedent
from typing import Any, NamedTuple

from notes_cli.errors import SkillError
from notes_cli.text import names
from notes_cli.text.fields import clean_value, fences, within
from notes_cli.text.keys import FIELD_NAME, field_name, is_name

MAX_HEADER = 64 << 10  # characters of front matter, because reading YAML is slow
MAX_FIELDS = 1000  # declared in the front matter: each is searched for in the text
MAX_VALUE = 1000  # characters of one of them
BLANK = re.compile(r"[ \t\n\ufeff]*")
LATER = re.compile(r"^---[ \t]*\n(?:[\w-]+:.*\n){0,3}(?:name|description):[ \t]", re.M)
MAX_BEFORE = 2000  # characters: what is further down is no front matter that came too late
OPENS = re.compile(r"---[ \t]*\n")  # a text that begins so has front matter, or a rule as its first line
# The line that ends it: of dashes or of dots, also if the text begins on it (---# Title).
CLOSES = re.compile(r"^(?:---+[ \t]*(?:\n|\Z)|---(?=[ \t]*[^\s-])|\.\.\.[ \t]*(?:\n|\Z))", re.M)
KEY = re.compile(r"^[\"']?(?P<key>\w[\w .-]{0,63}?)[\"']?[ \t]*[:\uff1a](?P<rest>.*)$", re.M)
TOP_KEY = re.compile(r"[\"']?(?P<key>[A-Za-z_][\w-]{0,63})[\"']?[ \t]*(?::(?=[ \t]|$)|\uff1a)[ \t]*(?P<rest>.*)")
WIDE = re.compile(r"^(?:name|description|fields)[ \t]*\uff1a", re.M)  # for YAML it is part of the key
BLOCK = re.compile(r"[|>][-+\d]*[ \t]*(?:#.*)?")
READ = ("name", "description", "fields")


class Header(NamedTuple):
    """The values of front matter, and the text after it. Without front matter all is empty but the text."""

    name: str = ""
    description: str = ""
    fields: Mapping[str, str] = {}  # the declared values by name
    hoisted: Sequence[str] = ()  # the names of those that go to the end of the text
    body: str = ""
    warnings: Sequence[str] = ()


class _Place(NamedTuple):
    """Where front matter is: its YAML in characters [start, end), the text from `body` on."""

    start: int
    end: int
    body: int


def read_header(text: str, where: str) -> Header:
    """The front matter of a text, whose lines end with \\n. `where`: what messages call the text.

    Raise SkillError for front matter that is not closed or too long, and for fields that cannot be read.
    """
    first = _begin(text)
    opening = OPENS.match(text, first)
    if not opening:
        later = LATER.search(text, 0, MAX_BEFORE)
        line = text.count("\n", 0, later.start()) + 1 if later else 0
        warning = f"{where}: line {line} looks like front matter, which has to come first: it is compiled as text"
        return Header(body=text, warnings=[warning] if later and not within(fences(text), later.start()) else [])
    place = find_header(text)
    if place is None:
        line = text.count("\n", 0, first) + 1
        inside = text[opening.end() :].lstrip().split("\n", 1)[0]
        if KEY.match(inside) and not CLOSES.search(text, opening.end()):
            raise SkillError(f"{where}: the front matter that line {line} opens is not closed", "Add a line ---")
        warning = f"{where}: line {line} is ---, and no `key: value` lines follow: all of it is compiled as text"
        return Header(body=text, warnings=[warning])
    if place.end - place.start > MAX_HEADER:
        raise SkillError(f"{where}: the front matter is longer than {MAX_HEADER >> 10} KiB", "Move text below it")
    warnings = []
    if "<!--" in text[:first]:
        warnings.append(f"{where}: the comment before the front matter is not compiled")
    if "\ufffd" in text[place.start : place.end]:
        warnings.append(f"{where}: the front matter has bytes that are not UTF-8")
    # The lines before it count in line numbers.
    header, problem = _parse("\n" * text.count("\n", 0, place.start) + text[place.start : place.end], where)
    if problem:
        warnings.append(f"{where}: the front matter is not valid YAML: {problem}. It is read line by line instead")
    try:
        fields, hoisted = declared(header)
    except SkillError as error:
        raise SkillError(f"{where}: {error.what}", error.remedy) from None
    description = " ".join(header.get("description", "").split())
    if not description:
        warnings.append(f"{where}: no description in the front matter")
    return Header(header.get("name", "").strip(), description, fields, hoisted, text[place.body :], warnings)


def find_header(text: str) -> _Place | None:
    """Where a text has its front matter, after blank lines and comments; None without one that is closed, or without a
    `key: value` line in it."""
    opened = OPENS.match(text, _begin(text))
    closed = opened and CLOSES.search(text, opened.end())
    if not opened or not closed:
        return None
    inner = text[opened.end() : closed.start()]
    if dedent(inner).strip() and not KEY.search(dedent(inner)):
        return None
    return _Place(opened.end(), closed.start(), closed.end())


def _begin(text: str) -> int:
    """The first character of a text that is no white space, no byte order mark and in no comment."""
    first = 0
    while True:
        first = BLANK.match(text, first).end()  # type: ignore[union-attr]
        end = text.find("-->", first) if text.startswith("<!--", first) else -1
        if end < 0:
            return first
        first = end + 3


def _parse(yaml: str, where: str) -> tuple[dict[str, Any], str]:
    """The values of the keys that are read, and the errors of the YAML. All scalars stay as they
    are written: a date is a text, and 012 is 012."""
    from notes_cli.documents import parse_yaml  # needed where a text is read, not where it is spliced

    wide = WIDE.search(yaml)
    if wide:
        line = yaml.count("\n", 0, wide.start()) + 1
        return _by_line(yaml, where), f"line {line}, column {len(wide[0])}: a full-width colon"
    try:
        header = parse_yaml(yaml)
    except ValueError as error:
        return _by_line(yaml, where), str(error)
    if header in (None, ""):
        return {}, ""
    if not isinstance(header, dict):
        return _by_line(yaml, where), "it does not consist of `key: value` lines"
    unread = [key for key in ("name", "description") if not isinstance(header.get(key, ""), str)]
    if unread:
        lines = _by_line(yaml, where)
        return header | {key: lines.get(key, "") for key in unread}, f"{unread[0]} is no text"
    return header, ""


def _by_line(yaml: str, where: str) -> dict[str, Any]:
    """The keys that are read, from front matter that YAML refuses. Of a key that is there twice the last one counts."""
    lines = dedent(yaml.expandtabs()).split("\n")
    keys = [(number, match) for number, line in enumerate(lines) if (match := TOP_KEY.fullmatch(line))]
    ends = [*(number for number, _ in keys[1:]), len(lines)]
    found: dict[str, Any] = {}
    for (number, match), following in zip(keys, ends, strict=False):  # without a key there is an end all the same
        rest = lines[number + 1 : following]
        if match["key"] == "fields":
            found["fields"] = _fields_by_line([match["rest"], *rest], number + 1, where)
        elif match["key"] in READ:
            found[match["key"]] = _text_of(match["rest"], rest)
    if not names.name_of(found.get("name", "")):
        found["name"] = ""  # brackets without a letter: that of the folder is better
    return found


def _text_of(first: str, rest: Sequence[str]) -> str:
    """A text as it is written: plain, quoted or as a block, over several lines."""
    text = " ".join([*([] if BLOCK.fullmatch(first) else [first]), *rest]).strip()
    if text[:1] in ("'", '"'):
        mark, text = text[0], text[1:]
        text = text.removesuffix(mark).replace("\\" + mark, mark)
    return text


def _fields_by_line(lines: Sequence[str], number: int, where: str) -> Any:
    """The fields that these lines declare, the first of which is line `number` of the file. Raise SkillError for one
    that is none."""
    from notes_cli.documents import parse_yaml

    try:
        return parse_yaml("\n".join(["fields: " + lines[0], *lines[1:]]))["fields"]
    except ValueError as error:
        if lines[0].strip():
            raise SkillError(f"{where}: line {number}: fields in the front matter: {error}") from error
    found: dict[str, Any] = {}
    for offset, line in enumerate(dedent("\n".join(["", *lines[1:]])).split("\n")):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = KEY.fullmatch(line)
        if not match or match["key"] in found or not match["rest"].strip():
            problem = "is there already" if match and match["key"] in found else "is no `name: value`"
            raise SkillError(f"{where}: line {number + offset}, under fields: {line.strip()[:80]!r} {problem}")
        try:
            found[match["key"]] = parse_yaml(f"value: {match['rest']}")["value"]
        except ValueError:
            found[match["key"]] = _text_of(match["rest"].strip(), ())
    return found


def declared(header: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The values under `fields:` in the front matter, and the names of the hoisted fields. Raise SkillError."""
    given = header.get("fields", "")
    if given == "":
        return {}, []
    if not isinstance(given, dict):
        raise SkillError("fields in the front matter must be `name: value` lines")
    if len(given) > MAX_FIELDS:
        raise SkillError(f"the front matter declares more than {MAX_FIELDS:,} fields")
    values: dict[str, str] = {}
    hoisted: list[str] = []
    for name, value in given.items():
        name = field_name(name)
        if not FIELD_NAME.fullmatch(name) and not is_name(name):
            raise SkillError(
                f"field name {name[:80]!r} must be a word of letters, digits, _ and -, or a few such words"
            )
        if name in values:
            raise SkillError(f"field {name!r} is in the front matter twice", "Keep one of them")
        if isinstance(value, dict):
            value, hoist = _mapping(name, value)
            hoisted += [name] if hoist else []
        if not isinstance(value, str):
            raise SkillError(f"the value of field {name!r} must be text or a number")
        values[name] = clean_value(name, value)
        if len(values[name]) > MAX_VALUE:
            raise SkillError(f"the value of field {name!r} is longer than {MAX_VALUE:,} characters")
    return values, hoisted


def _mapping(name: str, given: dict[str, Any]) -> tuple[Any, bool]:
    """The value and `hoist` of a field that is written as `{value: ..., hoist: true}`."""
    for key in given:
        if key not in ("value", "hoist"):
            raise SkillError(f"field {name!r} has an unknown key {key!r} in the front matter", "Known: value, hoist")
    hoist = given.get("hoist", "false")
    if hoist not in ("true", "false"):
        raise SkillError(f"hoist of field {name!r} must be true or false, not {hoist!r}")
    if "value" not in given:
        raise SkillError(f"field {name!r} has no value in the front matter", f"Write {{value: ..., hoist: {hoist}}}")
    return given["value"], hoist == "true"

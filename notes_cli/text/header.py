"""Parses the front matter of a skill: name, description and fields, as YAML between two lines of ---.

Much front matter is invalid YAML and accepted by agents all the same: `description: Plans trips: ferries and buses.`
Then `name`, `description` and `fields` are read line by line, with a warning that has the line. Front matter without an
end, and fields that cannot be read, are refused instead of guessed.
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

MAX_HEADER = 64 << 10  # characters of front matter: PyYAML is slow
MAX_FIELDS = 1000  # declared ones, each searched for in the text
MAX_VALUE = 1000  # characters of one of them
BLANK = re.compile(r"[ \t\n\ufeff]*")
LATER = re.compile(r"^---[ \t]*\n(?:[\w-]+:.*\n){0,3}(?:name|description):[ \t]", re.M)
MAX_BEFORE = 2000  # characters: further down it is not mistaken front matter
OPENS = re.compile(r"---[ \t]*\n")  # opens front matter, or is a rule in the first line
# The closing line, of dashes or dots; the text may begin on it (---# Title).
CLOSES = re.compile(r"^(?:---+[ \t]*(?:\n|\Z)|---(?=[ \t]*[^\s-])|\.\.\.[ \t]*(?:\n|\Z))", re.M)
KEY = re.compile(r"^[\"']?(?P<key>\w[\w .-]{0,63}?)[\"']?[ \t]*[:\uff1a](?P<rest>.*)$", re.M)
TOP_KEY = re.compile(r"[\"']?(?P<key>[A-Za-z_][\w-]{0,63})[\"']?[ \t]*(?::(?=[ \t]|$)|\uff1a)[ \t]*(?P<rest>.*)")
WIDE = re.compile(r"^(?:name|description|fields)[ \t]*\uff1a", re.M)  # to YAML it is part of the key
BLOCK = re.compile(r"[|>][-+\d]*[ \t]*(?:#.*)?")
READ = ("name", "description", "fields")


class Header(NamedTuple):
    """Values of front matter, and the text after it. Without front matter only the text is set."""

    name: str = ""
    description: str = ""
    fields: Mapping[str, str] = {}  # declared values by name
    hoisted: Sequence[str] = ()  # names of those to move to the end of the text
    body: str = ""
    warnings: Sequence[str] = ()


class _Place(NamedTuple):
    """Place of front matter: its YAML in characters [start, end), the text from `body` on."""

    start: int
    end: int
    body: int


def read_header(text: str, where: str) -> Header:
    """Read the front matter of a text, whose lines end with \\n. `where`: name of the text in messages.

    Raises SkillError for front matter that is not closed or too long, and for fields that cannot be read.
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
    # Empty lines before it keep the line numbers.
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
    """Return the place of the front matter, after blank lines and comments; None without a closed one that has a `key:
    value` line."""
    opened = OPENS.match(text, _begin(text))
    closed = opened and CLOSES.search(text, opened.end())
    if not opened or not closed:
        return None
    inner = text[opened.end() : closed.start()]
    if dedent(inner).strip() and not KEY.search(dedent(inner)):
        return None
    return _Place(opened.end(), closed.start(), closed.end())


def _begin(text: str) -> int:
    """Return the first character that is no white space, byte order mark or comment."""
    first = 0
    while True:
        first = BLANK.match(text, first).end()  # type: ignore[union-attr]
        end = text.find("-->", first) if text.startswith("<!--", first) else -1
        if end < 0:
            return first
        first = end + 3


def _parse(yaml: str, where: str) -> tuple[dict[str, Any], str]:
    """Return the values of the keys in use, and the error of the YAML. All scalars stay text."""
    from notes_cli.documents import parse_yaml  # not needed to splice

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
    """Read the keys in use from front matter that YAML refuses. Of a duplicate key the last one counts."""
    lines = dedent(yaml.expandtabs()).split("\n")
    keys = [(number, match) for number, line in enumerate(lines) if (match := TOP_KEY.fullmatch(line))]
    ends = [*(number for number, _ in keys[1:]), len(lines)]
    values: dict[str, Any] = {}
    for (number, match), following in zip(keys, ends, strict=False):  # without keys `ends` has one entry more
        rest = lines[number + 1 : following]
        if match["key"] == "fields":
            values["fields"] = _fields_by_line([match["rest"], *rest], number + 1, where)
        elif match["key"] in READ:
            values[match["key"]] = _text_of(match["rest"], rest)
    if not names.name_of(values.get("name", "")):
        values["name"] = ""  # only brackets, without a letter: the folder's name is better
    return values


def _text_of(first: str, rest: Sequence[str]) -> str:
    """Return a text that is written plain, quoted or as a block, over several lines."""
    text = " ".join([*([] if BLOCK.fullmatch(first) else [first]), *rest]).strip()
    if text[:1] in ("'", '"'):
        mark, text = text[0], text[1:]
        text = text.removesuffix(mark).replace("\\" + mark, mark)
    return text


def _fields_by_line(lines: Sequence[str], number: int, where: str) -> Any:
    """Read the fields that these lines declare, the first of which is line `number` of the file. Raises SkillError for
    an invalid one."""
    from notes_cli.documents import parse_yaml

    try:
        return parse_yaml("\n".join(["fields: " + lines[0], *lines[1:]]))["fields"]
    except ValueError as error:
        if lines[0].strip():
            raise SkillError(f"{where}: line {number}: fields in the front matter: {error}") from error
    values: dict[str, Any] = {}
    for offset, line in enumerate(dedent("\n".join(["", *lines[1:]])).split("\n")):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = KEY.fullmatch(line)
        if not match or match["key"] in values or not match["rest"].strip():
            problem = "is there already" if match and match["key"] in values else "is no `name: value`"
            raise SkillError(f"{where}: line {number + offset}, under fields: {line.strip()[:80]!r} {problem}")
        try:
            values[match["key"]] = parse_yaml(f"value: {match['rest']}")["value"]
        except ValueError:
            values[match["key"]] = _text_of(match["rest"].strip(), ())
    return values


def declared(header: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the values under `fields:` in the front matter, and the names of hoisted fields. Raises SkillError."""
    entries = header.get("fields", "")
    if entries == "":
        return {}, []
    if not isinstance(entries, dict):
        raise SkillError("fields in the front matter must be `name: value` lines")
    if len(entries) > MAX_FIELDS:
        raise SkillError(f"the front matter declares more than {MAX_FIELDS:,} fields")
    values: dict[str, str] = {}
    hoisted: list[str] = []
    for name, value in entries.items():
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


def _mapping(name: str, entry: dict[str, Any]) -> tuple[Any, bool]:
    """Return the value and `hoist` of a field that is written as `{value: ..., hoist: true}`."""
    for key in entry:
        if key not in ("value", "hoist"):
            raise SkillError(f"field {name!r} has an unknown key {key!r} in the front matter", "Known: value, hoist")
    hoist = entry.get("hoist", "false")
    if hoist not in ("true", "false"):
        raise SkillError(f"hoist of field {name!r} must be true or false, not {hoist!r}")
    if "value" not in entry:
        raise SkillError(f"field {name!r} has no value in the front matter", f"Write {{value: ..., hoist: {hoist}}}")
    return entry["value"], hoist == "true"

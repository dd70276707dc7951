"""Defines which lines and tables of a text give a field a value.

A line `Key: value`, alone or as an item of a list, gives the field Key a value if the key reads as a name and the value
as data (`is_value`); a key of several words must also be set apart from prose. In a table of two columns the first cell
is the name: `| Basic | 5 EUR |`, or `Days late 1-7` if the cell is a number, after the title of its column. The second
is a value if it is an amount or an address, or any data if the title says so (`Default`, `Owner`: prompts/keys.yaml).
In a list of records, `- name: Desk lamp` and `state: off` below it, the field is `Desk lamp state`.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from notes_cli.config import resource

# Line breaks of str.splitlines. Lines end at \n only; names and values contain none of these.
BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"

FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

MAX_VALUE = 80  # characters
MAX_ADDRESS = 200  # characters of a value that is an address, or of a declared field
MAX_WORDS = 4  # words of a name
MAX_AMOUNT = 6  # words of an amount
MAX_UNCASED = 10  # characters of a word in a script without capitals, which may have no spaces

# A key, a colon with a space after it (so no URL and no time of day) or that of Chinese and Japanese (FF1A), a value.
# Lines with four spaces are Markdown code, but for items within others.
KEY_LINE = re.compile(
    r"^(?: {0,3}| {4,12}(?=[-*+] ))(?P<item>[-*+] )?"
    r"(?P<bold>\*\*)?(?P<key>[^\s:\uff1a=*][^" + BREAKS + r":\uff1a=*]{0,63})"
    r"(?(bold)(?:\*\*[ \t]?(?::[ \t]|\uff1a)|(?::|\uff1a)\*\*(?:[ \t]|(?<=\uff1a\*\*)))|(?::[ \t]|\uff1a))[ \t]*"
    rf"(?P<value>[^\s:\uff1a](?:[^{BREAKS}]{{0,{MAX_ADDRESS - 2}}}[^\s.!?:;,])?)(?P<stop>[.\u3002])?[ \t]*$",
    re.M,
)
APART = re.compile(r"\s*(?:#{1,6} .*|-{3,}|\*{3,})?")  # lines that may be next to a key: empty, a heading, a rule
ITEM = re.compile(r" {0,12}(?:[-*+]|\d+[.)]) ")

# A value is a constant, or has no PROSE, and an amount (NUMBER) or few words (WORD).
COMMENT = re.compile(r"[ \t]*[(\uff08][^()\uff08\uff09]*[)\uff09]$")  # after a value: `30 seconds (default)`
WORD = re.compile(r"[\w.@&'\u2019/+~#%$-]*\w[\w.@&'\u2019/+~#%$-]*")
WRAPPED = re.compile(r"(?P<mark>`|\*\*|\*|\"|')(?P<inner>[^`*\"]+)(?P=mark)|<(?P<link>[^<>\s]+)>")
ADDRESS = re.compile(r"<?https?://[^<>\s\uff08\uff09]+>?")
CODE = re.compile(r"`[^`\s]+`")
# A digit, after a word, a month, a currency or signs at most: no part of a name as in AC-3, 2b-writer, 03-write-log.
AMOUNT = re.compile(
    r"(?:(?:(?i:up to|at (?:least|most)|max(?:imum|\.)?|min(?:imum|\.)?|about|over|under|within|every|after)|[A-Z]{3}"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*)[ \t]|\u6700[\u5927\u591a])?"
    r"(?:(?:[^\w\s/`|({\[\uff08]|[A-Z]{1,3}(?=\$))[ \t]?){0,3}"
    r"v?\d(?!\d*[A-Za-z]\w*-[A-Za-z]|\d*(?:-[A-Za-z]\w*){2})"
)
NUMBER = re.compile(r"[-+~<>=\u2264\u2265\u2248\u00b1]{0,2}[ \t]?\d")
# Excluded from values other than constants: punctuation of sentences, code and templates, and arrows.
PROSE = re.compile(
    r"[|\[\]{}\"\u201c\u201d\u2192\u3002\uff01\uff1f\uff1b\uff0c\u3001`*]|->|(?<![<>])=|[<>](?![=\s]*\d)|[.!?;:]\s|//"
    r"|,\s(?!\d|[<>~\u2264\u2265\u20ac]+\s?\d|[A-Z]{0,3}\$\d)|\s[-\u2013\u2014]\s(?!\d)"
)
EXAMPLE = re.compile(r"e\.g\.|\u2192|->")  # in a comment, too
# Before a name; the full stop ends no sentence: Dr. Farida Nasser, J. R. Miller, St. Gallen.
TITLE = re.compile(r"(?<!\S)(?:Dra?|Prof|Mrs?|Ms|Sra?|Hr|Fr|Herr|Frau|Mme|M|Ing|Dipl|St|Co|[A-Z])\.[ \t]+(?=\S)")
SMALL = frozenset(["+", "&", "to", "of", "and", "the", "for", "only", "de", "la", "von", "van", "und", "bis"])

# Tables.
NUMBERED = re.compile(r"(?<=\w)\.(?=\d)|\+$")  # in names of rows: GPT-4.1, Days late 8+
RULE = re.compile(r" {0,3}\|[ \t]*:?-+:?[ \t]*\|[ \t]*:?-+:?[ \t]*\|[ \t]*")
CELL = r"[ \t]*((?:[^|\\`\n]|\\.|`[^`\n]*`|[\\`])*)\|"  # an escaped | or one in code is part of a cell
ROW = re.compile(rf" {{0,3}}\|{CELL}{CELL}[ \t]*")


class KeyLine(NamedTuple):
    """A line or row [first, last) that gives a field a value, in characters [start, end) of the text."""

    name: str
    value: str
    start: int
    end: int
    first: int
    last: int


def field_name(text: str) -> str:
    """Return a name in the form used for comparison: single spaces, in NFC."""
    return unicodedata.normalize("NFC", " ".join(text.split()))


def is_name(text: str) -> bool:
    """Return True if a text can name a field: up to 64 letters, digits and joining characters, a letter first."""
    return (
        0 < len(text) <= 64
        and text == field_name(text)
        and unicodedata.category(text[0])[0] == "L"
        and all(unicodedata.category(char)[0] in "LMN" or char in " _-'\u2019&/()\uff08\uff09%" for char in text)
    )


def key_lines(text: str, declared: Mapping[str, str]) -> list[KeyLine]:
    """Return the lines that give a field a value, and those whose key is declared, in order. Includes fenced code."""
    shaped = {match.start(): match for match in KEY_LINE.finditer(text)}
    data = {first for first, match in shaped.items() if is_value(match["value"]) and _reads_as_name(match)}
    result, lines = list[KeyLine](), list(_lines(text)) if shaped else []
    records = _record_names([shaped.get(first) for first, _ in lines])
    for number, (first, line) in enumerate(lines):
        match = shaped.get(first)
        key = name = field_name(match["key"].strip("`")) if match else ""
        if not match or (first not in data and name not in declared):
            continue
        if name not in declared and not (name := records.get(first, name)):
            continue
        neighbours = [lines[neighbour] for neighbour in (number - 1, number + 1) if 0 <= neighbour < len(lines)]
        isolated = all(
            start in shaped
            or APART.fullmatch(neighbour)
            or (ITEM.match(neighbour) and (match["bold"] or ITEM.match(line)))
            for start, neighbour in neighbours
        )
        adjacent = any(start in data for start, _ in neighbours)
        # One word of ASCII may be among lines of prose.
        if FIELD_NAME.fullmatch(key) or name in declared or (isolated and (adjacent or _is_alone(match))):
            value = match["value"] if declared.get(name) == match["value"] else _inner(match["value"])
            start = match.start("value") + match["value"].index(value)
            result.append(KeyLine(name, value, start, start + len(value), *match.span()))
    return result


def _record_names(lines: Sequence[re.Match[str] | None]) -> dict[int, str]:
    """Return the names of fields in records by the first character of their lines; empty for a line with the name of
    the record. `lines`: of a text, those of the form `key: value`. A record is an item with further lines below it;
    there are several with the same first key."""
    records, last = list[list[re.Match[str]]](), None
    for line in lines:
        if line and line["item"]:
            records.append([line])
        elif line and last and line.start("key") - line.start() >= records[-1][0].start("key") - records[-1][0].start():
            records[-1].append(line)
        else:
            line = None
        last = line
    records = [record for record in records if len(record) > 1]
    count = Counter(record[0]["key"] for record in records)
    names = dict[int, str]()
    for record in records:
        title = next((line for line in record if line["key"].casefold() in ("name", "title")), record[0])
        for line in record if count[record[0]["key"]] > 1 else ():
            name = field_name(f"{_inner(title['value'])} {line['key'].strip('`')}")
            names |= {line.start(): "" if line is title else name} if is_name(name) else {}
    return names


def table_lines(text: str) -> list[KeyLine]:
    """Return the values in rows of tables of two columns, in order. Includes fenced code."""
    found = list[KeyLine]()
    header: re.Match[str] | None = None  # of the current table
    previous: re.Match[str] | None = None
    for first, line in _lines(text):
        row = ROW.fullmatch(line)
        if header and row and (name := _row_name(header, row)) and _is_cell_value(row[2].strip(), header):
            value = _inner(row[2].strip())
            start = first + row.start(2) + row[2].index(value)
            found.append(KeyLine(name, value, start, start + len(value), first, first + len(line)))
        header = (header if row else None) or (previous if RULE.fullmatch(line) else None)
        previous = row
    return found


def _row_name(header: re.Match[str], row: re.Match[str]) -> str:
    """Return the name of a row; empty if its first cell is none."""
    name = row[1].strip("`*_ \t").lstrip("-")
    name = field_name(f"{header[1].strip('`*_ ')} {name}" if name[:1].isdigit() else name)
    words = name.casefold().split()
    usable = is_name(NUMBERED.sub("", name)) and _is_short(words) and not _words("verbs").intersection(words)
    return name if usable else ""


def _is_cell_value(cell: str, header: re.Match[str]) -> bool:
    """Return True if a cell is a value, by the title of its column."""
    title = {word.casefold() for word in re.findall(r"\w+", header[2])}
    return _is_evident(cell) or (bool(title & _words("columns")) and is_value(cell))


def is_value(text: str) -> bool:
    """Return True if a text is data instead of prose: an amount or a date (short, with a number after two words at
    most), an address, code without blanks, a word, or a name of up to three words."""
    plain = COMMENT.sub("", text)
    if EXAMPLE.search(text):
        return False
    if ADDRESS.fullmatch(plain) or (CODE.fullmatch(plain) and len(text) <= MAX_VALUE):
        return True
    core = TITLE.sub("", _inner(plain))
    if len(text) > MAX_VALUE or PROSE.search(core) or _words("prose").intersection(core.casefold().split()):
        return False
    if number := NUMBER.search(core):
        return _length(core[: number.start()]) < 3 and _length(core) <= MAX_AMOUNT
    words = core.split()
    return (
        0 < _length(core) <= (3 if _has_case(core) else 2)
        and all(word in SMALL or WORD.fullmatch(word) for word in words)
        and (len(words) == 1 or all(word in SMALL or not word[0].islower() for word in words))
    )


def _length(text: str) -> float:
    """Return the words of a text; two characters of a script without capitals count as one."""
    uncased = sum(char.isalpha() and not _has_case(char) for char in text)
    return uncased / 2 + sum(_has_case(word) or any(char.isdigit() for char in word) for word in text.split())


def _is_evident(text: str) -> bool:
    """Return True if a text is an address, or an amount, a date or a version: a value that begins with a digit, but for
    a sign or a currency."""
    return bool(ADDRESS.fullmatch(text)) or (AMOUNT.match(_inner(text)) is not None and is_value(text))


def _is_short(words: Sequence[str]) -> bool:
    """Return True if a name has few enough words, and none is a sentence in a script without spaces."""
    return len(words) <= MAX_WORDS and all(len(word) <= MAX_UNCASED for word in words if not _has_case(word))


def _inner(value: str) -> str:
    """Return a value without the marks around it: `x`, **x**, "x", <https://x>."""
    match = WRAPPED.fullmatch(value)
    return (match["inner"] or match["link"]).strip() if match else value


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line of a text with its first character."""
    first = 0
    for line in text.split("\n"):
        yield first, line
        first += len(line) + 1


def _reads_as_name(match: re.Match[str]) -> bool:
    """Return True if the text before a value names a field: it is no sentence, step or note. After code or a
    heading, and before a full stop, words are no data."""
    key, value = field_name(match["key"].strip("`")), match["value"]
    words = key.split(" ")
    plain = [word.strip("()'\u2019").casefold() for word in words]
    certain = _is_evident(value) or CODE.match(value)
    if not is_name(key) or not _is_short(words) or _words("verbs").intersection(plain):
        return False
    if not certain and (match["stop"] or match["key"].startswith("`") or key.casefold() in _words("headings")):
        return False
    order = plain[0] in _words("orders") and not (len(words) == 2 and plain[1] in _words("ends"))
    if len(words) > 1 and (key[0].islower() or order):  # Use good ropes: 3 of them
        return False
    if len(words) > 1 and not certain and (plain[-1] in _words("leads") or plain[-1].isnumeric()):  # Step 2: Berth
        return False
    return len(key) == 1 or plain[0] not in _words("leads")


@cache
def _words(kind: str) -> frozenset[str]:
    """Return the words of one kind in prompts/keys.yaml, which describes the kinds."""
    from notes_cli.documents import read_yaml  # not needed to splice

    table = read_yaml(resource("prompts") / "keys.yaml")
    return frozenset(word for words in table[kind].values() for word in words.split())


def _is_alone(match: re.Match[str]) -> bool:
    """Return True if a line counts without a neighbour of its kind: the key is in bold or one word of a script that has
    capitals, or the value has a digit or a title, or is a constant."""
    key, value = match["key"], match["value"]
    evident = any(char.isdigit() for char in value) or any(form.match(value) for form in (ADDRESS, CODE, TITLE))
    return bool(match["bold"] or (" " not in key and _has_case(key)) or evident)


def _has_case(word: str) -> bool:
    return word.lower() != word.upper()


def listed(names: Sequence[str], most: int = 12) -> str:
    """Join names for a message of one line; `none` if empty."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more

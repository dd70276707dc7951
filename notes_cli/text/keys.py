"""Defines which lines and tables of a text give a field a value.

In a table, the first cell names the row: `| Basic | 5 EUR |` gives the field Basic the value 5 EUR. A number does so
with the title of its column: `Days late 1-7`. Another cell is a value if it is an amount, a date, a version or a URL.
Unless the rows are cases of what to do (`Problem`) or the column is about them (`Command`), it also is one if it is
code without blanks or a rating (`low`); in a column of values (`Default`, `Owner`: prompts/keys.yaml) if it reads as
data at all. If several columns of a table have values, each of them names its fields, too: `Basic Price`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from notes_cli.config import resource

# Line breaks of str.splitlines. Lines end at \n only; names and values contain none of these.
BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"

FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

MAX_VALUE = 80  # characters
MAX_ADDRESS = 200  # characters of a value that is an address, or of a declared field

# The start of a line: of a quotation, or of an item, which may be within another one. Other lines with four spaces are
# Markdown code.
START = r"^(?: {0,3}(?:> ?)?| {4,12}(?=[-*+] ))(?:[-*+] )?"
# A key, a colon with a space after it (so no URL and no time of day) or that of Chinese and Japanese (FF1A), a value.
KEY_LINE = re.compile(
    rf"{START}(?P<bold>\*\*)?(?P<italic>_)?(?P<key>[^\s:\uff1a=*][^" + BREAKS + r":\uff1a=*]{0,63})"
    r"(?(bold)(?:\*\*[ \t]?(?::[ \t]|\uff1a)|(?::|\uff1a)\*\*(?:[ \t]|(?<=\uff1a\*\*)))|(?::[ \t]|\uff1a))[ \t]*"
    rf"(?P<value>[^\s:\uff1a](?:[^{BREAKS}]{{0,{MAX_ADDRESS - 2}}}[^\s.!?:;,])?)"
    r"(?P<stop>[.\u3002])?(?(italic)_)[ \t]*$",
    re.M,
)
# A setting in code or bold: `timeout = 30`, **region = `north`** - where to land.
SETTING_LINE = re.compile(
    rf"{START}(?:(?P<bold>\*\*)|`)(?P<key>[A-Za-z][A-Za-z0-9_-]{{0,63}})(?:[ \t]?=|:[ \t])[ \t]?"
    rf"(?P<value>[^\s`*=](?:[^`*{BREAKS}]{{0,{MAX_VALUE - 2}}}[^\s`*.!?:;,])?|`[^\s`]+`)(?(bold)\*\*|`)(?P<stop>(?!))?"
    rf"[ \t]*(?:[\u2013\u2014-][ \t].*)?$",
    re.M,
)
# A default in parentheses: `--limit` (number, default: 50): how many to show.
OPEN, CLOSE = r"(\uff08", r")\uff09"
DEFAULT_LINE = re.compile(
    rf"{START}(?P<bold>\*\*)?(?P<key>[^\s:\uff1a=*{OPEN}{CLOSE}][^{BREAKS}:\uff1a=*{OPEN}{CLOSE}]{{0,63}}?)(?:\*\*)?"
    rf"[ \t]*[{OPEN}](?:[^{OPEN}{CLOSE}\n]{{1,40}}[,;\uff0c\uff1b][ \t]*)?"
    r"(?:[Dd]efaults?(?: to)?|\u9ed8\u8ba4\u503c?(?!\u503c))[:\uff1a=]?[ \t]*"
    rf"(?P<value>[^\s:\uff1a=,;\uff0c{OPEN}{CLOSE}](?:[^{BREAKS},;\uff0c{OPEN}{CLOSE}]{{0,39}}(?<!\s))?)[{CLOSE}]"
    r"(?P<stop>(?!))?(?![^\s:.\uff1a*])",
    re.M,
)
# An address or a short amount after a dash or =: `- Guide - https://x`.
DASH_LINE = re.compile(
    rf"{START}(?P<bold>\*\*)?(?P<key>[^\s*][^{BREAKS}*]{{0,63}}?)(?(bold)\*\*)[ \t]+[-=\u2013\u2014][ \t]+"
    rf"(?P<value>[^\s][^{BREAKS}]{{0,{MAX_ADDRESS}}}?)(?P<stop>[.\u3002])?[ \t]*$",
    re.M,
)
DASH = re.compile(r"[ \t]+[-\u2013\u2014][ \t]+")  # before a description: Basic - for small shops
# After an amount: 5 per day, if free; 20 minutes for every boat of the line.
CLAUSE = re.compile(r"[ \t](?=for )|[;.](?=\s)|[\uff1b\u3002]|,(?=\s\D*$)|\uff0c(?=\D*$)")
JOINED = re.compile(r"(?<=\w)[.:](?=[\w)])|[,+#]")  # in names of rows: gpt:4.large, C++, Oslo, Bergen
VERSION = re.compile(r"(?<=\w)\.(?=\d|js\b)")  # a dot within a name: GPT-4.1, Node.js
APART = re.compile(r"\s*(?:#{1,6} .*|-{3,}|\*{3,})?")  # lines that may be next to a key: empty, a heading, a rule
# Before a value in code: Map: use `small`.
USE = re.compile(r"(?:[Uu]se|[Dd]efaults?(?: to)?|\u9ed8\u8ba4)[ \t]+(?=`[^`]+`$)")
ITEM = re.compile(r" {0,12}(?:[-*+]|\d+[.)]) ")
MAX_WORDS = 4  # words of a name
MAX_AMOUNT = 6  # words of an amount
MAX_TITLE = 8  # words of a name before an address
MAX_ROW = 6  # words of the name of a row
MAX_UNCASED = 10  # characters of a word in a script without capitals, which may have no spaces

# A value is one constant or several (CONSTANTS), or has no PROSE, and an amount (NUMBER) or few words (WORD).
COMMENT = re.compile(r"[ \t]*[(\uff08][^()\uff08\uff09]*[)\uff09]$")  # after a value: `30 seconds (default)`
ASIDE = re.compile(r"\([^()]*\)")  # within a value: `3m (10 ft) to 9m (30 ft)`
WORD = re.compile(r"[\w.@&'\u2019/+~#%$-]*\w[\w.@&'\u2019/+~#%$-]*")
WRAPPED = re.compile(r"(?P<mark>`|\*\*|\*|\"|')(?P<inner>[^`*\"]+)(?P=mark)|<(?P<link>[^<>\s]+)>")
CONSTANT = (
    r"(?:`(?:\"?[^`\s\"]+\"?|[\w-]+(?:, [\w-]+)+)`"
    r"|<?https?://[^<>\s\uff08\uff09]+>?|\[[^\[\]\n]+\]\(https?://[^()\s]+\))"
)
CONSTANTS = re.compile(rf"{CONSTANT}(?:[ \t]*(?:[,;/+\u3001\u6216]|and|or|to)?[ \t]*{CONSTANT})*")
ADDRESS = re.compile(r"https?://[^<>\s\uff08\uff09]+|\[[^\[\]\n]+\]\(https?://[^()\s]+\)")
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
    r"|,\s(?!\d|[<>~\u2264\u2265\u20ac]+\s?\d|[A-Z]{0,3}\$\d)"
)
ARROW = re.compile(r"\u2192|->")
SMALL = frozenset(["+", "&", "to", "of", "and", "the", "for", "only", "de", "la", "von", "van", "und", "bis"])


# Tables.
RULE = re.compile(r" {0,3}\|(?:[ \t]*:?-+:?[ \t]*\|)+[ \t]*")
ROW = re.compile(r" {0,3}\|")
CELL = re.compile(r"\|[ \t]*((?:[^|\\`\n]|\\.|`[^`\n]*`|[\\`])*)")  # an escaped | or one in code is part of a cell
MARKS = "`*_ \t"
ARGUMENT = re.compile(r"(?<=\w)[ =]<[^<>]+>$")  # of an option: `--port <number>`


class KeyLine(NamedTuple):
    """A line [first, last) that gives a field a value, in characters [start, end) of the text."""

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
        and all(
            unicodedata.category(char)[0] in "LMN" or char in " _-'\u2019&/()\uff08\uff09%"
            for char in VERSION.sub("", text)
        )
    )


def key_lines(text: str, declared: Mapping[str, str]) -> list[KeyLine]:
    """Return the lines that give a field a value, and those whose key is declared, in order. Includes fenced code."""
    shaped = {
        match.start(): match
        for lines in (DASH_LINE, SETTING_LINE, KEY_LINE, DEFAULT_LINE)
        for match in lines.finditer(text)
        if lines is not DASH_LINE
        or _is_address(match["value"])
        or (_is_amount(match["value"]) and _length(COMMENT.sub("", match["value"])) <= 3)
    }
    candidates: dict[int, str] = {}  # the data of a line; empty for a declared field with other text
    for first, match in shaped.items():
        data = _value(match)
        if (data and _reads_as_name(_key(match), data)) or _key(match) in declared:
            candidates[first] = data
    if not candidates:
        return []
    result, lines = list[KeyLine](), list(_lines(text))
    for number, (first, line) in enumerate(lines):
        if first not in candidates:
            continue
        match, name = shaped[first], _key(shaped[first])
        neighbours = [lines[neighbour] for neighbour in (number - 1, number + 1) if 0 <= neighbour < len(lines)]
        isolated = all(
            start in shaped
            or APART.fullmatch(neighbour)
            or (ITEM.match(neighbour) and (match["bold"] or ITEM.match(line)))
            for start, neighbour in neighbours
        )
        adjacent = any(start in candidates for start, _ in neighbours)
        # One word of ASCII may be among lines of prose.
        certain = FIELD_NAME.fullmatch(name) or name in declared or match.re is DEFAULT_LINE
        if certain or (isolated and (adjacent or _is_alone(match))):
            value = match["value"]
            if declared.get(name) != value:
                value = _inner(candidates[first] or value)
            start = match.start("value") + match["value"].index(value)
            result.append(KeyLine(name, value, start, start + len(value), *match.span()))
    return result


class Cell(NamedTuple):
    """The text of a cell, and its first character in the text."""

    text: str
    start: int


Row = list[Cell]


def table_lines(text: str) -> list[KeyLine]:
    """Return the values in rows of tables, in order. Includes fenced code."""
    found: list[KeyLine] = []
    for header, rows in _tables(text):
        values = [(row, column) for row in rows for column in _values(header, row)]
        several = len({column for _, column in values}) > 1
        for row, column in values:
            name = _row_name(header, row)
            name = field_name(f"{name} {_title(header[column])}") if several else name
            whole, start = row[column]
            value = _inner(whole)
            start += whole.index(value)
            if _is_row_name(name):
                found.append(KeyLine(name, value, start, start + len(value), start, start + len(value)))
    return found


def _tables(text: str) -> Iterator[tuple[Row, list[Row]]]:
    """Yield the header and the rows of each table."""
    previous: Row = []
    header: Row = []
    rows: list[Row] = []
    first = 0
    for line in [*text.split("\n"), ""]:
        cells = CELL.finditer(line) if ROW.match(line) else ()
        row = [Cell(cell[1].rstrip(), first + cell.start(1)) for cell in cells][:-1]
        if header and row:
            rows.append(row)
        elif header:
            yield header, rows
            header, rows = [], []
        elif previous and RULE.fullmatch(line):
            header = previous
        previous = row
        first += len(line) + 1


def _values(header: Row, row: Row) -> list[int]:
    """Return the columns of a row that have a value; none if the first cell is no name."""
    name = _row_name(header, row)
    if not _is_row_name(name) or not _is_short(name.split(), MAX_ROW):
        return []
    first = _title_words(header[0])
    return [
        column
        for column, (title, cell) in enumerate(zip(header, row, strict=False))
        if column > _name_column(header) and _is_cell_value(cell.text, _title_words(title), first)
    ]


def _title_words(cell: Cell) -> set[str]:
    """Return the words of a title, in lower case."""
    return {word.casefold() for word in re.findall(r"\w+", cell.text)}


def _is_cell_value(cell: str, title: set[str], first: set[str]) -> bool:
    """Return True if a cell is a value, by the words of the titles of its column and of the first one."""
    if not cell or title & _words("ordinals"):
        return False
    if _is_amount(cell) or _is_address(cell):
        return True
    if first & _words("situations") or title & _words("routes"):
        return False
    if title & _words("columns"):
        parts = re.split(r", (?!\d)", cell)
        return is_value(cell) or all(is_value(part.title() if part.count(" ") < 2 else part) for part in parts)
    if first & _words("ordinals"):
        return False
    words = re.findall(r"\w+", cell.casefold())
    return (_is_constant(cell) and "()" not in cell) or (words != [] and _words("ratings").issuperset(words))


def _name_column(header: Row) -> int:
    """Return the column of the names: the first, or the second if its title is `Key` or a word like it."""
    return int(len(header) > 1 and bool(_title_words(header[1]) & _words("names")))


def _row_name(header: Row, row: Row) -> str:
    """Return the name in a row; if that is a number, after the title of its column: `Days late 1-7`."""
    column = min(_name_column(header), len(row) - 1)
    name = _plain(row[column])
    return field_name(f"{_title(header[column])} {name}" if name[:1].isdigit() else name)


def _title(cell: Cell) -> str:
    """Return the title of a column, without a unit that no name can have: `Price` of `Price ($)`."""
    title = _plain(cell)
    return title if _is_row_name(title) else COMMENT.sub("", title)


def _plain(cell: Cell) -> str:
    """Return the text of a cell without marks, the dashes of an option, and a description after a dash."""
    return ARGUMENT.sub("", DASH.split(cell.text, maxsplit=1)[0].strip(MARKS)).lstrip("-")


def is_value(text: str) -> bool:
    """Return True if a text is data instead of prose: an amount or a date (short, with a number after two words at
    most), an address, code without blanks, a word, or a name of up to three words."""
    if "e.g." in text:  # an example of a value
        return False
    if _is_constant(text):
        return len(text) <= MAX_VALUE or _is_address(text)
    core = _inner(COMMENT.sub("", text))
    if (
        not core
        or len(text) > MAX_VALUE
        or ARROW.search(text)
        or PROSE.search(core)
        or _words("prose").intersection(core.casefold().split())
    ):
        return False
    number = NUMBER.search(core)
    if number:
        return _length(core[: number.start()]) < 3 and _length(ASIDE.sub("", core)) <= MAX_AMOUNT
    words = core.split()
    return (
        _length(core) <= (3 if _has_case(core) else 2)
        and all(word in SMALL or WORD.fullmatch(word) for word in words)
        and (len(words) == 1 or all(word in SMALL or not word[0].islower() for word in words))
    )


def _length(text: str) -> float:
    """Return the words of a text; two characters of a script without capitals count as one."""
    uncased = sum(char.isalpha() and not _has_case(char) for char in text)
    return uncased / 2 + sum(_has_case(word) or any(char.isdigit() for char in word) for word in text.split())


def _is_amount(text: str) -> bool:
    """Return True if a text is an amount, a date or a version: a value that begins with a digit, but for a sign or a
    currency."""
    return AMOUNT.match(_inner(text)) is not None and is_value(text)


def _is_constant(text: str) -> bool:
    """Return True if a text is one constant or several: code without blanks, addresses."""
    return any(CONSTANTS.fullmatch(part) for part in (text, COMMENT.sub("", text)))


def _is_address(text: str) -> bool:
    """Return True if a text is a URL, also as the target of a link."""
    return ADDRESS.fullmatch(_inner(text)) is not None


def _is_row_name(text: str) -> bool:
    """Return True if a text can name the values in a row of a table: as in a line, and with dots, commas, + and #."""
    return is_name(JOINED.sub("", text)) and not _words("verbs").intersection(text.casefold().split())


def _is_short(words: Sequence[str], most: int = MAX_WORDS) -> bool:
    """Return True if a name has few enough words, and none is a sentence in a script without spaces."""
    return len(words) <= most and all(len(word) <= MAX_UNCASED for word in words if not _has_case(word))


def _inner(value: str) -> str:
    """Return a value without the marks around it: `x`, **x**, "x", <https://x>."""
    match = WRAPPED.fullmatch(value)
    return (match["inner"] or match["link"]).strip() if match else value


def _key(match: re.Match[str]) -> str:
    """Return the name of a field before its value, without the marks of code and the dashes of an option."""
    key = match["key"]
    return field_name(key.strip("`").lstrip("-") if key.startswith("`") else key)


def _value(match: re.Match[str]) -> str:
    """Return the value of a line, without what follows after a dash, or after the clause of an amount; empty if it is
    no data. After code or after a heading, words are no data; with a full stop only one word after a bold key is."""
    key, data = match["key"], USE.sub("", match["value"])
    first = DASH.split(data, maxsplit=1)[0]
    if first != data and _is_evident(first):
        data = first
    if not is_value(data):
        data = CLAUSE.split(data, maxsplit=1)[0]
        return data if _is_amount(data) and data.count("(") == data.count(")") else ""
    described = match.re is KEY_LINE and (key.startswith("`") or key.casefold() in _words("headings"))
    sentence = match["stop"] and not (match["bold"] and " " not in COMMENT.sub("", data))
    return "" if (described or sentence) and not (_is_amount(data) or _is_constant(data)) else data


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line of a text with its first character."""
    first = 0
    for line in text.split("\n"):
        yield first, line
        first += len(line) + 1


def _reads_as_name(key: str, value: str) -> bool:
    """Return True if the text before a value names a field: it is no sentence, step or note."""
    words = key.split(" ")
    plain = [word.strip("()'\u2019").casefold() for word in words]
    if not is_name(key) or not (_is_short(words) or (_is_address(value) and _is_short(words, MAX_TITLE))):
        return False
    phrase = len(words) > 1 and not _is_address(value)
    if phrase and (key[0].islower() or plain[0] in _words("orders")):  # Use good ropes: 3 of them
        return False
    last = len(words) > 1 and (plain[-1] in _words("leads") or plain[-1].isnumeric())  # Valid until: 1 May; Step 2
    return (
        (len(key) == 1 or plain[0] not in _words("leads"))
        and (not last or _is_amount(value) or _is_constant(value))
        and not _words("verbs").intersection(plain)
        and key.count("(") + key.count("\uff08") == key.count(")") + key.count("\uff09")
    )


@cache
def _words(kind: str) -> frozenset[str]:
    """Return the words of one kind in prompts/keys.yaml, which describes the kinds."""
    from notes_cli.documents import read_yaml  # not needed to splice

    table = read_yaml(resource("prompts") / "keys.yaml")
    return frozenset(word for words in table[kind].values() for word in words.split())


def _is_alone(match: re.Match[str]) -> bool:
    """Return True if a line counts without a neighbour of its kind: the key is in bold or one word of a script that has
    capitals, or the value has a digit or is a constant."""
    key = match["key"]
    return match["bold"] is not None or (" " not in key and _has_case(key)) or _is_evident(match["value"])


def _is_evident(value: str) -> bool:
    """Return True if a value has a digit or is a constant."""
    return any(char.isdigit() for char in value) or _is_constant(value)


def _has_case(word: str) -> bool:
    return word.lower() != word.upper()


def listed(names: Sequence[str], most: int = 12) -> str:
    """Join names for a message of one line; `none` if empty."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more

"""Keys: which lines of a text give a field a value.

The plain form is FIELD_LINE: one word of ASCII letters, a colon, a value. A key may also be written in natural words of
any script: `Delivery time: 3 days`, `Rückgabefrist: 30 Tage`, also with the Chinese colon. Many lines of prose look
like that, so such a line counts only if the key reads like a name, the value does not read like a sentence, and the
line is set apart: next to other such lines, between empty lines, under a heading, or as an item of a list. A key of
several words, or in a script without capitals, needs one thing more: a digit in the value, or another such line next
to it.

It finds lines; fields.py makes fields of them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from notes_cli.config import resource
from notes_cli.expressions import expression

# What ends a line for some reader (str.splitlines): lines end at \n alone here, and no name and no value has any of it.
BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"

FIELD_NAME = expression(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

# A key of one word or slug, a colon with a space after it (so no URL and no time of day), and a value of at
# most 80 characters on the same line that does not end like a sentence ("Note: ask first." is not a
# field). The line may be a list item; indented by four or more spaces it is Markdown code.
FIELD_LINE = expression(
    r"^ {0,3}(?:[-*+] )?(?P<key>[A-Za-z][A-Za-z0-9_-]{0,63}):[ \t]+"
    rf"(?P<value>\S(?:[^{BREAKS}]{{0,78}}[^\s.!?:;,])?)[ \t]*$",
    re.M,
)
# The same with any key, and with the punctuation of Chinese and Japanese: its colon (FF1A) needs no space after it.
STOPS = r"\u3002\uff01\uff1f\uff1b\uff0c\u3001"  # punctuation of sentences
KEY_LINE = expression(
    rf"^ {{0,3}}(?:[-*+] )?(?P<key>[^\s:\uff1a=][^{BREAKS}:\uff1a=]{{0,63}})(?::[ \t]+|\uff1a[ \t]*)"
    rf"(?P<value>[^\s:\uff1a](?:[^{BREAKS}]{{0,78}}[^\s.!?:;,\uff1a{STOPS}\u2026{{[(\\])?)[ \t]*$",
    re.M,
)
APART = expression(r"\s*(?:#{1,6} .*|-{3,}|\*{3,})?")  # what may be next to a key: nothing, a heading, a rule
ITEM = expression(r" {0,3}[-*+] ")
SENTENCE = expression(rf"[{STOPS}]|[.!?;]\s+\S*[A-Z]|//")  # what such a value never has
MAX_WORDS = 4
MAX_UNCASED = 10  # characters of a word in a script without capitals, which may also have no spaces


class KeyLine(NamedTuple):
    """A line that gives a field a value: characters [start, end) of the text hold it, the line is [first, last)."""

    name: str
    value: str
    start: int
    end: int
    first: int
    last: int


def field_name(text: str) -> str:
    """A name in the form in which names are compared: single spaces, and letters with their marks as one character."""
    return unicodedata.normalize("NFC", " ".join(text.split()))


def is_name(text: str) -> bool:
    """Whether a text can name a field: up to 64 letters, digits and what joins them, beginning with a letter."""
    return (
        0 < len(text) <= 64
        and text == field_name(text)
        and unicodedata.category(text[0])[0] == "L"
        and all(unicodedata.category(char)[0] in "LMN" or char in " _-'\u2019&/()%" for char in text)
    )


def key_lines(text: str) -> list[KeyLine]:
    """The lines of a text that give a field a value, in order. Fenced code is not left out."""
    plain = {match.start(): _line(match) for match in FIELD_LINE.finditer(text)}
    others = {
        match.start(): match
        for match in KEY_LINE.finditer(text)
        if match.start() not in plain
        and _reads_as_name(field_name(match["key"]))
        and not SENTENCE.search(match["value"])
    }
    if not others:
        return list(plain.values())
    found, lines = dict(plain), list(_lines(text))
    for number, (first, line) in enumerate(lines):
        if first not in others:
            continue
        neighbours = [lines[near] for near in (number - 1, number + 1) if 0 <= near < len(lines)]
        among = any(near in plain or near in others for near, _ in neighbours)
        apart = all(
            near in plain or near in others or APART.fullmatch(other) or (ITEM.match(other) and ITEM.match(line))
            for near, other in neighbours
        )
        match = others[first]
        if apart and (among or _is_word(match["key"]) or any(char.isdigit() for char in match["value"])):
            found[first] = _line(match)
    return [found[first] for first in sorted(found)]


def _line(match: re.Match[str]) -> KeyLine:
    return KeyLine(field_name(match["key"]), match["value"], *match.span("value"), *match.span())


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Each line of a text, and where it begins."""
    first = 0
    for line in text.split("\n"):
        yield first, line
        first += len(line) + 1


def _reads_as_name(key: str) -> bool:
    words = key.split(" ")
    plain = [word.strip("()'\u2019").casefold() for word in words]
    return (
        is_name(key)
        and len(words) <= MAX_WORDS
        and (len(words) == 1 or not key[0].islower())
        and not {plain[0], plain[-1]} & _words("leads")
        and not _words("verbs").intersection(plain)
        and not (len(words) > 1 and words[-1].isnumeric())  # Step 2, Section 4
        and all(len(word) <= MAX_UNCASED for word in words if not _has_case(word))
    )


@cache
def _words(kind: str) -> frozenset[str]:
    """Words that no name begins or ends with (leads), and words that no name has (verbs), from prompts/keys.yaml."""
    from notes_cli.documents import read_yaml  # needed where a text is read, not where it is spliced

    table = read_yaml(resource("prompts") / "keys.yaml")
    return frozenset(word for words in table[kind].values() for word in words.split())


def _is_word(key: str) -> bool:
    """Whether it is one word of a script that has capitals: such a key needs no more evidence than an English one."""
    return " " not in key and _has_case(key)


def _has_case(word: str) -> bool:
    return word.lower() != word.upper()


def known(fields: Collection[str], wanted: str) -> str:
    """The fields that there are, for somebody who `wanted` another, and which of them is like it; where there are none,
    what one is."""
    from difflib import get_close_matches

    names = listed(sorted(fields))
    folded = {each.casefold(): field for field in fields for each in (field.rpartition(".")[2], field)}
    near = get_close_matches(wanted.casefold(), folded, n=1)
    hint = f"Did you mean {folded[near[0]]}? " if near else ""
    what = "" if fields else ". A field is a `key: value` line, a {{placeholder}}, or named under fields: at the top"
    return f"{hint}Known fields: {names}{what}"


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names for a message of one line; `none` if there are none."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more

"""Defines which lines of a text give a field a value, and resolves references to fields such as `*.date`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from notes_cli.config import resource
from notes_cli.errors import SkillError

# Line breaks of str.splitlines. Lines end at \n only; names and values contain none of these.
BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"

FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

# A key, a colon with a space after it (so no URL and no time of day) or that of Chinese and Japanese (FF1A), and a
# value of at most 80 characters. Indented by four or more spaces it is Markdown code.
KEY_LINE = re.compile(
    r"^ {0,3}(?:[-*+] )?(?P<bold>\*\*)?(?P<key>[^\s:\uff1a=*][^" + BREAKS + r":\uff1a=*]{0,63})"
    r"(?(bold)(?:\*\*[ \t]?(?::[ \t]|\uff1a)|(?::|\uff1a)\*\*(?:[ \t]|(?<=\uff1a\*\*)))|(?::[ \t]|\uff1a))[ \t]*"
    rf"(?P<value>[^\s:\uff1a](?:[^{BREAKS}]{{0,78}}[^\s.!?:;,])?)[ \t]*$",
    re.M,
)
# A setting in a code span of its own: `timeout = 30`, `region: north`.
SETTING_LINE = re.compile(
    r"^ {0,3}(?:[-*+] )?`(?P<key>[A-Za-z][A-Za-z0-9_-]{0,63})(?:[ \t]?=|:[ \t])[ \t]?"
    rf"(?P<value>[^\s`=](?:[^`{BREAKS}]{{0,78}}[^\s`.!?:;,])?)`[ \t]*$",
    re.M,
)
APART = re.compile(r"\s*(?:#{1,6} .*|-{3,}|\*{3,})?")  # lines that may be next to a key: empty, a heading, a rule
ITEM = re.compile(r" {0,3}[-*+] ")
MAX_WORDS = 4
MAX_UNCASED = 10  # characters of a word in a script without capitals, which may have no spaces

# A value is one constant or several (CONSTANTS), or has no PROSE, and an amount (NUMBER) or few words (WORD).
COMMENT = re.compile(r"[ \t]*[(\uff08][^()\uff08\uff09]*[)\uff09]$")  # after a value: `30 seconds (default)`
ASIDE = re.compile(r"\([^()]*\)")  # within a value: `3m (10 ft) to 9m (30 ft)`
WORD = re.compile(r"[\w.@&'\u2019/+~#%$-]*\w[\w.@&'\u2019/+~#%$-]*")
WRAPPED = re.compile(r"(?P<mark>`|\*\*|\*|\"|')(?P<inner>[^`*\"]+)(?P=mark)|<(?P<link>[^<>\s]+)>")
CONSTANT = r"(?:`[^`\s\"]+`|<?https?://[^<>\s\uff08\uff09]+>?)"
CONSTANTS = re.compile(rf"{CONSTANT}(?:[ \t]*(?:[,;/\u3001\u6216]|and|or|to)?[ \t]*{CONSTANT})*")
NUMBER = re.compile(r"[-+~<>=\u2264\u2265\u2248\u00b1]{0,2}[ \t]?\d")
# Excluded from values other than constants: punctuation of sentences, code and templates, and arrows.
PROSE = re.compile(
    r"[|\[\]{}\"\u201c\u201d\u2192\u3002\uff01\uff1f\uff1b\uff0c\u3001`*]|->|(?<![<>])=|[<>](?![=\s]*\d)|[.!?;:]\s|,\s(?!\d)|//"
)
ARROW = re.compile(r"\u2192|->")
SMALL = frozenset(["to", "of", "and", "&", "the", "for", "de", "la", "von", "van", "und", "bis"])  # between two words


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
        and all(unicodedata.category(char)[0] in "LMN" or char in " _-'\u2019&/()\uff08\uff09%" for char in text)
    )


def key_lines(text: str, declared: Mapping[str, str]) -> list[KeyLine]:
    """Return the lines that give a field a value, and those whose key is declared, in order. Includes fenced code."""
    shaped = {match.start(): match for lines in (SETTING_LINE, KEY_LINE) for match in lines.finditer(text)}
    candidates = {
        first: match
        for first, match in shaped.items()
        if field_name(match["key"]) in declared
        or (_reads_as_name(field_name(match["key"])) and is_value(match["value"]))
    }
    if not candidates:
        return []
    result, lines = list[KeyLine](), list(_lines(text))
    for number, (first, line) in enumerate(lines):
        match = candidates.get(first)
        if not match:
            continue
        neighbours = [lines[neighbour] for neighbour in (number - 1, number + 1) if 0 <= neighbour < len(lines)]
        isolated = all(
            start in shaped or APART.fullmatch(neighbour) or (ITEM.match(neighbour) and ITEM.match(line))
            for start, neighbour in neighbours
        )
        adjacent = any(start in candidates for start, _ in neighbours)
        ascii_word = FIELD_NAME.fullmatch(match["key"])  # one word of ASCII, which may be among lines of prose
        if ascii_word or field_name(match["key"]) in declared or (isolated and (adjacent or _is_evident(match))):
            result.append(_line(match, declared))
    return result


def is_value(text: str) -> bool:
    """Return True if a text is data instead of prose: an amount or a date (short, with a number after two words at
    most), an address, code without blanks, a word, or a name of up to three words."""
    core = COMMENT.sub("", text)
    if CONSTANTS.fullmatch(core):
        return True
    core = _inner(core)
    if ARROW.search(text) or PROSE.search(core) or _words("prose").intersection(core.casefold().split()):
        return False
    number = NUMBER.search(core)
    if number:
        return _length(core[: number.start()]) < 3 and _length(ASIDE.sub("", core)) <= 5
    words = core.split()
    return (
        _length(core) <= (3 if _has_case(core) else 2)
        and all(WORD.fullmatch(word) for word in words)
        and (len(words) == 1 or all(word in SMALL or not word[0].islower() for word in words))
    )


def _length(text: str) -> float:
    """Return the words of a text; two characters of a script without capitals count as one."""
    uncased = sum(char.isalpha() and not _has_case(char) for char in text)
    return uncased / 2 + sum(_has_case(word) or any(char.isdigit() for char in word) for word in text.split())


def _inner(value: str) -> str:
    """Return a value without the marks around it: `x`, **x**, "x", <https://x>."""
    match = WRAPPED.fullmatch(value)
    return (match["inner"] or match["link"]).strip() if match else value


def _line(match: re.Match[str], declared: Mapping[str, str]) -> KeyLine:
    name, whole = field_name(match["key"]), match["value"]
    value = whole if declared.get(name) == whole else _inner(whole)
    start = match.start("value") + whole.index(value)
    return KeyLine(name, value, start, start + len(value), *match.span())


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line of a text with its first character."""
    first = 0
    for line in text.split("\n"):
        yield first, line
        first += len(line) + 1


def _reads_as_name(key: str) -> bool:
    words = key.split(" ")
    plain = [word.strip("()'\u2019").casefold() for word in words]
    return (
        is_name(key)
        and key.count("(") + key.count("\uff08") == key.count(")") + key.count("\uff09")
        and len(words) <= MAX_WORDS
        and (len(words) == 1 or not key[0].islower())
        and (len(key) == 1 or not {plain[0], plain[-1]} & _words("leads"))
        and not (len(words) == 1 and plain[0] in _words("headings"))
        and not _words("verbs").intersection(plain)
        and not (len(words) > 1 and (words[-1].isnumeric() or plain[0] in _words("orders")))  # Step 2, Use good ropes
        and all(len(word) <= MAX_UNCASED for word in words if not _has_case(word))
    )


@cache
def _words(kind: str) -> frozenset[str]:
    """Return the words of one kind in prompts/keys.yaml, which describes the kinds."""
    from notes_cli.documents import read_yaml  # not needed to splice

    table = read_yaml(resource("prompts") / "keys.yaml")
    return frozenset(word for words in table[kind].values() for word in words.split())


def _is_evident(match: re.Match[str]) -> bool:
    """Return True if a line counts without a neighbour of its kind: the key is in bold or one word of a script that has
    capitals, or the value has a digit or is a constant."""
    key, value = match["key"], match["value"]
    single = match["bold"] is not None or (" " not in key and _has_case(key))
    return single or any(char.isdigit() for char in value) or CONSTANTS.fullmatch(value) is not None


def _has_case(word: str) -> bool:
    return word.lower() != word.upper()


def known(fields: Collection[str], wanted: str) -> str:
    """Return the remedy for an unknown field `wanted`: the known fields and the most similar one; without fields, how
    to write one."""
    from difflib import get_close_matches

    names = listed(sorted(fields))
    folded = {name.casefold(): field for field in fields for name in (field.rpartition(".")[2], field)}
    similar = get_close_matches(wanted.casefold(), folded, n=1)
    hint = f"Did you mean {folded[similar[0]]}? " if similar else ""
    help_ = "" if fields else ". A field is a `key: value` line, a {{placeholder}}, or named under fields: at the top"
    return f"{hint}Known fields: {names}{help_}"


def listed(names: Sequence[str], most: int = 12) -> str:
    """Join names for a message of one line; `none` if empty."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


ALL = "*"


class Reference(NamedTuple):
    """A field of a skill."""

    skill: str
    field: str
    key: str  # `date`, or `returns.date` if other skills have a field of that name, too

    @property
    def shared(self) -> bool:
        """True if other skills have a field of that name."""
        return self.key != self.field


class Known(Collection[str]):
    """Fields of some skills. `in` takes a reference to one or more of them; iterating gives the keys."""

    def __init__(self, skills: Iterable[tuple[str, Iterable[str]]]) -> None:
        """`skills`: each skill's name with its field names."""
        self._fields: dict[str, dict[str, None]] = {}  # skill -> fields, in order
        self._owners: dict[str, dict[str, None]] = {}  # field -> skills
        for skill, fields in skills:
            for field in fields:
                self._fields.setdefault(skill, {})[field] = None
                self._owners.setdefault(field, {})[skill] = None

    def __contains__(self, reference: object) -> bool:
        return isinstance(reference, str) and bool(self.find(reference))

    def __iter__(self) -> Iterator[str]:
        return (self.key(skill, field) for skill, fields in self._fields.items() for field in fields)

    def __len__(self) -> int:
        return sum(map(len, self._fields.values()))

    def key(self, skill: str, field: str) -> str:
        return field if len(self._owners.get(field, ())) < 2 else f"{skill}.{field}"

    def find(self, reference: str) -> list[Reference]:
        """Return all fields that a reference may mean; without a skill, those of every skill that has the field. Case
        is ignored if only one field matches."""
        skill, dot, field = reference.rpartition(".")
        field, skill = field_name(field), skill.strip()
        known = self._owners if not dot or skill == ALL else self._fields.get(skill, {})
        if field not in known:
            similar = [name for name in known if name.casefold() == field.casefold()]
            field = similar[0] if len(similar) == 1 else field
        owners = self._owners.get(field, {})
        selected = owners if not dot or skill == ALL else [skill] if skill in owners else ()
        return [Reference(owner, field, self.key(owner, field)) for owner in selected]

    def resolve(self, reference: str, subject: str = "no spliced skill has") -> list[Reference]:
        """Return the field that a reference means, or with `*.` all of that name.

        Raises SkillError for an unknown field, with the known ones, and for one of several skills, with each. `subject`
        begins the former message.
        """
        references = self.find(reference)
        if not references:
            raise SkillError(f"{subject} a field {reference!r}", known(self, reference))
        if len(references) > 1 and "." not in reference:
            which = listed([match.key for match in references])
            raise SkillError(
                f"several skills have a field {reference!r}: name one of {which}, or all: {ALL}.{reference}"
            )
        return references

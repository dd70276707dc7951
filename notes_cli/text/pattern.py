"""Regular expressions of JSON schemas, as what a grammar (GBNF) lets stand between the quotes of a JSON string.

The dialect is the part of ECMAScript's that is the same in Python: where both read a class otherwise (`\\d`, `\\w` and
`\\s` beyond ASCII), what both agree on is allowed. Nothing is passed over: what has no rule is a GrammarError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from notes_cli.errors import GrammarError
from notes_cli.text.grammar import times

Ranges = Sequence[tuple[int, int]]  # of characters, ascending, each with its last one
ALL: Ranges = ((0x00, 0xD7FF), (0xE000, 0x10FFFF))
PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))  # written as they are in JSON
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
MAX_DEPTH = 50  # groups in groups

_DIGITS: Ranges = ((0x30, 0x39),)
_WORDS: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_BLANKS: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_ASCII: Ranges = ((0x00, 0x7F),)
_LINES: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))  # what . is not
_CLASSES = {"d": _DIGITS, "w": _WORDS, "s": _BLANKS}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_NUMBERS = {"x": re.compile(r"[0-9A-Fa-f]{2}"), "u": re.compile(r"[0-9A-Fa-f]{4}|\{[0-9A-Fa-f]{1,6}\}")}
_QUANTIFIER = re.compile(r"(?:(?P<short>[*+?])|\{(?P<least>\d{1,6})(?P<comma>,(?P<most>\d{0,6}))?\})\??")


def pattern_rule(pattern: str) -> str:
    """GBNF for the texts in which a regular expression finds something, as JSON writes them, without quotes. Raise
    GrammarError for an expression that is none, or that has no rule."""
    return _Reader(pattern).read()


def text_rule(text: str) -> str:
    """GBNF for a text as it is, outside of JSON."""
    return '"' + "".join(_escaped(ord(letter), '"') for letter in text) + '"'


def set_rule(ranges: Ranges) -> str:
    """GBNF for one of these characters, outside of JSON."""
    ends = [(_escaped(first, "[]^-"), _escaped(last, "[]^-")) for first, last in ranges]
    return "[" + "".join(first if first == last else f"{first}-{last}" for first, last in ends) + "]"


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters of the first that are not in the second."""
    found = [*ranges]
    for low, high in others:
        found = [
            part
            for first, last in found
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        ]
    return found


def _common(ranges: Ranges, others: Ranges) -> Ranges:
    return without(ranges, without(ALL, others))


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending, none touching another."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def _escaped(code: int, special: str) -> str:
    """One character in a literal or in a set."""
    letter = chr(code)
    if letter in special + "\\":
        return f"\\{letter}" if letter != "^" else "\\x5E"
    if 0x20 <= code < 0x7F:
        return letter
    return f"\\x{code:02X}" if code < 0x80 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _in_json(ranges: Ranges) -> str:
    """GBNF for one of these characters inside a JSON string."""
    plain = _common(ranges, PLAIN)
    others = [code for first, last in without(ranges, PLAIN) for code in range(first, last + 1)]
    spelled = [f"\\{_SHORT[code]}" if code in _SHORT else f"\\u{code:04x}" for code in others]
    rules = [*([set_rule(plain)] if plain else []), *map(text_rule, spelled)]
    return rules[0] if len(rules) == 1 else f"({' | '.join(rules)})"


class _Reader:
    """One pass over an expression."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def read(self) -> str:
        found = []
        anything = times(_in_json(ALL), 0, None)
        while True:
            begins = self._skip("^")
            parts = self._sequence(0)
            ends = self._skip("$")
            body = [*([] if begins else [anything]), *parts, *([] if ends else [anything])]
            found.append(" ".join(body) or '""')
            if not self._skip("|"):
                break
        if self._at < len(self._pattern):
            raise self._wrong(f"has {self._pattern[self._at]!r} where it cannot be")
        return found[0] if len(found) == 1 else " | ".join(found)

    def _skip(self, mark: str) -> bool:
        if not self._pattern.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _wrong(self, what: str) -> GrammarError:
        return GrammarError(f"the pattern {self._pattern[:80]!r}, which {what}")

    def _take(self) -> str:
        if self._at == len(self._pattern):
            raise self._wrong("ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _group(self, depth: int) -> str:
        """Alternatives, up to the closing parenthesis."""
        if depth > MAX_DEPTH:
            raise self._wrong(f"has groups nested more than {MAX_DEPTH} deep")
        if self._skip("?") and not self._skip(":"):
            match = re.compile(r"<[A-Za-z_]\w*>").match(self._pattern, self._at)
            if match is None:
                raise self._wrong("looks ahead or back, or sets flags, which a grammar cannot")
            self._at = match.end()
        found = [self._sequence(depth)]
        while self._skip("|"):
            found.append(self._sequence(depth))
        if not self._skip(")"):
            raise self._wrong("has an open parenthesis, or ^ or $ inside of a group")
        return f"({' | '.join(' '.join(parts) or chr(34) * 2 for parts in found)})"

    def _sequence(self, depth: int) -> list[str]:
        """What comes one after the other, as symbols that may be repeated."""
        found: list[str] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)$^":
            symbol = self._symbol(depth)
            match = _QUANTIFIER.match(self._pattern, self._at)
            if match:
                self._at = match.end()
                symbol = f"({times(symbol, *self._counts(match))})"
                if _QUANTIFIER.match(self._pattern, self._at) or self._pattern[self._at : self._at + 1] == "+":
                    raise self._wrong("repeats a repetition")
            found.append(symbol)
        return found

    def _counts(self, match: re.Match[str]) -> tuple[int, int | None]:
        if match["short"]:
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[match["short"]]
        least = int(match["least"])
        most = (int(match["most"]) if match["most"] else None) if match["comma"] else least
        if most is not None and most < least:
            raise self._wrong(f"repeats something at least {least} and at most {most} times")
        return least, most

    def _symbol(self, depth: int) -> str:
        letter = self._take()
        if letter == "(":
            return self._group(depth + 1)
        if letter == "[":
            return self._one_of(self._set())
        if letter == ".":
            return self._one_of(without(ALL, _LINES))
        if letter in "*+?{}]":
            raise self._wrong(f"has {letter!r} where it cannot be (write \\{letter} for the character)")
        return self._one_of(self._escape() if letter == "\\" else self._single(letter))

    def _single(self, letter: str) -> Ranges:
        if not without([(ord(letter), ord(letter))], ALL):
            return ((ord(letter), ord(letter)),)
        raise self._wrong("holds half of a UTF-16 surrogate pair")

    def _one_of(self, ranges: Ranges) -> str:
        if not ranges:
            raise self._wrong("has a class without any character")
        return _in_json(ranges)

    def _set(self) -> Ranges:
        """The characters of a class in brackets."""
        negative = self._skip("^")
        found: list[tuple[int, int]] = []
        beyond = False  # a class in it that is read in two ways beyond ASCII
        while not self._skip("]"):
            first, single = self._member()
            beyond = beyond or not single
            if self._pattern[self._at : self._at + 1] == "-" and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last, ends = self._member()
                if not (single and ends) or last[0][0] < first[0][0]:
                    raise self._wrong("has a class with a range that is none")
                first = _common([(first[0][0], last[0][0])], ALL)
            found += first
        if not negative:
            return _joined(found)
        return without(_ASCII if beyond else ALL, found)

    def _member(self) -> tuple[Ranges, bool]:
        """What a class holds next, and whether it is a single character."""
        letter = self._take()
        if letter == "[":
            raise self._wrong("has [ in a class (write \\[)")
        if letter != "\\":
            return self._single(letter), True
        escaped = self._pattern[self._at : self._at + 1]
        return self._escape(in_set=True), escaped.lower() not in _CLASSES

    def _escape(self, *, in_set: bool = False) -> Ranges:
        """The characters that are meant by what follows a backslash."""
        letter = self._take()
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter.lower() in _CLASSES:
            return without(_ASCII, [*_CLASSES[letter.lower()], *([(0x1C, 0x1F)] if letter == "S" else [])])
        if letter in _CONTROLS:
            return ((_CONTROLS[letter], _CONTROLS[letter]),)
        if in_set and letter == "b":
            return ((0x08, 0x08),)
        if letter in "xu":
            match = _NUMBERS[letter].match(self._pattern, self._at)
            if match is None:
                raise self._wrong(f"has \\{letter} without a number")
            self._at = match.end()
            code = int(match[0].strip("{}"), 16)
            if code > 0x10FFFF:
                raise self._wrong(f"has \\{letter} with a number that is no character's")
            return self._single(chr(code))
        if letter.isalnum():
            raise self._wrong(f"has \\{letter}, which is not supported")
        return self._single(letter)

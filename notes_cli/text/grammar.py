"""Grammars in GBNF, as llama.cpp takes them: read as far as is needed to say what is wrong with one, and where.

llama.cpp prints a grammar that it cannot read to stderr, takes a repetition beyond its bound for an endless one, and
does not survive some others. So all of that is found here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from notes_cli.errors import GrammarError

ROOT = "root"  # the rule that an answer is
MOST = 2000  # repetitions of one thing: beyond, llama.cpp takes them for any number
LOT = 500  # repetitions in one lot, where there are more than MOST
MAX_TEXT = 1 << 20  # characters of a grammar
MAX_RULES = 20_000  # with those that repetitions become
MAX_ELEMENTS = 4 << 20  # characters and rules, repetitions written out
MAX_DEPTH = 200  # parentheses in parentheses, rules that begin with rules
MAX_WAYS = 1000  # that a text can go on in at one place: llama.cpp keeps each, and compares them all

_SHORT = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): "", (0, 0): "{0}"}
_ESCAPE = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[trn\\\"\[\]-])"
_NUL = r"\\(?:x00|u0000|U00000000)"
_HOLDS_NUL = re.compile(rf"(?:[^\\]|(?!{_NUL})\\.)*{_NUL}", re.S)  # a literal, as an escape
_TOKENS = re.compile(
    r"(?P<blank>[ \t]+|\#[^\r\n]*)"
    r"|(?P<line>\r?\n|\r)"
    rf'|(?P<literal>"(?:[^"\\]|{_ESCAPE})*")'
    rf"|(?P<set>\[\^?(?:[^\]\\]|{_ESCAPE})*\])"
    r"|(?P<define>::=)"
    r"|(?P<name>[A-Za-z0-9-]+)"
    r"|(?P<repeat>[*+?]|\{[ \t]*(?P<least>\d+)[ \t]*(?:(?P<comma>,)[ \t]*(?P<most>\d*)[ \t]*)?\})"
    r"|(?P<mark>[|().])"
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int
    least: int = 1  # of a repetition
    most: int | None = 1  # None: any number


def check_grammar(text: str) -> None:
    """Raise GrammarError, saying what is wrong and where, unless llama.cpp can read the grammar. (It finds left
    recursion itself.)"""
    if len(text) > MAX_TEXT:
        raise GrammarError(f"the grammar is longer than {MAX_TEXT:,} characters")
    if "\0" in text:
        raise GrammarError("the grammar holds a NUL character")
    try:
        _Reader(text).read()
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None


def times(item: str, least: int, most: int | None) -> str:
    """So many of one symbol (a rule, a set, something in parentheses), also where that is more than MOST."""
    if (least, most) in _SHORT:
        return item + _SHORT[least, most]
    parts = []
    if least:
        parts.append(_exactly(item, least))
    if most is None:
        parts.append(f"{item}*")
    elif 0 < most - least <= MOST:
        parts.append(f"{item}{{0,{most - least}}}")
    elif most > least:  # whole lots, then what is fewer than a lot more: every count in one way or another
        lots, rest = divmod(most - least, LOT)
        parts += [times(f"({item}{{{LOT}}})", 0, lots - 1), f"{item}{{0,{LOT + rest}}}"]
    return " ".join(parts) or '""'


def _exactly(item: str, count: int) -> str:
    if count <= MOST:
        return f"{item}{{{count}}}"
    lots, rest = divmod(count, LOT)
    return f"({item}{{{LOT}}}){{{lots}}}" + (f" {item}{{{rest}}}" if rest else "")


@dataclass(frozen=True, slots=True)
class _Symbol:
    """What a sequence consists of: a rule by its name, alternatives in parentheses, or characters."""

    name: str = ""
    group: Sequence[Sequence[_Symbol]] | None = None
    empty: bool = False  # of characters
    least: int = 1
    most: int | None = 1


class WaysError(GrammarError):
    """A text could go on in too many ways at one place of the rule `rule`."""

    def __init__(self, rule: str) -> None:
        super().__init__(f"the rule {rule} can go on in more than {MAX_WAYS:,} ways at one place")
        self.rule = rule


class _Ways:
    """In how many ways a text can go on, as far as the beginning of each rule says."""

    def __init__(self, rules: Mapping[str, Sequence[Sequence[_Symbol]]]) -> None:
        self._rules = rules
        self._found: dict[str, tuple[int, bool]] = {}
        self._groups: dict[int, tuple[int, bool]] = {}  # likewise, by the group's id: each is looked at once

    def check(self) -> None:
        """Raise GrammarError where there are too many."""
        for name, alternatives in self._rules.items():
            waiting = [*alternatives]
            while waiting:
                sequence = waiting.pop()
                waiting += [inner for symbol in sequence for inner in symbol.group or ()]
                run = 0  # ways at one place: up to the first symbol that must be there
                for symbol in sequence:
                    ways, empty = self._symbol(symbol, 0)
                    run += ways
                    if run > MAX_WAYS:
                        raise WaysError(name)
                    run = run if empty else 0

    def _symbol(self, symbol: _Symbol, depth: int) -> tuple[int, bool]:
        """The ways to begin it, and whether it may be empty."""
        if symbol.group is not None:
            key = id(symbol.group)
            if key not in self._groups:
                self._groups[key] = self._alternatives(symbol.group, depth)
            ways, empty = self._groups[key]
        elif symbol.name:
            ways, empty = self._rule(symbol.name, depth)
        else:
            ways, empty = int(not symbol.empty), symbol.empty
        return ways * (symbol.most or 1 if empty else 1), empty or not symbol.least

    def _rule(self, name: str, depth: int) -> tuple[int, bool]:
        if depth > MAX_DEPTH:
            raise GrammarError(f"more than {MAX_DEPTH} rules begin with each other, as far as {name}")
        if name not in self._found:
            self._found[name] = 0, False  # where it begins with itself, llama.cpp says so
            self._found[name] = self._alternatives(self._rules[name], depth + 1)
        return self._found[name]

    def _alternatives(self, alternatives: Sequence[Sequence[_Symbol]], depth: int) -> tuple[int, bool]:
        ways, any_empty = 0, False
        for sequence in alternatives:
            for symbol in sequence:
                more, empty = self._symbol(symbol, depth)
                ways += more
                if not empty:
                    break
            else:
                any_empty = True
        return ways, any_empty


class _Reader:
    """One pass over the tokens of a grammar."""

    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text)]
        self._at = 0
        self._defined: dict[str, Sequence[Sequence[_Symbol]]] = {}
        self._used: dict[str, int] = {}  # the line that first names a rule
        self._rules = self._elements = 0

    def read(self) -> None:
        self._skip_lines()
        while self._next.kind != "end":
            name = self._take("name", "the name of a rule")
            if name.text in self._defined:
                raise _wrong(name.line, f"the rule {name.text} is there twice")
            self._take("define", f"::= after {name.text}")
            self._grow(1, 1, name.line)
            self._defined[name.text] = self._alternatives(0)
            if self._next.kind not in ("line", "end"):
                raise _wrong(self._next.line, f"{_shown(self._next)} does not belong there")
            self._skip_lines()
        if ROOT not in self._defined:
            raise GrammarError(f"the grammar has no rule {ROOT}, which an answer is", f'Write: {ROOT} ::= "yes" | "no"')
        unknown = next((name for name in self._used if name not in self._defined), None)
        if unknown:
            raise _wrong(self._used[unknown], f"there is no rule {unknown}")
        _Ways(self._defined).check()

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, kind: str, what: str) -> _Token:
        token = self._next
        if token.kind != kind:
            raise _wrong(token.line, f"{what} is missing before {_shown(token)}")
        self._at += 1
        return token

    def _skip_lines(self) -> None:
        while self._next.kind == "line":
            self._at += 1

    def _alternatives(self, depth: int) -> list[list[_Symbol]]:
        """Sequences between |, up to what belongs to none. A line may end after ::= and |, and within parentheses."""
        self._skip_lines()
        found = [self._sequence(depth)]
        while self._next.text == "|":
            self._at += 1
            self._skip_lines()
            found.append(self._sequence(depth))
        return found

    def _sequence(self, depth: int) -> list[_Symbol]:
        found: list[_Symbol] = []
        size = 1  # elements of the last symbol
        while True:
            token = self._next
            if token.kind == "line" and depth:
                self._at += 1
                continue
            if token.kind == "repeat":
                if not found:
                    raise _wrong(token.line, f"{token.text} repeats nothing")
                self._repeat(token, size)
                found[-1] = _Symbol(group=[[found[-1]]], least=token.least, most=token.most)
                size = 1
            elif token.kind in ("literal", "set"):
                if token.kind == "literal" and _HOLDS_NUL.match(token.text):
                    raise _wrong(token.line, f"{_shown(token)} holds a NUL character, which no text has")
                size = len(token.text)
                found.append(_Symbol(empty=token.text == '""'))
                self._grow(0, size, token.line)
            elif token.kind == "name":
                self._used.setdefault(token.text, token.line)
                found.append(_Symbol(token.text))
                size = 1
            elif token.text == ".":
                found.append(_Symbol())
                size = 1
            elif token.text == "(":
                if depth == MAX_DEPTH:
                    raise _wrong(token.line, f"parentheses are nested more than {MAX_DEPTH} deep")
                self._at += 1
                found.append(_Symbol(group=self._alternatives(depth + 1)))
                if self._next.text != ")":
                    raise _wrong(self._next.line, f") is missing before {_shown(self._next)}")
                self._grow(1, 1, token.line)
                size = 1
            else:
                return found
            self._at += 1

    def _repeat(self, token: _Token, size: int) -> None:
        least, most = token.least, token.most
        if most is not None and most < least:
            raise _wrong(token.line, f"{token.text} asks for at least {least:,} and at most {most:,}")
        if max(least, most or 0) > MOST:
            raise _wrong(token.line, f"{token.text} repeats something more than {MOST:,} times")
        further = 1 if most is None else most - least
        self._grow(further, size * (least + further), token.line)

    def _grow(self, rules: int, elements: int, line: int) -> None:
        self._rules, self._elements = self._rules + rules, self._elements + elements
        if self._rules > MAX_RULES or self._elements > MAX_ELEMENTS:
            raise _wrong(line, f"there it becomes larger than {MAX_RULES:,} rules or {MAX_ELEMENTS:,} elements")


def _tokens(text: str) -> Iterator[_Token]:
    """What means something, and an end."""
    at, line = 0, 1
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None:
            raise _wrong(line, f"{text[at : at + 16]!r} is not GBNF")
        kind = match.lastgroup or ""
        if match["repeat"]:
            yield _repetition(match, line)
        elif match["blank"] is None:
            yield _Token(kind, match[0], line)
        line += 1 if kind == "line" else match[0].count("\n")
        at = match.end()
    yield _Token("end", "", line)


def _repetition(match: re.Match[str], line: int) -> _Token:
    ends: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if match[0] in ends:
        return _Token("repeat", match[0], line, *ends[match[0]])
    if max(len(match["least"]), len(match["most"] or "")) > 9:
        raise _wrong(line, f"{match[0][:32]} repeats something more than {MOST:,} times")
    least = int(match["least"])
    most = (int(match["most"]) if match["most"] else None) if match["comma"] else least
    return _Token("repeat", match[0], line, least, most)


def _shown(token: _Token) -> str:
    return {"end": "the end", "line": "the end of the line"}.get(token.kind, repr(token.text[:32]))


def _wrong(line: int, what: str) -> GrammarError:
    return GrammarError(f"line {line} of the grammar: {what}")

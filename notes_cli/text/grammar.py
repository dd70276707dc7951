"""Translates GBNF, llama.cpp's grammar notation, to the Lark notation that llguidance reads.

llguidance's own converter is not used: it makes a lexeme of each rule that is not recursive, which always takes the
longest match (so that `[a-z]* "b"` never ends), and drops the zeros of `\\u00e9`. Here each character is a lexeme, so
that the language stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from notes_cli.errors import GrammarError
from notes_cli.guidance import HEAD, Grammar, check_grammar

ROOT = "root"  # the start rule
MAX_TEXT = 1 << 16  # characters of a grammar
MAX_DEPTH = 20  # nested parentheses
MAX_LEVELS = 300  # rules and their nested parentheses: llguidance recurses through them, 1,000 on a stack of 8 MB
_ESCAPE = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[trn\\\"\[\]^-])"
_CONTROLS = {"t": "\t", "r": "\r", "n": "\n"}
_CHARACTER = re.compile(rf"{_ESCAPE}|[^\\]", re.S)
_TOKENS = re.compile(
    r"(?P<blank>[ \t]+|\#[^\r\n]*)"
    r"|(?P<line>\r?\n|\r)"
    rf'|"(?P<literal>(?:[^"\\]|{_ESCAPE})*)"'
    rf"|\[(?P<set>\^?(?:[^\]\\]|{_ESCAPE})*)\]"
    r"|(?P<define>::=)"
    r"|(?P<name>[A-Za-z0-9-]+)"
    r"|(?P<repeat>[*+?]|\{[ \t]*\d{1,6}[ \t]*(?:,[ \t]*\d{0,6}[ \t]*)?\})"
    r"|(?P<mark>[|().])"
)


def gbnf_grammar(text: str) -> Grammar:
    """Return the llguidance grammar of a GBNF text. Raises GrammarError, with the line, for invalid GBNF."""
    if len(text) > MAX_TEXT:
        raise GrammarError(f"the grammar is longer than {MAX_TEXT:,} characters")
    return check_grammar(HEAD + _Translator(text).lark())


class _Translator:
    """One pass over the tokens of a GBNF grammar."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._names = {ROOT: "start"}  # Lark names by GBNF names
        self._defined: set[str] = set()
        self._used: dict[str, int] = {}  # line of the first use of a rule
        self._levels = self._deepest = 0
        self._next()

    def lark(self) -> str:
        rules = []
        self._skip_lines()
        while self._kind != "end":
            if self._kind != "name":
                raise self._wrong(f"the name of a rule is missing before {self._shown}")
            name = self._text
            if name in self._defined:
                raise self._wrong(f"the rule {name} is there twice")
            self._defined.add(name)
            self._next()
            if self._kind != "define":
                raise self._wrong(f"::= is missing after {name}")
            self._next()
            self._deepest = 0
            rules.append(f"{self._rule(name)}: {self._alternatives(0)}\n")
            self._levels += 1 + self._deepest
            if self._levels > MAX_LEVELS:
                raise self._wrong(f"there are more than {MAX_LEVELS} rules and levels of parentheses")
            if self._kind not in ("line", "end"):
                raise self._wrong(f"{self._shown} does not belong there")
            self._skip_lines()
        if ROOT not in self._defined:
            raise GrammarError(f"the grammar has no rule {ROOT}, which an answer is", f'Write: {ROOT} ::= "yes" | "no"')
        for name, line in self._used.items():
            if name not in self._defined:
                raise _wrong(line, f"there is no rule {name}")
        return "".join(rules)

    def _next(self) -> None:
        self._kind, self._text, self._line = next(self._tokens)

    @property
    def _shown(self) -> str:
        return {"end": "the end", "line": "the end of the line"}.get(self._kind, repr(self._text[:32]))

    def _wrong(self, problem: str) -> GrammarError:
        return _wrong(self._line, problem)

    def _skip_lines(self) -> None:
        while self._kind == "line":
            self._next()

    def _rule(self, name: str) -> str:
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _alternatives(self, depth: int) -> str:
        """Translate sequences between |. Line breaks are allowed after ::= and |, and in parentheses."""
        sequences = []
        while True:
            self._skip_lines()
            sequences.append(self._sequence(depth))
            if self._text != "|":
                return " | ".join(sequences)
            self._next()

    def _sequence(self, depth: int) -> str:
        items: list[str] = []
        while True:
            if self._kind == "line" and depth:
                self._skip_lines()
                continue
            if self._kind == "repeat":
                if not items:
                    raise self._wrong(f"{self._text} repeats nothing")
                items[-1] = (f"({items[-1]})" if items[-1][-1] in "*+?}" else items[-1]) + self._counts()
            elif self._kind == "literal":
                codes = [_code(_character(match[0])) for match in _CHARACTER.finditer(self._text)]
                items.append(f"({' '.join(f'/{code}/' for code in codes) or _EMPTY})")
            elif self._kind == "set":
                items.append(self._set())
            elif self._kind == "name":
                self._used.setdefault(self._text, self._line)
                items.append(self._rule(self._text))
            elif self._text == "." and self._kind == "mark":
                items.append("/(?s:.)/")
            elif self._text == "(" and self._kind == "mark":
                if depth == MAX_DEPTH:
                    raise self._wrong(f"parentheses are nested more than {MAX_DEPTH} deep")
                self._deepest = max(self._deepest, depth + 1)
                self._next()
                items.append(f"({self._alternatives(depth + 1)})")
                if self._text != ")":
                    raise self._wrong(f") is missing before {self._shown}")
            else:
                return " ".join(items) or _EMPTY
            self._next()

    def _counts(self) -> str:
        if self._text in "*+?":
            return self._text
        least, comma, most = re.sub(r"[{} \t]", "", self._text).partition(",")
        if most and int(most) < int(least):
            raise self._wrong(f"{self._text} asks for at least {int(least):,} and at most {int(most):,}")
        return f"{{{least}{comma}{most}}}"

    def _set(self) -> str:
        negative = self._text.startswith("^")
        members = [match[0] for match in _CHARACTER.finditer(self._text, int(negative))]
        ranges = []
        while members:
            first = last = _character(members.pop(0))
            if len(members) > 1 and members[0] == "-":
                last = _character(members[1])
                del members[:2]
            if last < first:
                raise self._wrong(f"[{self._text[:32]}] has a range that is none")
            ranges.append(f"{_code(first)}-{_code(last)}")
        if not ranges:
            if negative:
                return "/(?s:.)/"
            raise self._wrong("[] is a set without any character")
        return f"/[{'^' * negative}{''.join(ranges)}]/"


_EMPTY = '""'


def _character(text: str) -> str:
    """Return the character that a literal character or an escape stands for."""
    if len(text) == 1:
        return text
    if text[1] in "xuU":
        code = int(text[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise GrammarError(f"{text} in the grammar is no character")
        return chr(code)
    return _CONTROLS.get(text[1], text[1])


def _code(character: str) -> str:
    return f"\\x{{{ord(character):X}}}"


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield kind, text and line of each token, then an end token."""
    at, line = 0, 1
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None:
            raise _wrong(line, f"{text[at : at + 16]!r} is not GBNF")
        kind = match.lastgroup or ""
        if kind != "blank":
            yield kind, match[kind], line
        line += 1 if kind == "line" else match[0].count("\n")
        at = match.end()
    yield "end", "", line


def _wrong(line: int, problem: str) -> GrammarError:
    return GrammarError(f"line {line} of the grammar: {problem}")

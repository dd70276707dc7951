"""Print a session as a conversation, turn by turn, with errata and edits in their places."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from textwrap import wrap
from typing import NamedTuple

from notes_cli import output
from notes_cli.engine.pieces import Reason
from notes_cli.explanations import entry_why
from notes_cli.sessions.state import TRACE, Entry, State

INDENT = 12  # columns before a text, for who says it
SHORT = 50  # characters of a skill's text


class Said(NamedTuple):
    """A part of a conversation: who says it, or what it is, and its text."""

    who: str
    text: str


def show(state: State) -> None:
    """Print the conversation, a heading for each turn. On a terminal long lines are wrapped."""
    width = output.width(0)
    for number in range(state.turns + 1):
        parts = [*turn(state, number)]
        if parts and number:
            output.styled([(f"turn {number}", "bold")])
        for one in parts:
            who, *rest = _lines(one, width)
            output.styled([(who[:INDENT], "dim"), (who[INDENT:], "")])
            for line in rest:
                output.result(line)
        if parts:
            output.result("")


def turn(state: State, number: int) -> Iterator[Said]:
    """The parts of a turn, then the edits after it; of turn 0 the edits before all others."""
    entries = [entry for entry in state.entries if entry.turn == number]
    if number == 1 and state.system:
        yield Said("system", state.system)
    if any(entry.kind == "result" for entry in entries):
        yield Said("tool", state.questions[number - 1])
    for (kind, name), group in groupby((one for one in entries if one.kind not in ("edit", TRACE)), _same):
        pieces = [*group]
        if kind == "splice":
            yield Said("skill", _skill(state, name, pieces))
        elif kind == "erratum":
            yield from (Said("correction", piece.text.strip()) for piece in pieces)
        elif kind in ("answer", "thought"):
            who = "assistant" if kind == "answer" else "thought"
            yield Said(who, "".join(piece.text for piece in pieces).strip())
        elif kind == "question":
            yield Said("user", state.questions[number - 1])
    for entry in entries:
        if entry.kind == "edit":
            yield Said("edit", f"{entry.text} ({entry.how}): {entry_why(entry)}".removesuffix(": "))
        elif entry.kind == TRACE:
            yield Said("forgotten", f"{entry.text}: {entry_why(entry)}")


def _same(entry: Entry) -> tuple[str, str]:
    """The key by which neighbours are merged into one entry."""
    if entry.origin.reason is Reason.THOUGHT_END:
        return "", ""
    return "thought" if entry.thought else entry.kind, entry.name


def _skill(state: State, name: str, pieces: list[Entry]) -> str:
    tokens = sum(piece.tokens for piece in pieces)
    spliced = sum(piece.tokens for piece in pieces if piece.how == "spliced")
    text = next((one.text for one in state.skills if one.name == name), "")
    shown = f"{name}, {tokens} token{'s' * (tokens != 1)}, {spliced} of them spliced"
    return f"{shown}: {output.line(text, SHORT)}" if text else shown


def _lines(said: Said, width: int) -> list[str]:
    """A part in lines, what it is before the first of them."""
    lines = output.clean(said.text).splitlines() or [""]
    if width > 2 * INDENT:
        lines = [part for line in lines for part in _wrapped(line, width - INDENT)]
    before = [said.who.ljust(INDENT), *[" " * INDENT] * len(lines)]
    return [f"{head}{line}".rstrip() for head, line in zip(before, lines, strict=False)]


def _wrapped(line: str, width: int) -> list[str]:
    """A line in lines of whole words, all as far in as it is."""
    blanks = line[: len(line) - len(line.lstrip())]
    words = wrap(line.strip(), max(INDENT, width - len(blanks)), break_long_words=False, break_on_hyphens=False)
    return [blanks + part for part in words] or [""]

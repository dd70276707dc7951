"""Print a session turn by turn: questions, answers, reasoning, tool results, errata and edits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from textwrap import wrap
from typing import NamedTuple

from notes_cli import output
from notes_cli.engine.pieces import Reason
from notes_cli.explanations import entry_why
from notes_cli.sessions.state import TRACE, Entry, State

INDENT = 12  # columns before a text, for its label
SHORT = 50  # characters of a skill's text


class Part(NamedTuple):
    """A part of a conversation: its label, such as "user", and its text."""

    label: str
    text: str


def show(state: State) -> None:
    """Print the conversation, a heading for each turn. On a terminal long lines are wrapped."""
    width = output.width(0)
    for number in range(state.turns + 1):
        parts = [*turn(state, number)]
        if parts and number:
            output.styled([(f"turn {number}", "bold")])
        for part in parts:
            first, *rest = _lines(part, width)
            output.styled([(first[:INDENT], "dim"), (first[INDENT:], "")])
            for line in rest:
                output.result(line)
        if parts:
            output.result("")


def turn(state: State, number: int) -> Iterator[Part]:
    """Yield the parts of a turn, then the edits after it; turn 0 has the edits before turn 1."""
    entries = [entry for entry in state.entries if entry.turn == number]
    if number == 1 and state.system:
        yield Part("system", state.system)
    if any(entry.kind == "result" for entry in entries):
        yield Part("tool", state.questions[number - 1])
    pieces_of_turn = (entry for entry in entries if entry.kind not in ("edit", TRACE))
    for (kind, name), group in groupby(pieces_of_turn, _merge_key):
        pieces = [*group]
        if kind == "splice":
            yield Part("skill", _skill(state, name, pieces))
        elif kind == "erratum":
            yield from (Part("correction", piece.text.strip()) for piece in pieces)
        elif kind in ("answer", "thought"):
            label = "assistant" if kind == "answer" else "thought"
            yield Part(label, "".join(piece.text for piece in pieces).strip())
        elif kind == "question":
            yield Part("user", state.questions[number - 1])
    for entry in entries:
        if entry.kind == "edit":
            yield Part("edit", f"{entry.text} ({entry.how}): {entry_why(entry)}".removesuffix(": "))
        elif entry.kind == TRACE:
            yield Part("forgotten", f"{entry.text}: {entry_why(entry)}")


def _merge_key(entry: Entry) -> tuple[str, str]:
    """Return the key by which adjacent entries are merged."""
    if entry.origin.reason is Reason.THOUGHT_END:
        return "", ""
    return "thought" if entry.thought else entry.kind, entry.name


def _skill(state: State, name: str, pieces: list[Entry]) -> str:
    tokens = sum(piece.tokens for piece in pieces)
    spliced = sum(piece.tokens for piece in pieces if piece.how == "spliced")
    text = next((skill.text for skill in state.skills if skill.name == name), "")
    summary = f"{name}, {tokens} token{'s' * (tokens != 1)}, {spliced} of them spliced"
    return f"{summary}: {output.line(text, SHORT)}" if text else summary


def _lines(part: Part, width: int) -> list[str]:
    """Return a part as indented lines, with its label before the first."""
    lines = output.clean(part.text).splitlines() or [""]
    if width > 2 * INDENT:
        lines = [piece for line in lines for piece in _wrap(line, width - INDENT)]
    before = [part.label.ljust(INDENT), *[" " * INDENT] * len(lines)]
    return [f"{head}{line}".rstrip() for head, line in zip(before, lines, strict=False)]


def _wrap(line: str, width: int) -> list[str]:
    """Wrap a line at words, with its indentation."""
    blanks = line[: len(line) - len(line.lstrip())]
    words = wrap(line.strip(), max(INDENT, width - len(blanks)), break_long_words=False, break_on_hyphens=False)
    return [blanks + part for part in words] or [""]

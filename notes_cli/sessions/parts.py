"""Parts of a session by name: turns, chains of thought and results of tools, each by the number of its turn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from notes_cli.engine.patches import ranges
from notes_cli.errors import Help, SessionError
from notes_cli.sessions.state import Entry, State

FORMS = "a turn (3), turns (3-5), a chain of thought (thought:3) or the results of tools (tool:3)"
_NAME = re.compile(r"(?:(turn|thought|tool):)?([0-9]{1,9})(?:-([0-9]{1,9}))?")
_WHAT = {"thought": "chain of thought", "tool": "result of a tool"}


@dataclass(frozen=True, slots=True)
class Parts:
    """Numbers of turns: those that are meant as a whole, those of which the chain of thought or the results are."""

    turns: tuple[int, ...] = ()
    thoughts: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What is meant, for people."""
        return (
            *([f"turn{'s' * (len(self.turns) > 1)} {spans(self.turns)}"] if self.turns else []),
            *([f"the chain of thought of turn {spans(self.thoughts)}"] if self.thoughts else []),
            *([f"the results of tools of turn {spans(self.results)}"] if self.results else []),
        )


def parts_of(names: Sequence[str], state: State, session: str) -> Parts:
    """The parts that are meant. Raise SessionError for a name that is none, and for what the session does not have."""
    found: dict[str, set[int]] = {"turn": set(), "thought": set(), "tool": set()}
    see = Help.SHOW_SESSION(name=session)
    for name in names:
        match = _NAME.fullmatch(name.strip())
        if match is None:
            raise SessionError(f"{name!r} names no part of a session", f"Name {FORMS}")
        kind, first, last = match[1] or "turn", int(match[2]), int(match[3] or match[2])
        if first > last:
            raise SessionError(f"{name!r} ends before it begins", f"Name {FORMS}")
        if not 1 <= first <= last <= state.turns:
            has = f"has {state.turns} turn{'s' * (state.turns != 1)}"
            raise SessionError(f"there is no turn {first if first < 1 else last}: session {session} {has}", see)
        there = {number for number in range(first, last + 1) if kind == "turn" or any(of(state, number, kind))}
        if not there:
            where = spans(range(first, last + 1))
            raise SessionError(f"there is no {_WHAT[kind]} in turn {where} of session {session}", see)
        found[kind] |= there
    turns = found["turn"]
    return Parts(*(tuple(sorted(one)) for one in (turns, found["thought"] - turns, found["tool"] - turns)))


def of(state: State, turn: int, kind: str) -> Iterator[Entry]:
    """The pieces of a turn that are of a chain of thought, or results of tools."""
    of_turn = (entry for entry in state.entries if entry.turn == turn)
    return (entry for entry in of_turn if (entry.thought if kind == "thought" else entry.kind == "result"))


def spans(numbers: Sequence[int]) -> str:
    """Numbers for people: 1, 3-5."""
    return ", ".join(str(first) if last == first + 1 else f"{first}-{last - 1}" for first, last in ranges(numbers))

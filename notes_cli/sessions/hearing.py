"""What a session has not heard of that everybody is told.

A correction for everybody edits the sessions that are there. One that was in its first turn then, was held by another
process, or was somewhere else, hears of it at its next question. The last word counts: what a session was given by an
edit of its own, or by a question, after a correction was made is not taken back by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from notes_cli.library.standing import Standing
from notes_cli.sessions.state import State


def unheard(state: State, errata: Sequence[Standing]) -> dict[str, str]:
    """The values that fields, called `skill.field`, are to be given by these errata, the latest last. One is of a skill
    that is the same by its marks, and that says or has said of the field what its text did."""
    known, fields, found = state.known, state.fields, dict[str, str]()
    for skill in state.skills:
        marks = state.marks.get(skill.name, ())
        mine = [one for one in errata if one.skill == skill.name and one.is_of(marks)]
        for name in dict.fromkeys(span.name for span in skill.fields):
            key, now = f"{skill.name}.{name}", fields[known.key(skill.name, name)]
            about = [one for one in mine if one.field == name and one.was in (now, state.first.get(key))]
            if about and about[-1].value != now and not _heard(state, about[-1]):
                found[key] = about[-1].value
    return found


def _heard(state: State, one: Standing) -> bool:
    """Whether the session was given a value of its own after an erratum, or the erratum itself, if only to take it
    back."""
    key = f"{one.skill}.{one.field}"
    undone = (time for name, value, time in state.undone if value == one.value and key in _keys(state, name))
    return any(time >= one.time for time in (state.heard.get(key, ""), *undone))


def _keys(state: State, name: str) -> list[str]:
    return [f"{one.skill}.{one.field}" for one in state.known.find(name)]

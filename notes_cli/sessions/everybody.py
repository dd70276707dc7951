"""A correction for everybody: a standing erratum of the library, and an edit of every session that has the skill."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from notes_cli.editing.methods import ERRATUM
from notes_cli.errors import NotesError
from notes_cli.library.info import SegmentInfo
from notes_cli.library.standing import Standing, StandingErrata, standing
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.fields import clean_value
from notes_cli.text.references import Known


@dataclass(frozen=True, slots=True)
class Corrected:
    """What was done: the errata that hold now, the sessions that were edited, and why others were not."""

    errata: tuple[Standing, ...]
    edited: tuple[str, ...]
    skipped: Mapping[str, NotesError]


def correct(workspace: Workspace, errata: StandingErrata, values: Mapping[str, str]) -> Corrected:
    """`correcting`, all at once."""
    going = correcting(workspace, errata, values)
    while True:
        try:
            next(going)
        except StopIteration as done:
            found: Corrected = done.value
            return found


def correcting(
    workspace: Workspace, errata: StandingErrata, values: Mapping[str, str]
) -> Generator[None, None, Corrected]:
    """Give fields of compiled skills other values, for everybody. A field is named as elsewhere, `returns.date` where
    several skills have a date, `*.date` for all of them. It pauses before each session, of which there may be many.
    Raise SkillError for a field that no skill has; nothing is changed then."""
    infos = _compiled(workspace)
    known = Known((info.name, [span.name for span in info.fields]) for info in infos.values())
    new: list[Standing] = []
    for name, value in values.items():
        for one in known.resolve(name, "no compiled skill has"):
            was = next(span.value for span in infos[one.skill].fields if span.name == one.field)
            new.append(standing(one.skill, one.field, was, clean_value(one.key, value)))
    errata.add(new)
    edited, skipped = yield from _edited(workspace, new)
    return Corrected(tuple(new), tuple(edited), skipped)


def _compiled(workspace: Workspace) -> dict[str, SegmentInfo]:
    identity = workspace.identity
    infos = [entry.info for entry in workspace.library.entries() if entry.info]
    return {info.name: info for info in infos if info.identity == identity}


def _edited(
    workspace: Workspace, new: Sequence[Standing]
) -> Generator[None, None, tuple[list[str], dict[str, NotesError]]]:
    """Edit all sessions that have these fields; which were, and why others could not be."""
    sessions = Sessions(workspace.paths.sessions)
    edited: list[str] = []
    skipped: dict[str, NotesError] = {}
    for name in sessions.names():
        yield
        try:
            if not _concerned(sessions.find(name).state.known, new):
                continue
            with sessions.locked(name) as stored, Session(workspace, stored) as session:
                if tell(session, new):
                    edited.append(name)
        except NotesError as error:
            skipped[name] = error
    return edited, skipped


def _concerned(known: Known, new: Sequence[Standing]) -> bool:
    return any(f"{one.skill}.{one.field}" in known for one in new)


def tell(session: Session, new: Sequence[Standing]) -> int:
    """Have errata said in a session before its next question, where it has the skill and not the value; how many."""
    count = 0
    for one in new:
        known = session.state.known
        if f"{one.skill}.{one.field}" not in known:
            continue
        key = known.key(one.skill, one.field)
        if session.state.fields[key] == one.value:
            continue
        session.edit(key, one.value, ERRATUM)
        count += 1
    return count

"""A correction for everybody: a standing erratum of the library, and an edit of every session that has the skill."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from notes_cli.editing.methods import ERRATUM
from notes_cli.errors import NotesError
from notes_cli.library.info import SegmentInfo
from notes_cli.library.standing import GlobalErrata, GlobalErratum, marks_of, now, standing
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.sessions.state import unheard
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import Known


@dataclass(frozen=True, slots=True)
class Corrected:
    """What was done: the errata that hold now, the sessions that were edited, and why others were not."""

    errata: tuple[GlobalErratum, ...]
    edited: tuple[str, ...]
    skipped: Mapping[str, NotesError]


def correct(workspace: Workspace, errata: GlobalErrata, values: Mapping[str, str]) -> Corrected:
    """`correcting`, all at once."""
    going = correcting(workspace, errata, values)
    while True:
        try:
            next(going)
        except StopIteration as done:
            found: Corrected = done.value
            return found


def correcting(
    workspace: Workspace, errata: GlobalErrata, values: Mapping[str, str]
) -> Generator[None, None, Corrected]:
    """Give fields of compiled skills other values, for everybody. A field is named as elsewhere, `returns.date` where
    several skills have a date, `*.date` for all of them. It pauses before each session, of which there may be many.
    Raise SkillError for a field that no skill has; nothing is changed then."""
    infos = _compiled(workspace)
    known = Known((info.name, [span.name for span in info.fields]) for info in infos.values())
    new: list[GlobalErratum] = []
    for name, value in values.items():
        for one in known.resolve(name, "no compiled skill has"):
            was = next(span.value for span in infos[one.skill].fields if span.name == one.field)
            marks = marks_of(infos[one.skill].source, infos[one.skill].text)
            new.append(standing(one.skill, one.field, was, clean_value(one.key, value), marks))
    new = errata.add(new)
    edited, skipped = yield from _edited(workspace, errata)
    return Corrected(tuple(new), tuple(edited), skipped)


def _compiled(workspace: Workspace) -> dict[str, SegmentInfo]:
    identity = workspace.identity
    infos = [entry.info for entry in workspace.library.entries() if entry.info]
    return {info.name: info for info in infos if info.identity == identity}


def _edited(
    workspace: Workspace, errata: GlobalErrata
) -> Generator[None, None, tuple[list[str], dict[str, NotesError]]]:
    """Edit all sessions that have not heard of what everybody is told; which were, and why others could not be."""
    sessions = Sessions(workspace.paths.sessions)
    edited: list[str] = []
    skipped: dict[str, NotesError] = {}
    for name in sessions.names():
        yield
        try:
            if not unheard(sessions.find(name).state, errata.all()):
                continue
            with sessions.locked(name) as stored, Session(workspace, stored) as session:
                if tell(session, errata):
                    edited.append(name)
        except NotesError as error:
            skipped[name] = error
    return edited, skipped


def tell(session: Session, errata: GlobalErrata) -> int:
    """Have said in a session before its next question what holds now, which may be later than what it is called for;
    how much that was."""
    since = now()
    found = unheard(session.state, errata.all())
    for key, value in found.items():
        session.edit(key, value, ERRATUM, since)
    return len(found)

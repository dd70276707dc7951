"""Applies a global erratum: stores it in the library, and edits every session that has the skill."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from notes_cli.errors import NotesError
from notes_cli.library.global_errata import GlobalErrata, GlobalErratum, marks_of, now
from notes_cli.library.info import SegmentInfo
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.sessions.state import unapplied
from notes_cli.text.erratum import known_fields
from notes_cli.text.fields import clean_value
from notes_cli.text.skill import Skill


@dataclass(frozen=True, slots=True)
class Corrected:
    """The errata that were added, the sessions edited, and the errors of those that could not be."""

    errata: tuple[GlobalErratum, ...]
    edited: tuple[str, ...]
    skipped: Mapping[str, NotesError]


def correct(workspace: Workspace, errata: GlobalErrata, values: Mapping[str, str]) -> Corrected:
    """Run `correcting` to its end."""
    steps = correcting(workspace, errata, values)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            corrected: Corrected = end.value
            return corrected


def correcting(
    workspace: Workspace, errata: GlobalErrata, values: Mapping[str, str]
) -> Generator[None, None, Corrected]:
    """Correct fields of compiled skills globally. `values` by field; `returns.date` if several skills have a date,
    `*.date` for all of them. Yields before each session, so that a server can run other work in between. Raises
    SkillError, before any change, for a field that no skill has."""
    identity, sessions = workspace.identity, Sessions(workspace.paths.sessions)
    infos = [entry.info for entry in workspace.library.entries() if entry.info]
    new = errata.add(errata_of({info.name: info for info in infos if info.identity == identity}, values))
    edited: list[str] = []
    skipped: dict[str, NotesError] = {}
    for name in sessions.names():
        yield
        try:
            if not unapplied(sessions.find(name).state, errata.all()):
                continue
            with sessions.locked(name) as stored, Session(workspace, stored) as session:
                if apply_errata(session, errata):
                    edited.append(name)
        except NotesError as error:
            skipped[name] = error
    return Corrected(tuple(new), tuple(edited), skipped)


def errata_of(skills: Mapping[str, SegmentInfo | Skill], values: Mapping[str, str]) -> list[GlobalErratum]:
    """Return errata for new values of fields, as `correcting` takes them. Raises SkillError for a field that no skill
    has."""
    known = known_fields(*skills.values())
    new: list[GlobalErratum] = []
    for name, value in values.items():
        for target in known.resolve(name, "no compiled skill has"):
            skill = skills[target.skill]
            was = next(span.value for span in skill.fields if span.name == target.field)
            marks = marks_of(skill.source, skill.text)
            cleaned = clean_value(target.key, value)
            new.append(GlobalErratum(target.skill, target.field, was, cleaned, now(), marks))
    return new


def apply_errata(session: Session, errata: GlobalErrata) -> int:
    """Queue the global errata that a session lacks, also newer ones, for its next question. Returns their number."""
    read_at = now()
    missing = unapplied(session.state, errata.all())
    for key, value in missing.items():
        session.queue(key, value, read_at)
    return len(missing)

"""Errata for everybody over HTTP, and the sessions on disk that are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from notes_cli.errors import NotesError, SessionError
from notes_cli.library.global_errata import GlobalErrata, holding
from notes_cli.runtime.contexts import DEFAULT_CONTEXT
from notes_cli.serve.parsing import Reader
from notes_cli.serve.prepare import check_size
from notes_cli.serve.refusals import Refused
from notes_cli.serve.replies import Json
from notes_cli.serve.scheduler import Scheduler
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.global_correction import correcting
from notes_cli.text.keys import Known

PART, ALL = 16, 4  # of the tokens of a context: what one value may have, and all that are told of a skill


def parse(data: Any) -> dict[str, str]:
    """A field, as elsewhere `date`, `returns.date` or `*.date`, and its value. Raise Refused."""
    given = Reader(data)
    skill, field, value = given.text("skill"), given.text("field"), given.text("value")
    given.end()
    for name, text in (("field", field), ("value", value)):
        if not text:
            raise Refused(400, f"{name} is missing", param=name)
    return {f"{skill}.{field}" if skill else field: value}


def correcting_all(scheduler: Scheduler, values: dict[str, str]) -> Iterator[Json | None]:
    """Tell everybody, a session at a time, None after each; then how many conversations will be told before their next
    question, and which sessions were. Each part needs the context, and others may have it between two of them."""
    state = scheduler.state
    if state.errata is None:
        raise Refused(400, "this library keeps no errata")
    _check_length(scheduler, state.errata, values)
    going, done = correcting(scheduler.workspace, state.errata, values), None
    while done is None:
        try:
            yield next(going)
        except StopIteration as ended:
            done = ended.value
    told = sum(state.conversations.having(one.skill, one.field, one.value) for one in done.errata)
    errata = [{"skill": one.skill, "field": one.field, "was": one.was, "value": one.value} for one in done.errata]
    skipped = {name: str(error) for name, error in done.skipped.items()}
    yield {"errata": errata, "told": told, "sessions": list(done.edited), "skipped": skipped}


def _check_length(scheduler: Scheduler, errata: GlobalErrata, values: dict[str, str]) -> None:
    """Raise Refused for what would leave others no room: every prompt that has the skill says it. SkillError for a
    field that no skill has."""

    def tokens(text: str) -> int:
        return len(scheduler.workspace.model.tokenize(text))

    check_size(scheduler.state, [*values.values()], "value")
    infos = {one.name: one for one in scheduler.segment_cache.known()}
    known = Known((one.name, [span.name for span in one.fields]) for one in infos.values())
    longest = scheduler.state.longest or DEFAULT_CONTEXT
    for key, value in values.items():
        for one in known.resolve(key, "no compiled skill has"):
            fields = {span.name: span.value for span in infos[one.skill].fields}
            if value == fields[one.field]:  # it is taken back
                continue
            told = {**holding(errata.all(), one.skill, fields), one.field: value}
            for what, count, most in (
                ("value has", tokens(value), longest // PART),
                (f"the corrections of {one.skill} would have", sum(map(tokens, told.values())), longest // ALL),
            ):
                if count > most:
                    why = f"{what} {count:,} tokens: {most:,} at most, as every prompt with the skill has it"
                    raise Refused(400, why, param="value", code="invalid_value")


def sessions(scheduler: Scheduler) -> list[Json]:
    """The sessions on disk; one that cannot be read has a problem."""
    folder = Sessions(scheduler.workspace.paths.sessions)
    found: list[Json] = []
    for name in folder.names():
        try:
            stored = folder.find(name)
            if stored.header is None:
                raise SessionError(f"session {name} has not begun")
        except NotesError as error:
            found.append({"name": name, "problem": str(error)})
            continue
        state = stored.state
        facts = {"turns": state.turns, "tokens": len(state.tokens), "fields": state.fields}
        identity = stored.header.identity
        model = f"{identity.model} {identity.quantization}"
        skills = [skill.name for skill in state.skills]
        found.append(
            {"name": name, "problem": None, **facts, "skills": skills, "model": model, "changed": stored.changed}
        )
    return found

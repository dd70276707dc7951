"""Adds global errata over HTTP, which correct all conversations and sessions, and lists the sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from notes_cli.errors import NotesError, SessionError
from notes_cli.explanations import erratum_as_json
from notes_cli.library.global_errata import GlobalErrata, holding
from notes_cli.runtime.workspace import DEFAULT_CONTEXT
from notes_cli.serve.parsing import Reader
from notes_cli.serve.prepare import check_size
from notes_cli.serve.refusals import Refused, invalid
from notes_cli.serve.replies import Json
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.global_correction import correcting
from notes_cli.text.erratum import Known

VALUE_SHARE, SKILL_SHARE = 16, 4  # a value may have 1/16 of the context's tokens, all errata of a skill 1/4


def parse_correction(data: Any) -> dict[str, str]:
    """Return the new value by field: `date`, `returns.date` or `*.date`. Raises Refused."""
    reader = Reader(data)
    skill, field, value = reader.text("skill"), reader.text("field"), reader.text("value")
    reader.end()
    for name, text in (("field", field), ("value", value)):
        if not text:
            raise Refused(400, f"{name} is missing", param=name)
    return {f"{skill}.{field}" if skill else field: value}


def apply_correction(scheduler: DecodeThread, values: dict[str, str]) -> Iterator[Json | None]:
    """Add global errata and edit the sessions. Each step needs the context, and yields None after a session, so that
    others are decoded between two steps; the last yields the errata, the edited sessions, and the number of
    conversations that get the errata before their next question. Raises Refused, SkillError."""
    state = scheduler.state
    if state.errata is None:
        raise Refused(400, "this library keeps no errata")
    _check_length(scheduler, state.errata, values)
    corrected = yield from correcting(scheduler.workspace, state.errata, values)
    conversations, errata = 0, []
    for erratum in corrected.errata:
        conversations += state.conversations.count_outdated(erratum.skill, erratum.field, erratum.value)
        errata.append(erratum_as_json(erratum))
    skipped = {name: str(error) for name, error in corrected.skipped.items()}
    yield {"errata": errata, "conversations": conversations, "sessions": list(corrected.edited), "skipped": skipped}


def _check_length(scheduler: DecodeThread, errata: GlobalErrata, values: dict[str, str]) -> None:
    """Limit the errata's tokens, as every prompt with the skill has them. Raises Refused; SkillError for a field that
    no skill has."""

    def tokens(text: str) -> int:
        return len(scheduler.workspace.model.tokenize(text))

    check_size(scheduler.state, [*values.values()], "value")
    infos = {info.name: info for info in scheduler.segment_cache.known()}
    known = Known((info.name, [span.name for span in info.fields]) for info in infos.values())
    longest = scheduler.state.longest or DEFAULT_CONTEXT
    for key, value in values.items():
        for field in known.resolve(key, "no compiled skill has"):
            fields = {span.name: span.value for span in infos[field.skill].fields}
            if value == fields[field.field]:  # revokes the errata of the field
                continue
            new = {**holding(errata.all(), field.skill, fields), field.field: value}
            total = sum(map(tokens, new.values()))
            for subject, count, most in (
                ("value has", tokens(value), longest // VALUE_SHARE),
                (f"the corrections of {field.skill} would have", total, longest // SKILL_SHARE),
            ):
                if count > most:
                    message = f"{subject} {count:,} tokens: {most:,} at most, as every prompt with the skill has it"
                    raise invalid("value", message)


def sessions(scheduler: DecodeThread) -> list[Json]:
    """Return the sessions on disk, with a `problem` if one cannot be read."""
    folder = Sessions(scheduler.workspace.paths.sessions)
    listed: list[Json] = []
    for name in folder.names():
        try:
            stored = folder.find(name)
            if stored.header is None:
                raise SessionError(f"session {name} has not begun")
        except NotesError as error:
            listed.append({"name": name, "problem": str(error)})
            continue
        state = stored.state
        facts = {"turns": state.turns, "tokens": len(state.tokens), "fields": state.fields}
        identity = stored.header.identity
        model = f"{identity.model} {identity.quantization}"
        skills = [skill.name for skill in state.skills]
        listed.append(
            {"name": name, "problem": None, **facts, "skills": skills, "model": model, "changed": stored.changed}
        )
    return listed

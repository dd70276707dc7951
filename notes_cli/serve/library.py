"""The library over HTTP: lists, compiles and removes skills, lists sessions, adds errata for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from typing import Any

from notes_cli.engine.segment import STORED_TYPES
from notes_cli.errors import CompilingError, Help, NotesError, Progress, SegmentError, SessionError, TakenError
from notes_cli.explanations import attributes, entry_as_json, erratum_as_json
from notes_cli.library.global_errata import GlobalErrata, holding
from notes_cli.library.store import Library, SegmentFile, source_text
from notes_cli.runtime.compile import block_warnings
from notes_cli.runtime.recompile import Compiled, compile_to_library
from notes_cli.runtime.workspace import DEFAULT_CONTEXT
from notes_cli.serve.event_stream import encode_event
from notes_cli.serve.parsing import Reader
from notes_cli.serve.prepare import check_size
from notes_cli.serve.refusals import Refused, as_refusal, invalid
from notes_cli.serve.replies import Json
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import add_errata, correct_sessions
from notes_cli.text.erratum import known_fields
from notes_cli.text.skill import Skill, parse_skill

VALUE_SHARE, SKILL_SHARE = 16, 4  # a value may have 1/16 of the context's tokens, all errata of a skill 1/4
PAUSE = 0.2  # seconds between attempts while another process compiles the same text


def list_skills(scheduler: DecodeThread) -> list[Json]:
    """Return all compiled skills as in `notes ls`, with `model_matches`, and `standing`: values by global errata."""
    workspace = scheduler.workspace
    identity = workspace.identity
    errata = scheduler.state.errata.all() if scheduler.state.errata else ()
    skills = []
    for entry in workspace.library.entries():
        facts = entry_as_json(entry, str(entry.problem) if entry.problem else None)
        matches = entry.info is not None and entry.info.identity == identity
        corrected = holding(errata, entry.info) if entry.info else {}
        skills.append({**facts, "model_matches": matches, "standing": corrected})
    return skills


def skill_json(scheduler: DecodeThread, name: str) -> Json:
    """Return one skill with its text and the spans of its fields. Raises NotesError for an unknown one."""
    workspace = scheduler.workspace
    entries = workspace.library.entries(name)
    if not entries:
        raise _unknown(name)
    identity = workspace.identity
    entry = min(entries, key=lambda entry: entry.info is None or entry.info.identity != identity)
    facts = entry_as_json(entry, str(entry.problem) if entry.problem else None)
    info = entry.info
    if info is None:
        return {**facts, "model_matches": False}
    return {
        **facts,
        **attributes(info, "description", "text"),
        "spans": [attributes(span, "name", "value", "start", "end") for span in info.fields],
        "model_matches": info.identity == identity,
    }


def remove_skill(scheduler: DecodeThread, name: str) -> Json:
    """Remove a skill of this model; requests that have it open are not affected."""
    library = scheduler.workspace.library
    if not isinstance(library, Library):
        raise Refused(400, "skills of this library cannot be removed here")
    if name not in library.names():
        raise _unknown(name)
    library.find(name, scheduler.workspace.identity)
    return {"name": name, "deleted": len(library.remove(name, scheduler.workspace.identity)) > 0}


def _unknown(name: str) -> SegmentError:
    return SegmentError(f"no compiled skill {name[:80]!r}", Help.LIST_SKILLS())


def _parse(scheduler: DecodeThread, data: Any) -> tuple[Skill, int, dict[str, Any], list[str]]:
    """Return the skill, its cells, options of its compile, and warnings. Raises Refused, SkillError."""
    reader = Reader(data)
    name, text = reader.text("name"), reader.text("text")
    force, blocks, kv = reader.flag("force"), reader.any("blocks"), reader.any("kv")
    if reader.any("path") is not None:
        raise Refused(400, "path is not supported: send the text", param="path")
    reader.end()
    if not name:
        raise Refused(400, "name is missing: what the skill is to be called", param="name")
    if blocks not in (None, "headings") and (not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1):
        raise reader.wrong("blocks", "a whole number, or headings", blocks)
    if kv not in (None, *STORED_TYPES):
        raise reader.wrong("kv", f"one of {', '.join(STORED_TYPES)}", kv)
    workspace, wanted = scheduler.workspace, blocks or 1
    check_size(scheduler.state, [text], "text")
    try:
        skill = parse_skill(text, source="-", default=name, name=name, where=f"the skill {name[:80]!r}")
        warnings = [*skill.warnings, *(block_warnings(workspace, skill, wanted) if wanted != 1 else ())]
        workspace.check_text(skill.text)
        cells = len(workspace.left_context) + len(workspace.model.tokenize(skill.text))
    except NotesError as error:
        raise _text_refusal(error) from error
    return skill, cells, {"blocks": wanted, "kv": kv or "f16", "force": force}, warnings


async def compile_events(scheduler: DecodeThread, data: Any, size: int) -> AsyncGenerator[bytes, None]:
    """Compile a text, and yield the progress as encoded events, then the skill. `size`: bytes of the request. Raises
    NotesError."""
    loop, waiting, gone = asyncio.get_running_loop(), asyncio.Queue[Json | None](), False

    def on_progress(progress: Json) -> None:  # in the decode thread
        if gone:
            raise Refused(400, "the client has gone")
        with suppress(RuntimeError):  # asyncio's loop has ended
            loop.call_soon_threadsafe(waiting.put_nowait, progress)

    compiling = asyncio.ensure_future(_compile_text(scheduler, data, size, on_progress))
    compiling.add_done_callback(lambda _: waiting.put_nowait(None))
    try:
        while (progress := await waiting.get()) is not None:
            yield encode_event(progress)
        yield encode_event({"skill": await compiling})
    finally:
        gone = True
        compiling.cancel()
        await asyncio.gather(compiling, return_exceptions=True)


async def _compile_text(scheduler: DecodeThread, data: Any, size: int, on_progress: Callable[[Json], object]) -> Json:
    """Compile a text while other requests are decoded. Returns the skill. Raises Refused, SkillError."""
    parsed = await asyncio.wrap_future(scheduler.prepare(lambda: _parse(scheduler, data), size=size))
    workspace, (skill, cells, options, notices) = scheduler.workspace, parsed

    def step(label: str) -> Progress:
        def update(done: int, total: int) -> None:
            on_progress({"step": label, "done": done, "total": total})
            scheduler.yield_to_others()

        return update

    def compile_skill() -> Compiled:
        how = {**options, "progress": step("compiling"), "wait": 0}
        with scheduler.budget.reserving(cells):
            return compile_to_library(workspace, skill, say=lambda notice: notices.append(str(notice)), **how)

    while True:
        try:
            compiled = await asyncio.wrap_future(scheduler.call(compile_skill, long=True))
            break
        except CompilingError:  # another process compiles it: wait for its result
            on_progress({"step": "waiting for another process", "done": 0, "total": 1})
            await asyncio.sleep(PAUSE)
        except TakenError:
            origins = " or ".join({_origin(entry) for entry in workspace.library.entries(skill.name)})
            message = f"the library has another skill {skill.name} already, {origins}: force writes over it"
            raise Refused(409, message, param="name", code="name_taken") from None
        except NotesError as error:
            raise _text_refusal(error) from error
    facts = await asyncio.wrap_future(scheduler.prepare(lambda: skill_json(scheduler, skill.name)))
    return {**facts, "reasons": list(compiled.reasons), "notices": notices}


def _origin(entry: SegmentFile) -> str:
    source = entry.info.source if entry.info else ""
    return "from no file (it was sent to a server, or piped in)" if source == "-" else f"from {source_text(source)}"


def _text_refusal(error: NotesError) -> Refused:
    refusal = as_refusal(error)
    if refusal.status == 400:
        refusal.param = "text"
    return refusal


# Global errata, and sessions.


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
    added, outcomes = add_errata(scheduler.workspace, state.errata, values), dict[str, int | NotesError]()
    for name, outcome in correct_sessions(scheduler.workspace, state.errata):
        outcomes[name] = outcome
        yield None
    conversations, errata = 0, []
    for erratum in added:
        conversations += state.conversations.count_outdated(erratum.skill, erratum.field, erratum.value)
        errata.append(erratum_as_json(erratum))
    skipped = {name: str(outcome) for name, outcome in outcomes.items() if isinstance(outcome, NotesError)}
    edited = [name for name, outcome in outcomes.items() if outcome and name not in skipped]
    yield {"errata": errata, "conversations": conversations, "sessions": edited, "skipped": skipped}


def _check_length(scheduler: DecodeThread, errata: GlobalErrata, values: dict[str, str]) -> None:
    """Limit the errata's tokens, as every prompt with the skill has them. Raises Refused; SkillError for a field that
    no skill has."""

    def tokens(text: str) -> int:
        return len(scheduler.workspace.model.tokenize(text))

    check_size(scheduler.state, [*values.values()], "value")
    for value in values.values():
        scheduler.workspace.check_text(value)
    infos = {info.name: info for info in scheduler.segment_cache.known()}
    known = known_fields(*infos.values())
    longest = scheduler.state.longest or DEFAULT_CONTEXT
    for key, value in values.items():
        for field in known.resolve(key, "no compiled skill has"):
            info = infos[field.skill]
            if (field.field, value) in [
                (span.name, span.value) for span in info.fields
            ]:  # revokes the errata of the field
                continue
            new = {**holding(errata.all(), info), field.field: value}
            total = sum(map(tokens, new.values()))
            for subject, count, most in (
                ("value has", tokens(value), longest // VALUE_SHARE),
                (f"the corrections of {field.skill} would have", total, longest // SKILL_SHARE),
            ):
                if count > most:
                    message = f"{subject} {count:,} tokens: {most:,} at most, as every prompt with the skill has it"
                    raise invalid("value", message)


def list_sessions(scheduler: DecodeThread) -> list[Json]:
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
        state, identity = stored.state, stored.header.identity
        skills, model = [skill.name for skill in state.skills], f"{identity.model} {identity.quantization}"
        facts = {"turns": state.turns, "tokens": len(state.tokens), "fields": state.fields, "skills": skills}
        listed.append({"name": name, "problem": None, **facts, "model": model, "changed": stored.changed})
    return listed

"""The library over HTTP: list compiled skills, compile a text, remove a skill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notes_cli.engine.segment import STORED_TYPES
from notes_cli.errors import CompilingError, Help, NotesError, Progress, SegmentError, TakenError
from notes_cli.explanations import entry_as_json
from notes_cli.library.standing import holding
from notes_cli.library.store import Library, SegmentFile, source_text
from notes_cli.runtime.compile import block_warnings
from notes_cli.runtime.recompile import Compiled, compile_to_library
from notes_cli.serve.parsing import Reader
from notes_cli.serve.prepare import check_size
from notes_cli.serve.refusals import Refused, refused
from notes_cli.serve.replies import Json
from notes_cli.serve.scheduler import Scheduler
from notes_cli.text.blocks import Blocks
from notes_cli.text.skill import Skill, parse_skill

PAUSE = 0.2  # seconds between two tries to compile what another process compiles


def listed(scheduler: Scheduler) -> list[Json]:
    """All compiled skills, as `notes ls` has them; `model_matches`: whether they are for this model, `standing`: the
    values of fields that everybody is told instead."""
    workspace = scheduler.workspace
    identity = workspace.identity
    errata = scheduler.state.errata.all() if scheduler.state.errata else ()
    found = []
    for entry in workspace.library.entries():
        facts = entry_as_json(entry, str(entry.problem) if entry.problem else None)
        matches = entry.info is not None and entry.info.identity == identity
        instead = holding(errata, entry.name, facts.get("fields", {}))
        found.append({**facts, "model_matches": matches, "standing": instead})
    return found


def shown(scheduler: Scheduler, name: str) -> Json:
    """One skill, with its text and where its fields are in it. Raise NotesError where it is not there."""
    workspace = scheduler.workspace
    entries = workspace.library.entries(name)
    if not entries:
        raise _unknown(name)
    identity = workspace.identity
    entries.sort(key=lambda one: one.info is None or one.info.identity != identity)
    entry = entries[0]
    facts = entry_as_json(entry, str(entry.problem) if entry.problem else None)
    info = entry.info
    if info is None:
        return {**facts, "model_matches": False}
    spans = [{"name": span.name, "value": span.value, "start": span.start, "end": span.end} for span in info.fields]
    return {
        **facts,
        "description": info.description,
        "text": info.text,
        "spans": spans,
        "model_matches": info.identity == identity,
    }


def removed(scheduler: Scheduler, name: str) -> Json:
    """Remove a skill of this model. Those who have it go on with it."""
    library = scheduler.workspace.library
    if not isinstance(library, Library):
        raise Refused(400, "skills of this library cannot be removed here")
    if name not in library.names():
        raise _unknown(name)
    library.find(name, scheduler.workspace.identity)
    return {"name": name, "deleted": len(library.remove(name, scheduler.workspace.identity)) > 0}


def _unknown(name: str) -> SegmentError:
    return SegmentError(f"no compiled skill {name[:80]!r}", Help.LIST_SKILLS())


@dataclass(frozen=True, slots=True)
class _Compile:
    """A request to compile a text."""

    skill: Skill
    cells: int
    blocks: Blocks
    kv: str
    force: bool
    influence: bool
    warnings: tuple[str, ...]


def _parse(scheduler: Scheduler, data: Any) -> _Compile:
    """Raise Refused, SkillError."""
    given = Reader(data)
    name, text = given.text("name"), given.text("text")
    force, influence = given.flag("force"), given.flag("influence")
    blocks, kv = given.any("blocks"), given.any("kv")
    if given.any("path") is not None:
        raise Refused(400, "path is not supported: send the text", param="path")
    given.end()
    if not name:
        raise Refused(400, "name is missing: what the skill is to be called", param="name")
    if blocks not in (None, "headings") and (not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1):
        raise given.wrong("blocks", "a whole number, or headings", blocks)
    if kv not in (None, *STORED_TYPES):
        raise given.wrong("kv", f"one of {', '.join(STORED_TYPES)}", kv)
    workspace, wanted = scheduler.workspace, blocks or 1
    check_size(scheduler.state, [text], "text")
    try:
        skill = parse_skill(text, source="-", default=name, name=name, where=f"the skill {name[:80]!r}")
        warnings = (*skill.warnings, *(block_warnings(workspace, skill, wanted) if wanted != 1 else ()))
        cells = len(workspace.left_context) + len(workspace.model.tokenize(skill.text))
    except NotesError as error:
        raise _of_text(error) from error
    return _Compile(skill, cells, wanted, kv or "f16", force, influence, warnings)


async def compile_text(scheduler: Scheduler, data: Any, told: Callable[[Json], object]) -> Json:
    """Compile a text, telling the progress; other requests are answered meanwhile. Raise Refused, SkillError."""
    wanted = await asyncio.wrap_future(scheduler.prepare(lambda: _parse(scheduler, data)))
    workspace, skill, notices = scheduler.workspace, wanted.skill, [*wanted.warnings]

    def step(label: str) -> Progress:
        def update(done: int, total: int) -> None:
            told({"step": label, "done": done, "total": total})
            scheduler.between()

        return update

    def compiled() -> Compiled:
        with scheduler.budget.reserving(wanted.cells):
            return compile_to_library(
                *(workspace, skill),
                force=wanted.force,
                progress=step("compiling"),
                measure=step("measuring influence") if wanted.influence else None,
                blocks=wanted.blocks,
                kv=wanted.kv,
                say=lambda notice: notices.append(str(notice)),
                wait=0,
            )

    while True:
        try:
            made = await asyncio.wrap_future(scheduler.call(compiled, long=True))
            break
        except CompilingError:  # another process compiles it: then it need not be done again
            told({"step": "waiting for another process", "done": 0, "total": 1})
            await asyncio.sleep(PAUSE)
        except TakenError:
            there = " or ".join({_origin(one) for one in workspace.library.entries(skill.name)})
            what = f"the library has another skill {skill.name} already, {there}: force writes over it"
            raise Refused(409, what, param="name", code="name_taken") from None
        except NotesError as error:
            raise _of_text(error) from error
    facts = await asyncio.wrap_future(scheduler.prepare(lambda: shown(scheduler, skill.name)))
    return {**facts, "reasons": list(made.reasons), "notices": notices}


def _origin(entry: SegmentFile) -> str:
    """Where the text of a skill came from, for people."""
    source = entry.info.source if entry.info else ""
    return "from no file (it was sent to a server, or piped in)" if source == "-" else f"from {source_text(source)}"


def _of_text(error: NotesError) -> Refused:
    """What is wrong with a text that was sent."""
    found = refused(error)
    if found.status == 400:
        found.param = "text"
    return found

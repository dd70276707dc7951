"""The library over HTTP: what is compiled, compiling a text, and removing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from notes_cli.engine.segment import KEPT
from notes_cli.errors import CompilingError, Help, NotesError, Progress, SegmentError, TakenError
from notes_cli.explaining import entry_as_json
from notes_cli.library.standing import holding
from notes_cli.library.store import Library, SegmentFile, source_text
from notes_cli.runtime.compiling import block_warnings
from notes_cli.runtime.keeping import compile_to_library
from notes_cli.serve.bounds import Size, of_texts
from notes_cli.serve.parsing import Reader
from notes_cli.serve.refusals import Refused, refused
from notes_cli.serve.replies import Json
from notes_cli.serve.scheduler import Scheduler
from notes_cli.text.blocks import Blocks
from notes_cli.text.header import find_header
from notes_cli.text.skill import parse_skill

_PLACE = re.compile(r"\{\{[^{}]*\}\}")  # a value takes its place, which may be shorter


def listed(scheduler: Scheduler) -> list[Json]:
    """All compiled skills, as `notes ls` has them; `model_matches`: whether they are for this model, `standing`: the
    values of fields that everybody is told instead."""
    workspace = scheduler.workspace
    identity = workspace.identity
    errata = scheduler.desk.errata.all() if scheduler.desk.errata else ()
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


def sizes(data: Any) -> list[Size]:
    """What of a text to be compiled is in the skill for certain: all but what stands for values, and the head."""
    text = data.get("text") if isinstance(data, dict) else None
    if not isinstance(text, str):
        return []
    text = text.replace("\r\n", "\n")
    header = find_header(text)
    return of_texts("text", "".join(_PLACE.sub("", text[header.body if header else 0 :]).split()))


def compiling(scheduler: Scheduler, data: Any, told: Callable[[Json], object]) -> Callable[[], Json]:
    """What compiles a text, telling how far it has come; other requests go on meanwhile. Raise Refused, SkillError."""
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
    if kv not in (None, *KEPT):
        raise given.wrong("kv", f"one of {', '.join(KEPT)}", kv)
    try:
        skill = parse_skill(text, source="-", default=name, name=name, where=f"the skill {name[:80]!r}")
    except NotesError as error:
        raise _of_text(error) from error
    wanted: Blocks = blocks or 1

    def work() -> Json:
        workspace = scheduler.workspace
        notices = [*skill.warnings, *(block_warnings(workspace, skill, wanted) if wanted != 1 else ())]

        def step(label: str) -> Progress:
            def update(done: int, total: int) -> None:
                told({"step": label, "done": done, "total": total})
                scheduler.between()

            return update

        cells = len(workspace.left_context) + len(workspace.model.tokenize(skill.text))
        while True:
            try:
                with scheduler.room.reserved(cells):
                    made = compile_to_library(
                        *(workspace, skill),
                        force=force,
                        progress=step("compiling"),
                        measure=step("measuring influence") if influence else None,
                        blocks=wanted,
                        kv=kv or "f16",
                        say=lambda notice: notices.append(str(notice)),
                        wait=0,
                    )
            except CompilingError:  # then it need not be done again
                step("waiting for another process")(0, 1)
                scheduler.rest()
            except TakenError:
                there = " or ".join({_origin(one) for one in workspace.library.entries(skill.name)})
                what = f"the library has another skill {skill.name} already, {there}: force writes over it"
                raise Refused(409, what, param="name", code="name_taken") from None
            except NotesError as error:
                raise _of_text(error) from error
            else:
                return {**shown(scheduler, skill.name), "reasons": list(made.reasons), "notices": notices}

    return work


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

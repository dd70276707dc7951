"""`notes session`: the sessions on disk. None of its commands needs a model."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output

if TYPE_CHECKING:
    from notes_cli.library.sessions import Sessions, Stored


@click.group(options_metavar="", subcommand_metavar="COMMAND ...")
def command() -> None:
    """List, show, fork, take back and remove sessions. `notes ask --session NAME` begins one, or goes on with it.

    \b
    Examples:
      notes session ls
      notes session show mine
      notes session fork mine other
    """


def _sessions() -> Sessions:
    from notes_cli.config import paths
    from notes_cli.library.sessions import Sessions

    return Sessions(paths().sessions)


@command.command("ls")
@click.option("-q", "--quiet", is_flag=True, help="Names only, one a line.")
@click.option("--json", "json_", is_flag=True, help="A JSON array (docs/json.md).")
def ls(quiet: bool, json_: bool) -> None:
    """List sessions."""
    from notes_cli.errors import NotesError

    sessions = _sessions()
    names = sessions.names()
    if quiet:
        for name in names:
            output.result(name)
        return
    found: list[dict[str, Any]] = []
    for name in names:
        facts: dict[str, Any] = {"name": name, "path": str(sessions.folder / name), "problem": None}
        try:
            facts |= _facts(sessions.find(name))
        except NotesError as error:
            facts["problem"] = str(error)
        found.append(facts)
    if json_:
        output.as_json(found)
        return
    if not names:
        output.say(f'no sessions yet in {sessions.folder}. Begin one: notes ask "QUESTION" --session NAME')
        return
    columns = ("name", "tokens", "turns", "size", "age", "model")
    rows = [
        (
            *(one["name"], str(one["tokens"]), str(one["turns"]), output.human_size(one["bytes"])),
            *(_age(one["changed"]), f"{one['identity']['model']} {one['identity']['quantization']}"),
        )
        if one["problem"] is None
        else (one["name"], "", "", "", "", one["problem"])
        for one in found
    ]
    output.table(columns, rows, right=columns[1:5])


@command.command("show")
@click.argument("name")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def show(name: str, json_: bool) -> None:
    """Show the pieces and edits of a session."""
    from dataclasses import asdict

    stored = _sessions().find(name)
    state = stored.state
    facts = {"name": stored.name, "path": str(stored.folder), **_facts(stored)}
    if json_:
        pieces = [asdict(entry) for entry in state.entries]
        output.as_json({"version": 1, **facts, "pending": list(state.pending.values()), "pieces": pieces})
        return
    rows = [
        (str(entry.position), str(entry.tokens), entry.kind, entry.name, entry.how, _line(entry.text), entry.why)
        for entry in state.entries
    ]
    output.table(("position", "tokens", "piece", "name", "how", "text", "why"), rows, right=("position", "tokens"))
    for field, value in state.fields.items():
        output.result(f"field {field} = {value}")
    for said in state.pending.values():
        output.result(f"to be said before the next question: {said}")
    identity = facts["identity"]
    output.result(
        f"{_count(facts['turns'], 'turn')}, {_count(facts['tokens'], 'token')}, {output.human_size(facts['bytes'])}, "
        f"{identity['model']} {identity['quantization']}"
    )
    if facts["whole"]:
        output.result(
            "the rows of this model cannot be moved: each turn keeps those of the whole session, the last two are "
            "there, and after a second undo the text is read anew"
        )


@command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def rm(names: tuple[str, ...]) -> None:
    """Remove sessions, without asking."""
    sessions = _sessions()
    for name in dict.fromkeys(names):  # a typing error removes nothing
        if name not in sessions.names():
            sessions.find(name)
    for name in dict.fromkeys(names):
        output.result(str(sessions.remove(name)))


@command.command("fork")
@click.argument("name")
@click.argument("new")
def fork(name: str, new: str) -> None:
    """Begin the session NEW where NAME stands; from there each goes its own way."""
    output.result(str(_sessions().fork(name, new)))


@command.command("undo")
@click.argument("name")
def undo(name: str) -> None:
    """Take back the last turn or edit of a session."""
    with _sessions().locked(name) as stored:
        undone = stored.undo()
        edit = undone["op"] == "edit"
        what = f"{undone['field']}={undone['value']}" if edit else _line(undone["question"])
        output.result(f"took back the {undone['op']}: {what}")


def _facts(stored: Stored) -> dict[str, Any]:
    state, header = stored.state, stored.header
    assert header is not None
    return {
        "model": header.model,
        "identity": header.identity.as_dict(),
        "cache": header.cache,
        "whole": header.whole,
        "tokens": len(state.tokens),
        "turns": state.turns,
        "edits": len(state.live) - state.turns,
        "fields": state.fields,
        "bytes": stored.nbytes,
        "created": stored.created,
        "changed": stored.changed,
    }


def _line(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 50 else f"{line[:49]}…"


def _count(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _age(time: str) -> str:
    then = datetime.strptime(time, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    seconds = (datetime.now(timezone.utc) - then).total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"

"""`notes ls`: the compiled skills of the library, and what of them is out of date."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import library, model_option, named
from notes_cli.explaining import entry_as_json

if TYPE_CHECKING:
    from notes_cli.library.store import SegmentFile
    from notes_cli.library.tidy import LibraryFile
    from notes_cli.runtime.freshness import Reason


class _Row:
    """A file of the library with all that is shown of it."""

    def __init__(self, entry: SegmentFile, kept: LibraryFile | None, stale: Sequence[Reason]) -> None:
        self.entry, self.kept, self.stale = entry, kept, stale

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes if self.kept else 0

    @property
    def model(self) -> str:
        """Name and quantization of the model that it was compiled with."""
        info = self.entry.info
        return f"{info.identity.model} {info.identity.quantization}" if info else ""

    @property
    def written(self) -> float | None:
        """When it was compiled, in seconds of the system's clock."""
        if self.entry.info is not None:
            with suppress(ValueError):
                then = datetime.strptime(self.entry.info.created, "%Y-%m-%dT%H:%M:%SZ")
                return then.replace(tzinfo=timezone.utc).timestamp()
        return None

    @property
    def used(self) -> str | None:
        """When it was used last, as JSON documents have times."""
        if not (self.kept and self.kept.uses):
            return None
        return datetime.fromtimestamp(self.kept.last, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


# By what a table is sorted: the name, then the model; or the largest, newest, latest used or most used first.
SORTS: Mapping[str, Callable[[_Row], Any]] = {
    "name": lambda row: (row.entry.name, row.model),
    "size": lambda row: -row.nbytes,
    "age": lambda row: -(row.written or 0.0),
    "used": lambda row: -(row.kept.last if row.kept else 0.0),
    "uses": lambda row: -(row.kept.uses if row.kept else 0),
}

_SOURCES = {"": "not known", "-": "standard input"}


@click.command()
@click.option(*("-l", "--long"), is_flag=True, help="Also how often each was used, when last, and where its text is.")
@click.option(
    "--sort",
    type=click.Choice(list(SORTS)),
    default="name",
    show_default=True,
    metavar="BY",
    help="name, or the first one is the largest (size), newest (age), latest used (used), most used (uses).",
)
@click.option("-q", "--quiet", is_flag=True, help="Names only, one a line.")
@click.option("--json", "json_", is_flag=True, help="A JSON array (docs/json.md).")
@model_option
def command(long: bool, sort: str, quiet: bool, json_: bool, model: str | None) -> None:
    """List compiled skills, and which of them are out of date: because the text has changed or its file is gone, they
    are for another model than -m or the settings name, or were written in another format, or because the profile of
    their model asks for more. No model is loaded; `notes compile --stale` looks closer, and compiles them again.

    \b
    Examples:
      notes ls
      notes ls --long --sort used
      notes ls -q | xargs notes rm
    """
    store = library()
    rows = sorted(_rows(model), key=SORTS[sort])
    if quiet:
        for name in dict.fromkeys(row.entry.name for row in rows):
            output.result(name)
    elif json_:
        output.as_json([_facts(row) for row in rows])
    elif rows:
        _table(rows, long)
        count = "1 file" if len(rows) == 1 else f"{len(rows)} files"
        size = output.human_size(sum(row.nbytes for row in rows))
        most = "" if store.max_size is None else f" of {output.human_size(store.max_size)}"
        output.result(f"{count}, {size}{most} in {store.folder}")
        for reason, names in _reasons(rows).items():
            output.result(f"{', '.join(names)}: {reason}")
    else:
        how = "Compile one: notes compile FILE, or a sample: notes compile returns"
        output.say(f"no compiled skills yet in {store.folder}. {how}")


def _rows(model: str | None) -> list[_Row]:
    from notes_cli import config
    from notes_cli.library.profiles import Profiles
    from notes_cli.library.tidy import library_files
    from notes_cli.runtime.freshness import reasons

    store, paths = library(), config.paths()
    entries = store.entries()
    if not entries:
        return []
    there = {one.path: one for one in library_files(store.folder)}
    weights, profiles = _weights(model), Profiles(paths.profiles)
    return [
        _Row(
            entry,
            there.get(entry.path),
            reasons(entry, [other for other in entries if other.name == entry.name], profiles, weights),
        )
        for entry in entries
    ]


def _weights(model: str | None) -> str | None:
    """The digest of the model in use, if it is remembered. A setting that names none at all stops no list."""
    from notes_cli import config
    from notes_cli.errors import Help, ModelError, NotesError
    from notes_cli.runtime.freshness import known_weights
    from notes_cli.runtime.naming import default_model, model_file

    try:
        path = model_file(model) if model else default_model()
        if not path.is_file():
            raise ModelError(f"{path}: no such model", Help.NAME_MODEL())
    except NotesError:
        if named("model"):
            raise
        return None
    return known_weights(path, config.paths().models / "digests.json")


def _facts(row: _Row) -> dict[str, Any]:
    from notes_cli.commands.remedies import worded

    entry = row.entry
    facts = entry_as_json(entry, worded(entry.problem) if entry.problem else None)
    if entry.info is None:
        return facts
    return {
        **facts,
        "uses": row.kept.uses if row.kept else 0,
        "used": row.used,
        "stale": [reason.kind.value for reason in row.stale],
        "why": [reason.what for reason in row.stale],
    }


def _table(rows: Sequence[_Row], long: bool) -> None:
    from notes_cli.commands.remedies import worded
    from notes_cli.library.store import source_text
    from notes_cli.text.sizes import human_age

    columns = ["name", "tokens", "size", "model", "compiled", "state", "fields"]
    columns[5:5] = ["uses", "used"] if long else []
    columns += ["text"] if long else []
    cells = []
    for row in rows:
        info, state = row.entry.info, ", ".join(reason.kind.value for reason in row.stale) or "ok"
        if info is None:
            blank = [""] * (len(columns) - 2)
            cells.append([row.entry.name, *blank, worded(row.entry.problem) if row.entry.problem else ""])
            continue
        values = ", ".join(dict.fromkeys(f"{span.name}={span.value}" for span in info.fields))
        used = []
        if long:
            uses = row.kept.uses if row.kept else 0
            used = [str(uses), f"{human_age(row.kept.idle)} ago" if row.kept and uses else "never"]
        cells.append(
            [
                *(row.entry.name, str(len(info.tokens)), output.human_size(info.nbytes)),
                *(row.model, info.created[:10]),
                *(*used, state, values),
                *([_SOURCES.get(info.source, source_text(info.source))] if long else []),
            ]
        )
    output.table(columns, cells, right=("tokens", "size", "uses"))


def _reasons(rows: Sequence[_Row]) -> dict[str, list[str]]:
    """Why files are out of date, with the names of those that are; what cannot be read is told in the table."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for reason in row.stale if row.entry.info else ():
            found.setdefault(reason.what, []).append(row.entry.name)
    return {why: list(dict.fromkeys(names)) for why, names in found.items()}

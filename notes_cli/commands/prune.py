"""`notes prune`: remove compiled skills that were not used for long, take too much room, or are out of date."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import library
from notes_cli.errors import NotesError

if TYPE_CHECKING:
    from notes_cli.library.tidy import LibraryFile


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """Bytes, as people write them."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from notes_cli.text.sizes import parse_size

        try:
            return parse_size(str(value))
        except NotesError as error:
            self.fail(str(error), param, ctx)


class Age(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """A time, as people write it."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from notes_cli.text.sizes import parse_age

        try:
            return value if isinstance(value, float) else parse_age(str(value))
        except NotesError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option("--older-than", type=Age(), metavar="AGE", help="What was not used, nor compiled, for so long: 30d, 12h.")
@click.option("--max-size", type=Size(), metavar="SIZE", help="The least recently used, until all take no more: 20GB.")
@click.option("--stale", is_flag=True, help="Those whose text has changed or whose file is gone, and damaged ones.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option(*("-y", "--yes"), is_flag=True, help="Do not ask.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def command(older_than: float | None, max_size: int | None, stale: bool, dry_run: bool, yes: bool, json_: bool) -> int:
    """Remove compiled skills by a rule, the least recently used first. It shows them and asks first.

    Without a rule it keeps the library within `cache:` `max_size:` of config.yaml, as every compile does. What another
    process uses or compiles stays. So does, unless --stale says that its file is gone, a text that is nowhere else: it
    came from standard input, or its file is not there any more. `notes rm NAME` removes that.

    \b
    Examples:
      notes prune --older-than 30d --dry-run
      notes prune --max-size 10GB
      notes prune --stale -y
    """
    from notes_cli.library import tidy

    store = library()
    if older_than is None and max_size is None and not stale:
        max_size = store.max_size
        if max_size is None:
            raise click.UsageError("say what may go: --older-than AGE, --max-size SIZE or --stale")
    there = tidy.library_files(store.folder)
    outdated = _outdated(there) if stale else []
    wanted, alone = tidy.chosen(there, outdated, older_than, max_size)
    for one in alone:
        output.say(f"{one} stays: its text is nowhere else. To remove it: notes rm {one.name}")
    if wanted and not dry_run and not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise click.UsageError(
                f"there is no terminal to ask on. Repeat with -y to remove {_count(wanted)}, or --dry-run"
            )
        _show(wanted)
        if not output.confirm(f"Remove {_count(wanted)}?"):
            output.say("nothing was removed")
            return 1
    done = tidy.Tidied([], [], 0) if dry_run or not wanted else tidy.remove_each(wanted, store.folder, outdated)
    for one, why in done.spared:
        output.say(f"{one} stays: {why}")
    gone = wanted if dry_run else done.removed
    if json_:
        paths = [str(one.path) for one in gone]
        removed = {"removed": [] if dry_run else paths, "would_remove": paths if dry_run else []}
        stayed = [str(one.path) for one in (*alone, *(one for one, _ in done.spared))]
        output.as_json({"version": 1, **removed, "stayed": stayed, "bytes": sum(one.nbytes for one in gone)})
        return 0
    for one in gone:
        output.data(str(one.path))
    if not gone:
        output.say("there is nothing to remove")
    elif dry_run:
        _show(gone)
    else:
        output.say(f"removed {_count(gone)}")
    return 0


def _outdated(there: Sequence[LibraryFile]) -> list[LibraryFile]:
    """Those that cannot be used as they are: a compile of their text would not give them again."""
    from notes_cli.runtime.freshness import Stale, reasons

    kinds = {Stale.TEXT, Stale.GONE, Stale.DAMAGED}
    entries = library().entries()
    bad = {entry.path for entry in entries if kinds & {reason.kind for reason in reasons(entry, [entry])}}
    return [one for one in there if one.path in bad]


def _show(wanted: Sequence[LibraryFile]) -> None:
    for one in wanted:
        output.say(str(one))
    output.say(f"in all {_count(wanted)}")


def _count(wanted: Sequence[LibraryFile]) -> str:
    size = output.human_size(sum(one.nbytes for one in wanted))
    return f"{'1 file' if len(wanted) == 1 else f'{len(wanted)} files'}, {size}"

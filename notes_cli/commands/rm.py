"""`notes rm`: remove compiled skills from the library; the texts they came from are not touched."""

from __future__ import annotations

import click

from notes_cli import output
from notes_cli.commands.options import SkillName, library


@click.command()
@click.argument("names", type=SkillName(), nargs=-1, required=True, metavar="NAME...")
@click.option("-y", "--yes", is_flag=True, expose_value=False, help="Changes nothing: it never asks.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def command(names: tuple[str, ...], dry_run: bool, json_: bool) -> None:
    """Remove compiled skills, for all models they were compiled for, without asking. The texts are not touched, and
    can be compiled again.

    \b
    Examples:
      notes rm returns
      notes ls -q | xargs notes rm
    """
    from notes_cli.errors import SegmentError
    from notes_cli.text.names import typed

    store = library()
    known = set(store.names())
    names = tuple(dict.fromkeys(map(typed, names)))
    for name in names:  # all or nothing: a typing error removes nothing
        if name not in known:
            raise SegmentError(f"there is no compiled skill {name!r}. See: notes ls")
    if dry_run:
        files = [str(entry.path) for entry in store.entries() if entry.name in names]
    else:
        files = [str(path) for name in names for path in store.remove(name)]
    if json_:
        output.as_json({"version": 1, "removed": [] if dry_run else files, "would_remove": files if dry_run else []})
    else:
        for file in files:
            output.data(file)

"""`notes ls`: the compiled skills of the library."""

from __future__ import annotations

import click

from notes_cli import output
from notes_cli.commands.options import library
from notes_cli.explaining import entry_as_json


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Names only, one a line.")
@click.option("--json", "json_", is_flag=True, help="A JSON array (docs/json.md).")
def command(quiet: bool, json_: bool) -> None:
    """List compiled skills.

    \b
    Examples:
      notes ls
      notes ls -q | xargs notes rm
    """
    from notes_cli.commands.remedies import worded

    store = library()
    entries = store.entries()
    if quiet:
        for name in sorted({entry.name for entry in entries}):
            output.result(name)
        return
    if json_:
        output.as_json([entry_as_json(entry, worded(entry.problem) if entry.problem else None) for entry in entries])
        return
    if not entries:
        output.say(f"no compiled skills yet in {store.folder}. Compile one: notes compile FILE")
        return
    rows = []
    for entry in entries:
        if entry.info is None:
            rows.append((entry.name, "", "", "", "", worded(entry.problem) if entry.problem else ""))
            continue
        info = entry.info
        model = f"{info.identity.model} {info.identity.quantization}"
        values = ", ".join(dict.fromkeys(f"{span.name}={span.value}" for span in info.fields))
        rows.append(
            (entry.name, str(len(info.tokens)), output.human_size(info.nbytes), model, info.created[:10], values)
        )
    output.table(("name", "tokens", "size", "model", "compiled", "fields"), rows, right=("tokens", "size"))
    count = "1 file" if len(entries) == 1 else f"{len(entries)} files"
    output.result(f"{count}, {output.human_size(sum(e.info.nbytes for e in entries if e.info))} in {store.folder}")

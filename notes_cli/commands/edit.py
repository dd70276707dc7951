"""`notes edit`: a field of a session gets another value."""

from __future__ import annotations

from typing import Any

import click

from notes_cli import output
from notes_cli.commands.options import model_options, open_workspace


@click.command()
@click.argument("name")
@click.option(
    "--field", "fields", multiple=True, required=True, metavar="FIELD=VALUE", help="The new value. Repeatable."
)
@click.option(
    "--method",
    default="erratum",
    show_default=True,
    metavar="METHOD",
    help="erratum, field, field+erratum, selective@K, or suffix: everything behind anew.",
)
@model_options
def command(name: str, fields: tuple[str, ...], method: str, **model: Any) -> None:
    """Give a field of the session NAME another value. Each is an edit of its own, which undo takes back.

    An erratum is said before the next question; the other methods change the cache now.

    \b
    Examples:
      notes edit mine --field date=2026-07-01
      notes edit mine --field date=2026-07-01 --method suffix
    """
    from notes_cli.editing.methods import Method
    from notes_cli.library.sessions import Sessions
    from notes_cli.work.prompting import parse_values
    from notes_cli.work.session import Session

    values, chosen = parse_values(fields), Method.parse(method)
    with open_workspace(**model) as workspace, Sessions(workspace.paths.sessions).locked(name) as stored:
        session = Session(workspace, stored)
        for field, value in values.items():
            output.result(f"{field}={value}: {session.edit(field, value, chosen)}")

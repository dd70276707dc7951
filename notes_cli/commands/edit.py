"""`notes edit`: a field of a session gets another value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.listening import listening
from notes_cli.commands.options import model_options, open_model
from notes_cli.explaining import edited

if TYPE_CHECKING:
    from notes_cli.sessions.edits import Edited


@click.command()
@click.argument("name")
@click.option(
    "--field", "fields", multiple=True, required=True, metavar="FIELD=VALUE", help="The new value. Repeatable."
)
@click.option(
    "--method",
    default="auto",
    show_default=True,
    metavar="METHOD",
    help="auto: as measured (notes calibrate). Or erratum, field, field+erratum, selective@K, blend@K, or suffix: "
    "decode everything after it again.",
)
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
@model_options
def command(name: str, fields: tuple[str, ...], method: str, json_: bool, **model: Any) -> None:
    """Give fields of the session NAME other values. Each is an edit of its own, which undo takes back.

    An erratum is said before the next question; the other methods change the cache now.

    \b
    Examples:
      notes edit mine --field date=2026-07-01
      notes edit mine --field date=2026-07-01 --method suffix
      notes edit mine --field returns.date=2026-07-01   # of several; *.date: all
    """
    from notes_cli.runtime.assembling import parse_values

    values = parse_values(fields)
    edits = []
    with open_model(quiet=json_, session=name, **model) as opened, opened.session(name, new=False) as session:
        for made in session.edits(values, method, listener=listening(json_)):
            edits.append(made)
            if not json_:
                output.result(_told(made))
    if json_:
        output.as_json({"version": 1, "session": name, "edits": [_as_json(edit) for edit in edits]})


def _as_json(edit: Edited) -> dict[str, Any]:
    keys = ("field", "value", "method", "chosen")
    return {**{key: getattr(edit, key) for key in keys}, "why": edited(edit.origin), "rows": edit.origin.rewritten}


def _told(edit: Edited) -> str:
    return f"{edit.field}={edit.value}: {edited(edit.origin)} ({edit.chosen or edit.method})"

"""`notes edit`: give fields of a session, or of all sessions, new values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import SessionName, field_option, library, model_options, named, open_model
from notes_cli.commands.remedies import print_callbacks
from notes_cli.commands.terminal import GroupedCommand
from notes_cli.explanations import edit_why, erratum_as_json

if TYPE_CHECKING:
    from notes_cli.library.global_errata import GlobalErratum
    from notes_cli.sessions.edits import Edited


@click.command(cls=GroupedCommand)
@click.argument("name", type=SessionName(), required=False)
@click.option("--all", "everybody", is_flag=True, help="Correct all sessions that have the field, and later ones.")
@field_option(help="The new value. Repeatable.")
@click.option(
    "--method",
    default="auto",
    show_default=True,
    metavar="METHOD",
    help="auto: as measured (notes calibrate), else field+erratum. Or erratum, field, field+erratum, selective@K, "
    "blend@K, or suffix: decode everything after it again.",
)
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
@model_options
def command(name: str | None, everybody: bool, fields: tuple[str, ...], method: str, json_: bool, **model: Any) -> int:
    """Give fields of the session NAME other values. Each is an edit of its own, which undo takes back.

    An erratum precedes the next question; the other methods change the cache now. Where field, selective or blend
    was not enough, give the same value once more, by erratum or suffix.

    With --all every session that has the skill gets the correction with its next question, and so does every
    conversation of a server over this library and every later question with the skill, for as long as its text stays
    the same. Without --field these
    errata are listed. The value of the text takes one back.

    \b
    Examples:
      notes edit mine --field date=2026-07-01
      notes edit mine --field date=2026-07-01 --method suffix
      notes edit mine --field returns.date=2026-07-01   # of several; *.date: all
      notes edit --all --field date=2026-07-01
      notes edit --all                                  # which corrections hold
    """
    from notes_cli.text.fields import parse_values

    if everybody == (name is not None):
        raise click.UsageError("name a session, or all of them with --all")
    if not fields:
        if name is not None or named("method"):
            raise click.UsageError("give the new value: --field NAME=VALUE")
        return _list(json_)
    values = parse_values(fields)
    if name is None:
        if named("method"):
            raise click.UsageError("--all corrects by errata: --method is for one session")
        return _correct(values, json_, model)
    edits = []
    with open_model(quiet=json_, session=name, **model) as opened, opened.session(name, new=False) as session:
        for edit in session.edits(values, method, callbacks=print_callbacks(json_)):
            edits.append(edit)
            if not json_:
                output.result(f"{edit.field}={edit.value}: {edit_why(edit.origin)} ({edit.chosen or edit.method})")
    if json_:
        output.as_json({"version": 1, "session": name, "edits": [_as_json(edit) for edit in edits]})
    return 0


def _correct(values: Mapping[str, str], json_: bool, model: Mapping[str, Any]) -> int:
    """Add global errata, and edit all sessions; return 1 if a session could not be edited."""
    from notes_cli.commands.remedies import worded
    from notes_cli.library.global_errata import GlobalErrata
    from notes_cli.sessions.global_correction import correct

    with open_model(quiet=json_, **model) as opened:
        done = correct(opened.workspace, GlobalErrata(library().folder), values)
    skipped = {name: worded(error) for name, error in done.skipped.items()}
    if json_:
        output.as_json({**_errata_as_json(done.errata), "sessions": list(done.edited), "skipped": skipped})
    else:
        for erratum in done.errata:
            output.result(f"{erratum.skill}.{erratum.field}={erratum.value}: an erratum before the next question")
        output.result(f"{len(done.edited)} session{'s' * (len(done.edited) != 1)} edited")
        for name, why in skipped.items():
            output.say(f"warning: session {name} was not edited: {why}")
    return 1 if skipped else 0


def _list(json_: bool) -> int:
    """List current global errata, also of skills that are not compiled at present."""
    from notes_cli.library.global_errata import ENDED, GlobalErrata

    store = library()
    errata = [erratum for erratum in GlobalErrata(store.folder).all() if erratum.was != ENDED]
    latest = {(erratum.skill, erratum.field): erratum for erratum in errata}
    current = []
    for erratum in latest.values():
        infos = [entry.info for entry in store.entries(erratum.skill) if entry.info is not None]
        values = {span.value for info in infos for span in info.fields if span.name == erratum.field}
        if erratum.value != erratum.was and (erratum.was in values or not infos):
            current.append((erratum, f"instead of {erratum.was}" + ("" if infos else ", when it is compiled again")))
    if json_:
        output.as_json({**_errata_as_json([erratum for erratum, _ in current]), "sessions": [], "skipped": {}})
        return 0
    for erratum, replaced in current:
        output.result(f"{erratum.skill}.{erratum.field}={erratum.value}, {replaced}")
    if not current:
        output.say("there is no correction for all sessions")
    return 0


def _errata_as_json(errata: Sequence[GlobalErratum]) -> dict[str, Any]:
    return {"version": 1, "errata": list(map(erratum_as_json, errata))}


def _as_json(edit: Edited) -> dict[str, Any]:
    keys = ("field", "value", "method", "chosen")
    return {**{key: getattr(edit, key) for key in keys}, "why": edit_why(edit.origin), "rows": edit.origin.rewritten}

"""`notes profile`: what `notes calibrate` measured of models. No model is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.calibrate import report_option

if TYPE_CHECKING:
    from pathlib import Path

    from notes_cli.library.profiles import Profile, Profiles

_JSON = click.option("--json", "json_", is_flag=True, help="One JSON document (docs/json.md).")


@click.group(options_metavar="", subcommand_metavar="COMMAND ...")
def command() -> None:
    """List, show and remove what was measured of models: which edit method, wording, seam and place to use. `notes
    calibrate` measures. A name may be cut short.

    \b
    Examples:
      notes profile ls
      notes profile show 95efdda397c4
      notes profile rm 95efdda397c4
    """


def _profiles() -> Profiles:
    from notes_cli.config import paths
    from notes_cli.library.profiles import Profiles

    return Profiles(paths().profiles)


def _read(profiles: Profiles, name: str) -> Profile:
    """The profile of that name, with methods and a wording that there are."""
    from notes_cli.runtime.settings import check_names

    path = profiles.named(name)
    profile = profiles.read(path)
    check_names(profile, path)
    return profile


@command.command("ls")
@click.option("-q", "--quiet", is_flag=True, help="Names only, one a line.")
@_JSON
def ls(quiet: bool, json_: bool) -> None:
    """List profiles."""
    from notes_cli.commands.remedies import worded
    from notes_cli.errors import NotesError

    profiles = _profiles()
    found: list[dict[str, Any]] = []
    for name in profiles.names():
        facts: dict[str, Any] = {"name": name, "path": str(profiles.folder / f"{name}.json"), "problem": None}
        try:
            profile = _read(profiles, name)
            facts |= {
                "identity": profile.identity.as_dict(),
                "cache": profile.cache,
                "cases": profile.cases,
                "methods": profile.methods,
                "created": profile.created,
            }
        except NotesError as error:
            facts["problem"] = worded(error)
        found.append(facts)
    if json_:
        output.as_json(found)
    elif quiet:
        for one in found:
            output.data(one["name"])
    elif not found:
        output.say(f"no profiles yet in {profiles.folder}. Measure a model: notes calibrate")
    else:
        output.table(
            ("name", "model", "cache", "direct", "reasoned", "cases", "measured"), [_row(one) for one in found]
        )


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    if facts["problem"]:
        return (facts["name"], facts["problem"], *[""] * 5)
    identity, methods = facts["identity"], facts["methods"]
    return (
        *(facts["name"], f"{identity['model']} {identity['quantization']}", facts["cache"]),
        *(methods["direct"], methods["reasoned"], str(facts["cases"]), facts["created"][:10]),
    )


@command.command("show")
@click.argument("name")
@report_option
@_JSON
def show(name: str, report: Path | None, json_: bool) -> None:
    """Show what was measured, and what follows from it."""
    from notes_cli.commands.calibrate import as_dict, check_report, print_profile, write_report

    profiles = _profiles()
    path, profile = profiles.named(name), _read(profiles, name)
    if report:
        check_report(report)
        write_report(report, profile)
    if json_:
        output.as_json({"version": 1, "path": str(path), **as_dict(profile)})
        return
    output.result(f"{profile.identity.model} {profile.identity.quantization}, cache {profile.cache}")
    print_profile(profile)


@command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_JSON
def rm(names: tuple[str, ...], json_: bool) -> None:
    """Remove profiles, without asking: notes calibrate makes them again. The model then goes by what is safe."""
    profiles = _profiles()
    for name in names:  # all or nothing: a typing error removes nothing
        profiles.named(name)
    removed = [str(profiles.remove(name)) for name in dict.fromkeys(str(profiles.named(one).stem) for one in names)]
    if json_:
        output.as_json({"version": 1, "removed": removed})
        return
    for path in removed:
        output.data(path)

"""`notes calibrate` and `notes profile`: measure which edit method to use on a model; show and remove the results."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import __version__, output
from notes_cli.commands.options import Number, check_place, json_option, model_options, open_model
from notes_cli.commands.remedies import advice, listed, print_callbacks
from notes_cli.commands.terminal import Command, Group, option
from notes_cli.errors import NotesError
from notes_cli.explanations import attributes

if TYPE_CHECKING:
    from notes_cli.library.profiles import Profile, Profiles

report_option = option(
    "--report", "Also write a page of it to show others: .md.", type=click.Path(path_type=Path), metavar="FILE"
)


@click.command(cls=Command)
@option(
    "--cases",
    "Decisions of your own in YAML, measured with those that ship. Repeatable.",
    name="files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
)
@option("--only", "Only the decisions of --cases.", is_flag=True)
@option("-n --number", "Only the first N decisions of each file, and pairs.  [default: all]", type=Number(1))
@report_option
@json_option
@model_options
def calibrate_command(
    files: tuple[Path, ...], only: bool, number: int | None, report: Path | None, json_: bool, **model: Any
) -> None:
    """Measure which edit method, wording, seam and place to trust on this model.

    Each case is a decision with one field changed, of which the right answer is known. It is made after a full
    recompute and after each edit method. The erratum, which is used without a profile, stays in use unless another
    method is proven right more often (by an exact 95% interval over the cases in which the two differ). Of the methods
    that are, the cheapest is chosen that is proven as good as the best, and of equals the safest. At least 24 cases are
    needed. From then on `--method auto`, the wording, the seam and the place go by what was measured; `notes profile`
    shows and removes it.

    Also measured is composition: pairs of made-up skills, with questions that one of them answers and questions that
    need both, spliced, read together, with one left out, and in each way that might repair what splicing loses. Where
    that fails, `notes ask` says so when several skills are spliced, and what helps. Not with --only.

    The first line on stderr is how long it will take, by a few decisions. Ctrl-C keeps what was measured: the same
    command goes on with it.

    A line shows whether the model takes notes: whether a decision is made while a text is read, so that a field
    corrected in place comes too late. --report writes that as a page, with all figures.

    A case in YAML has text (or skill: FILE), question, choices, field, value (the new one) and right, the answers that
    are right with the old value and with the new one. See prompts/battery.yaml.

    \b
    Examples:
      notes calibrate
      notes calibrate -m model.gguf --cases mine.yaml --only
      notes calibrate -m model.gguf --report model.md
    """
    if only and not files:
        raise click.UsageError("--only needs decisions of your own: --cases FILE")
    if report:
        check_report(report)

    from notes_cli.measure.battery import LEAST, load_battery, pairs, shipped_battery

    batteries = [*([] if only else [shipped_battery()]), *map(load_battery, files)]
    cases = [case for battery in batteries for case in battery[:number]]
    with open_model(**model) as opened:
        skill_pairs = () if only else pairs()[:number]
        profile, path = opened.calibrate(cases, pairs=skill_pairs, callbacks=print_callbacks())
    if json_:
        output.as_json({"version": 1, "path": str(path) if path else None, **as_dict(profile)})
    else:
        print_profile(profile)
    if report:
        write_report(report, profile)
    output.say(
        f"written to {path}"
        if path
        else f"nothing is written: {len(cases)} decisions are too few to choose by, {LEAST} at least are needed"
    )


def check_report(path: Path) -> None:
    """Raise errors before measuring: UsageError for another suffix, NotesError without a folder or for an existing file
    that is not such a page."""
    from notes_cli.measure.calibrate import is_page

    check_place(path, "--report", (".md",))
    if path.is_dir():
        raise NotesError(f"{path} is a folder")
    if path.exists() and not is_page(path.read_bytes()):
        raise NotesError(f"{path} is there, and not such a page: nothing is written over it. Name another file")


def write_report(path: Path, profile: Profile) -> None:
    from notes_cli.measure.calibrate import page

    day = profile.created[:10] or date.today().isoformat()
    path.write_text(page(profile, f"`notes calibrate` of notes {__version__} on {day}"), encoding="utf-8")
    output.say(f"written to {path}")


def as_dict(profile: Profile) -> dict[str, Any]:
    """Return a profile as in docs/json.md, with its finding."""
    from notes_cli.measure.calibrate import finding

    result = finding(profile)
    return {**profile.as_dict(), "finding": result and result._asdict()}


def print_profile(profile: Profile) -> None:
    from notes_cli.measure.calibrate import finding, method_rows

    rows = list(method_rows(profile))
    columns = ("method", "decoded", "ms", "cosine", "right", "as recompute", "reasoned: right", "as recompute")
    if rows:
        output.table(columns, rows, right=columns[1:])
    result = finding(profile)
    if result:
        output.result(f"{result.kind}: {result.why}")
    for way in ("direct", "reasoned"):
        decisive = f"a recompute decides by the field in {profile.decisive[way]} of {profile.cases} cases"
        output.result(f"{way}: use {profile.methods[way]}: {profile.verdicts[way]}; {decisive}")
    output.result(f"wording: {profile.wording}; seam: {profile.seam}; place: {profile.place}")
    if profile.carry:
        output.result(f"recurrent state: {profile.carry.verdict}: {profile.carry.why}")
    _print_composition(profile)


def _print_composition(profile: Profile) -> None:
    from notes_cli.measure.calibrate import pair_rows
    from notes_cli.runtime.resolve import repair

    composition = profile.composition
    if composition is None:
        output.result("several skills: not measured")
        return
    rows = list(pair_rows(profile))
    columns = ("two skills", "decoded", "one is needed: right", "both are needed: right")
    if rows:
        output.result("")
        output.table(columns, rows, right=columns[1:])
    output.result(f"several skills: {composition.why}")
    if composition.repair:
        output.result(f"for skills A and B: {advice(repair(composition.repair, ['A', 'B']))}")


_JSON = option("--json", "One JSON document (docs/json.md).", name="json_", is_flag=True)


@click.group(cls=Group, options_metavar="", subcommand_metavar="COMMAND ...")
def profile_command() -> None:
    """List, show and remove calibration profiles: the edit method, wording, seam and place to use for a model, measured
    by `notes calibrate`. A name may be cut short.

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
    """Read a profile by name. Raises NotesError for an unknown method or wording in it."""
    from notes_cli.runtime.resolve import check_names

    path = profiles.named(name)
    profile = profiles.read(path)
    check_names(profile, path)
    return profile


@profile_command.command("ls")
@option("-q --quiet", "Names only, one a line.", is_flag=True)
@_JSON
def ls(quiet: bool, json_: bool) -> None:
    """List profiles."""
    profiles = _profiles()

    def facts_of(name: str) -> dict[str, Any]:
        profile = _read(profiles, name)
        measured = attributes(profile, "cache", "cases", "methods", "created")
        return {"identity": profile.identity.as_dict(), **measured}

    found = listed({name: profiles.folder / f"{name}.json" for name in profiles.names()}, facts_of)
    if json_:
        output.as_json(found)
    elif quiet:
        for facts in found:
            output.data(facts["name"])
    elif not found:
        output.say(f"no profiles yet in {profiles.folder}. Measure a model: notes calibrate")
    else:
        columns, rows = ("name", "model", "cache", "direct", "reasoned", "cases", "measured"), []
        for facts in found:
            if facts["problem"]:
                rows.append((facts["name"], facts["problem"], *[""] * 5))
                continue
            model = f"{facts['identity']['model']} {facts['identity']['quantization']}"
            used = facts["methods"]["direct"], facts["methods"]["reasoned"]
            rows.append((facts["name"], model, facts["cache"], *used, str(facts["cases"]), facts["created"][:10]))
        output.table(columns, rows)


@profile_command.command("show")
@click.argument("name")
@report_option
@_JSON
def show(name: str, report: Path | None, json_: bool) -> None:
    """Show the figures of a profile, and the settings chosen by them."""
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


@profile_command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_JSON
def rm(names: tuple[str, ...], json_: bool) -> None:
    """Remove profiles, without asking. The model gets the safe defaults until notes calibrate runs again."""
    profiles = _profiles()
    for name in names:  # all or nothing: a typing error removes nothing
        profiles.named(name)
    removed = [str(profiles.remove(name)) for name in dict.fromkeys(str(profiles.named(word).stem) for word in names)]
    output.document({"removed": removed}, "\n".join(removed), json_)

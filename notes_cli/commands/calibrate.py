"""`notes calibrate` and `notes profile`: measure which edit method to use on a model; show and remove the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from notes_cli import __version__, output
from notes_cli.commands.options import Number, model_options, open_model
from notes_cli.commands.remedies import print_callbacks
from notes_cli.commands.terminal import GroupedCommand
from notes_cli.editing.methods import ERRATUM, FIELD, RECOMPUTE, STALE, SUFFIX
from notes_cli.errors import NotesError
from notes_cli.library.profiles import WAYS, Measured, Profile
from notes_cli.measure.battery import LEAST, format_count, interval
from notes_cli.measure.composition import SPLICED
from notes_cli.measure.verify import ONE_PREFILL

if TYPE_CHECKING:
    from notes_cli.library.profiles import Measured, Profile, Profiles

report_option = click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a page of it to show others: .md.",
)


@click.command(cls=GroupedCommand)
@click.option(
    "--cases",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Decisions of your own in YAML, measured with those that ship. Repeatable.",
)
@click.option("--only", is_flag=True, help="Only the decisions of --cases.")
@click.option(
    *("-n", "--number"), type=Number(1), help="Only the first N decisions of each file, and pairs.  [default: all]"
)
@report_option
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
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
    with open_model(quiet=json_, **model) as opened:
        skill_pairs = () if only else pairs()[:number]
        profile, path = opened.calibrate(cases, pairs=skill_pairs, callbacks=print_callbacks(json_))
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

    if path.suffix.lower() != ".md":
        raise click.UsageError(f"--report writes .md, not {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise NotesError(f"{path}: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise NotesError(f"{path} is a folder")
    if path.exists() and not is_page(path.read_bytes()):
        raise NotesError(f"{path} is there, and not such a page: nothing is written over it. Name another file")


def write_report(path: Path, profile: Profile) -> None:

    day = profile.created[:10] or date.today().isoformat()
    path.write_text(page(profile, f"`notes calibrate` of notes {__version__} on {day}"), encoding="utf-8")
    output.say(f"written to {path}")


def as_dict(profile: Profile) -> dict[str, Any]:
    """Return a profile as in docs/json.md, with its finding."""

    result = finding(profile)
    return {**profile.as_dict(), "finding": result and result._asdict()}


def print_profile(profile: Profile) -> None:
    """Print the figures of each method, the finding, the verdicts, and the chosen settings."""

    names = dict.fromkeys(entry.name for entry in profile.measured if entry.what == "method")
    rows = []
    for name in names:
        direct, reasoned = (profile.found("method", name, way) for way in ("direct", "reasoned"))
        shares = [cell for measured in (direct, reasoned) for cell in _shares(measured)]
        cost = direct or reasoned
        assert cost is not None  # measured at least one way
        rows.append((name, f"{cost.decoded:.0f}", f"{cost.ms:.0f}", f"{cost.cosine:.4f}", *shares))
    columns = ("method", "decoded", "ms", "cosine", "right", "as recompute", "reasoned: right", "as recompute")
    if rows:
        output.table(columns, rows, right=columns[1:])
    result = finding(profile)
    if result:
        output.result(f"{result.kind}: {result.why}")
    for way in ("direct", "reasoned"):
        output.result(_verdict(profile, way))
    output.result(f"wording: {profile.wording}; seam: {profile.seam}; place: {profile.place}")
    if profile.carry:
        output.result(f"recurrent state: {profile.carry.verdict}: {profile.carry.why}")
    _print_composition(profile)


def _print_composition(profile: Profile) -> None:
    from notes_cli.commands.remedies import advice
    from notes_cli.runtime.resolve import repair

    composition = profile.composition
    if composition is None:
        output.result("several skills: not measured")
        return
    names = dict.fromkeys(entry.name for entry in profile.measured if entry.what == "composition")
    rows = []
    for name in names:
        one, two = (profile.found("composition", name, way) for way in ("one", "two"))
        either = two or one
        rows.append((name, f"{either.decoded:.0f}" if either else "", *(_shares(part)[0] for part in (one, two))))
    columns = ("two skills", "decoded", "one is needed: right", "both are needed: right")
    if rows:
        output.result("")
        output.table(columns, rows, right=columns[1:])
    output.result(f"several skills: {composition.why}")
    if composition.repair:
        output.result(f"for skills A and B: {advice(repair(composition.repair, ['A', 'B']))}")


def _shares(measured: Measured | None) -> tuple[str, str]:
    if not measured:
        return "", ""
    from notes_cli.measure.battery import interval

    low, high = interval(measured.right, measured.cases)
    return f"{measured.right} of {measured.cases} ({low:.2f} to {high:.2f})", f"{measured.same}"


def _verdict(profile: Profile, way: str) -> str:
    decisive = f"a recompute decides by the field in {profile.decisive[way]} of {profile.cases} cases"
    return f"{way}: use {profile.methods[way]}: {profile.verdicts[way]}; {decisive}"


_JSON = click.option("--json", "json_", is_flag=True, help="One JSON document (docs/json.md).")


@click.group(options_metavar="", subcommand_metavar="COMMAND ...")
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
@click.option("-q", "--quiet", is_flag=True, help="Names only, one a line.")
@_JSON
def ls(quiet: bool, json_: bool) -> None:
    """List profiles."""
    from notes_cli.commands.remedies import worded

    profiles = _profiles()
    listed: list[dict[str, Any]] = []
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
        listed.append(facts)
    if json_:
        output.as_json(listed)
    elif quiet:
        for facts in listed:
            output.data(facts["name"])
    elif not listed:
        output.say(f"no profiles yet in {profiles.folder}. Measure a model: notes calibrate")
    else:
        columns = ("name", "model", "cache", "direct", "reasoned", "cases", "measured")
        output.table(columns, [_row(facts) for facts in listed])


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    if facts["problem"]:
        return (facts["name"], facts["problem"], *[""] * 5)
    identity, methods = facts["identity"], facts["methods"]
    return (
        *(facts["name"], f"{identity['model']} {identity['quantization']}", facts["cache"]),
        *(methods["direct"], methods["reasoned"], str(facts["cases"]), facts["created"][:10]),
    )


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
    if json_:
        output.as_json({"version": 1, "removed": removed})
    else:
        output.data("\n".join(removed))


# Columns of the last table of a report: a row per model, to compare several.
ROW = (
    *("model", "weights", "cache", "recompute", "field in place", "after a thought", "erratum", "after a thought"),
    *("skills apart", "read together", "uses", "finding"),
)
METHODS = ("method", "decoded", "cosine", "directly: right", "as recompute", "after a thought: right", "as recompute")
PAIRS = ("two skills", "decoded", "one is needed: right", "both are needed: right")
TITLE = ": does it take notes?"


class Finding(NamedTuple):
    """`kind`: takes notes, looks up, partly; unable: its decisions do not depend on such fields; open: too few
    decisions. `why`: the reason, for display."""

    kind: str
    why: str


def finding(profile: Profile) -> Finding | None:
    """Judge by the decisions after a correction in place, with exact intervals (significance.py). None for a profile
    without them, as for a model whose K/V cannot be recomputed in place.

    Only decisions that the new value changes count: those where stale K/V and a recompute disagree. A method changes as
    many of them as it agrees with the recompute more often. If recomputing everything from the field on does not change
    most of them, the decisions depend on something before the field, and the finding is `unable`."""
    stale, field, suffix = (profile.found("method", str(method)) for method in (STALE, FIELD, SUFFIX))
    if stale is None or field is None or suffix is None:
        return None
    changed = stale.cases - stale.same
    if stale.cases < LEAST:
        return Finding("open", f"{stale.cases} decisions are too few to tell, {LEAST} at least are needed")
    in_place, after = (min(changed, max(0, method.same - stale.same)) for method in (field, suffix))
    (low, high), (least, most) = interval(in_place, changed), interval(after, changed)
    counts = (
        f"of {changed} decisions that the new value of a field turns, correcting the field in place turns {in_place} "
        f"({low:.2f} to {high:.2f}), computing all that follows it again {after} ({least:.2f} to {most:.2f})"
    )
    if least <= 0.5:
        return Finding(
            "unable", f"{counts}: it does not decide by such fields, so this tells nothing about corrections"
        )
    if high < 0.5:
        return Finding("takes notes", f"{counts}: what follows from a field is noted while the text is read")
    if low > 0.5:
        return Finding("looks up", f"{counts}: the field is looked up when the question is asked")
    return Finding("partly", f"{counts}: what follows from a field is noted in part, and looked up in part")


def page(profile: Profile, by: str) -> str:
    """Return a report of a profile in Markdown. `by`: program, version and time of the measurement."""
    identity, verdict = profile.identity, finding(profile)
    model = f"{identity.model} {identity.quantization}"
    parts = [
        f"# {model}{TITLE}",
        f"Measured by {by}, over {profile.cases} decisions, in each of which one field of a text "
        "changes so that another answer is right. "
        f"Architecture {identity.architecture}, cache {profile.cache}, RoPE {identity.rope_text}, weights "
        f"`{identity.weights[:16]}`. In brackets: exact 95% intervals.",
        f"**{verdict.kind.capitalize()}**: {verdict.why}."
        if verdict
        else "Fields cannot be corrected in place on this model.",
        *_reasoned_sentences(profile),
        grid(METHODS, _method_rows(profile)),
        "\n".join(_settings(profile)),
    ]
    pairs = list(_pair_rows(profile))
    if pairs:
        parts.append(grid(PAIRS, pairs))
    parts += ["## In one row, beside other models", grid(ROW, [row(profile)])]
    return "\n\n".join(parts) + "\n"


def is_page(data: bytes) -> bool:
    """Return True if a file is such a report, which may be overwritten."""
    first = data.partition(b"\n")[0]
    return first.startswith(b"# ") and first.endswith(TITLE.encode())


def row(profile: Profile) -> tuple[str, ...]:
    """Return the cells of ROW."""
    verdict = finding(profile)
    counts = [
        _count(profile.found("method", str(method), way))
        for method, way in (
            *((RECOMPUTE, "direct"), (FIELD, "direct"), (FIELD, "reasoned")),
            *((ERRATUM, "direct"), (ERRATUM, "reasoned")),
        )
    ]
    both = [_count(profile.found("composition", name, "two")) for name in (SPLICED, ONE_PREFILL)]
    identity = profile.identity
    used = " / ".join(dict.fromkeys(profile.methods[way] for way in WAYS))
    return (
        *(f"{identity.model} ({identity.architecture})", identity.quantization, profile.cache),
        *counts,
        *both,
        *(used, verdict.kind if verdict else ""),
    )


def _reasoned_sentences(profile: Profile) -> Iterator[str]:
    """Yield sentences on decisions after reasoning, and on errata."""
    field, erratum = (profile.found("method", str(method), "reasoned") for method in (FIELD, ERRATUM))
    direct = profile.found("method", str(ERRATUM))
    if field:
        yield f"After a chain of thought the field corrected in place is followed in {_right(field)}."
    if direct:
        after = f", after a chain of thought in {_right(erratum)}" if erratum else ""
        yield f"An erratum, a short line after the text, is followed in {_right(direct)}{after}."


def _method_rows(profile: Profile) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(row.name for row in profile.measured if row.what == "method"):
        direct, reasoned = (profile.found("method", name, way) for way in WAYS)
        cost = direct or reasoned
        assert cost is not None  # measured in at least one way
        shares = [cell for way in (direct, reasoned) for cell in ((_right(way), str(way.same)) if way else ("", ""))]
        yield (name, f"{cost.decoded:.0f}", f"{cost.cosine:.4f}", *shares)


def _settings(profile: Profile) -> Iterator[str]:
    """Yield the settings that `notes` uses for this model."""
    for way in WAYS:
        yield f"* {way}: `{profile.methods[way]}`: {profile.verdicts[way]}"
    yield f"* wording `{profile.wording}`, seam {profile.seam}, place {profile.place}"
    if profile.carry:
        yield f"* recurrent state: {profile.carry.why}"
    yield f"* several skills: {profile.composition.why if profile.composition else 'not measured'}"


def _pair_rows(profile: Profile) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(row.name for row in profile.measured if row.what == "composition"):
        one, two = (profile.found("composition", name, way) for way in ("one", "two"))
        cost = two or one
        yield (
            name,
            f"{cost.decoded:.0f}" if cost else "",
            *(_right(each) if each else "" for each in (one, two)),
        )


def _right(measured: Measured) -> str:
    return format_count(measured.right, measured.cases)


def _count(measured: Measured | None) -> str:
    return f"{measured.right} of {measured.cases}" if measured else ""


def grid(columns: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)

"""The page of results, assembled from the tables that experiments have left: any of them can be run again alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.experiments import EXPERIMENTS
from bench.experiments.frame import Bar, Summary, grid
from bench.experiments.table import Row, Table, read_table, write_table
from notes_cli.library.profiles import Profile
from notes_cli.measure.finding import page

PAGE, TITLE = "results-reversed.md", "The reversed model"  # in docs/
REPORT = "report.md"  # of any other model
ABOUT = "about.csv"  # a row an experiment: what was measured, and why not if it was refused
HEAD = f"""# {TITLE}

Written by `make experiments` (bench/experiments/); do not edit. An ablation: the model that shipped first (3.8M
parameters, training/notes-reversed-q8_0.gguf) looks a field up when it is asked, where the one that ships now, and the
paper's models of 1.7B to 70B parameters, take notes while they read ([findings](findings.md#on-the-tiny-model)).
Training decides which: training/README.md says what differs. What the paper (arXiv:2606.17107) found is beside what was
measured here. All texts are held out: training never saw their names and rules. Every table is computed from the
observations in [results/](results), where about.csv says of which model, how many cases, and the seed of the texts."""

EXPERIMENTS_OF = """## The paper's experiments

What the paper (arXiv:2606.17107) found is beside what was measured here, by `make experiments MODEL=FILE`. The texts
are policies in English of training/world.py, one question each. Bars are those that the project sets its own model:
what a model misses says what not to rely on with it. Every table is computed from the observations in
[results/](results)."""


def keep(folder: Path, about: Row, rows: Sequence[Row]) -> None:
    """Leave an experiment's rows; none of one that was refused, whose row in `about` says why."""
    path, name = folder / f"{about['experiment']}.csv", about["experiment"]
    kept = [row for row in _about(folder) if row["experiment"] != name]
    write_table(folder / ABOUT, [*kept, about])
    if rows:
        write_table(path, rows)
    else:
        path.unlink(missing_ok=True)


def load(folder: Path) -> dict[str, Table]:
    """The tables that are there, in the order of the experiments, with the model in every row."""
    tables = {}
    for about in sorted(_about(folder), key=lambda row: list(EXPERIMENTS).index(str(row["experiment"]))):
        name, model = str(about["experiment"]), {"model": about["model"]}
        rows = read_table(folder / f"{name}.csv").rows if not about["refused"] else [{"refused": about["refused"]}]
        tables[name] = Table(model | row for row in rows)
    return tables


def _about(folder: Path) -> list[Row]:
    return read_table(folder / ABOUT).rows if (folder / ABOUT).exists() else []


def refusal(table: Table) -> str:
    """Why the model was refused; empty if it was measured."""
    return "" if "case" in table.rows[0] else str(table.rows[0]["refused"])


def summary(name: str, tables: Mapping[str, Table]) -> Summary:
    """What is said of an experiment. One that could not be done has nothing but the reason."""
    reason = refusal(tables[name])
    if reason:
        return Summary(f"This model was refused: {reason}.", (), (), ())
    measured = {other: table for other, table in tables.items() if not refusal(table)}
    return EXPERIMENTS[name].summarise(tables[name], measured)


def section(name: str, tables: Mapping[str, Table], level: str = "") -> str:
    """An experiment in Markdown; `level` are the marks of its heading."""
    said, table = summary(name, tables), tables[name]
    parts = [f"{level} {EXPERIMENTS[name].TITLE} (`{name}`)".strip()]
    parts += [f"{table.rows[0]['model']}. {said.lead}", *said.tables]
    if said.bars:
        parts.append(_bars(said.bars))
    return "\n\n".join((*parts, *said.shows))


def results(folder: Path) -> str:
    """The page of the reversed model."""
    tables = load(folder)
    bars = [bar for name in tables for bar in summary(name, tables).bars]
    missed = [bar for bar in bars if not bar.met]
    parts = [HEAD, f"{len(bars) - len(missed)} of {len(bars)} bars are met" + ("; missed:" if missed else ".")]
    if missed:
        parts.append(
            "\n".join(f"* {bar.what}: {_value(bar)}, should be {bar.relation} {bar.bound:g}" for bar in missed)
        )
    return "\n\n".join((*parts, *_sections(tables, "##"))) + "\n"


def report(folder: Path, profile: Profile) -> str:
    """The page of any other model: what a calibration found, and the experiments."""
    by = f"`make experiments` on {profile.created[:10]}"
    return "\n\n".join((page(profile, by).rstrip(), EXPERIMENTS_OF, *_sections(load(folder), "###"))) + "\n"


def _sections(tables: Mapping[str, Table], level: str) -> Iterator[str]:
    """Each experiment, with its picture."""
    for name in tables:
        yield section(name, tables, level)
        if not refusal(tables[name]):
            yield f"![{EXPERIMENTS[name].TITLE}](results/{name}.svg)"


def _bars(bars: tuple[Bar, ...]) -> str:
    rows = [
        f"{bar.what} | {_value(bar)} | {bar.relation} {bar.bound:g} | {'met' if bar.met else '**missed**'}"
        for bar in bars
    ]
    return grid("bar | measured | asked | ", rows)


def _value(bar: Bar) -> str:
    return (
        "not measured"
        if bar.value != bar.value
        else f"{bar.value:.3g}"
        if abs(bar.value) < 0.001
        else f"{bar.value:.4f}"
    )

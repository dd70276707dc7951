"""Where the decisions of small readers of tables rest, by their size and by what their lessons had.

    python -m training.ablations.train NAME [NAME ...]       first: the models, in build/ablations
    python -m bench.ablations [NAME ...] [--cases N] [--write docs]

The subjects are those of training/ablations/subjects.py. Texts are of the level of their last lessons, fields above the
rules, and drawn from the commit that froze docs/protocol.md. Rows are kept case by case: what was stopped goes on where
it was. With --write the page of all that are stored is written again; alone it takes no model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.experiments.frame import grid
from bench.experiments.keeping import ROOT, KeptError
from bench.experiments.table import Row
from bench.protocol.__main__ import KEPT, Run
from bench.protocol.hypotheses import SCALE, judge
from bench.protocol.measures import MEASURES, Measure
from bench.protocol.paper import Found, check_of, number
from bench.protocol.report import as_json, lines, read, write
from bench.protocol.seeds import CommitError, frozen
from bench.protocol.texts import Next, Policies
from bench.resumed import check, goes_on
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import NotesError, UnsupportedError
from notes_cli.runtime.workspace import Workspace
from training.ablations.subjects import LESSONS, LONGER, SIZES, SUBJECTS, Lessons
from training.tiny.world import Level

MODELS = ROOT / "build" / "ablations"
STORED, PAGE = "results/ablations.json", "results-ablations.md"  # in docs/
WORDS, WORDED = "known", "notes-tiny"  # the words of their texts, and of prompts/reasoning.yaml
HEAD = """# Size and lessons: what decides where a decision rests

Written by `python -m bench.ablations`; do not edit. [The protocol](protocol.md) says what is measured here (R4). The
subjects are small models of [training/ablations](../training/ablations), which read policies whose rules are tables and
whose words are one token each. All of their weights learn, from a start that writes no note and reads none. In
brackets: 95% intervals, policies resampled."""
FILES = """Of seed 1 `1m`, `4m`, `10m` and `given` were trained before the start drew its words in an order of their own
(docs/LOG.md): the command makes other files of them. For the rest it begins alike every time: of four steps, trained
twice, the files were the same bit for bit; no whole run has been repeated."""


def level_of(lessons: Lessons) -> Level:
    """Of the texts that are measured: that of the last lessons, with fields above the rules, in the prompt's system
    text."""
    _, last = lessons.levels
    return replace(last, below=0.0, preamble=0.0)


class Tables(Next):
    """Policies of the level of the last lessons, whose rules are tables; one and two skills in turn."""

    def __init__(self, like: Next, lessons: Lessons) -> None:
        super().__init__(like.commit, WORDS, like.begin, like.fits)
        self.level = level_of(lessons)

    def cases(self, experiment: str, count: int) -> Iterator[tuple[int, Policies]]:
        return self.policies(experiment, count, (1, 2), self.level.rules, ("table",))


def _of_tables(name: str, lessons: Lessons) -> Measure:
    measure = MEASURES[name]

    def rows(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
        assert measure.rows is not None
        return measure.rows(workspace, cases, Tables(texts, lessons))

    return replace(measure, rows=rows, cases=SCALE.n)


def measured(path: Path, lessons: Lessons, seed: int, commit: str, cases: int | None, keep: Path) -> dict[str, Any]:
    """One subject: what it is, and its verdict, as plain data."""
    with Workspace(path, ContextOptions(n_ctx=2048, n_threads=1)) as workspace:
        if workspace.reasoning.name != WORDED:
            raise UnsupportedError(f"{path} is not asked to think as {WORDED} is: its name must begin so")
        run = Run(workspace, commit, cases, keep, seed)
        about = {"level": json.dumps(asdict(level_of(lessons)))}
        tables = {name: run.measured(name, WORDS, _of_tables(name, lessons), about) for name in SCALE.measures}
        found = as_json(judge(SCALE, WORDS, tables))
    first, *others = path.with_suffix(".log").read_text(encoding="utf-8").splitlines()
    *_, last = (line for line in others if line.startswith("step"))
    return {"about": run.about, "log": [first, last], "verdict": found}


@goes_on(NotesError, CommitError, KeptError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ablations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"subjects: {', '.join(SUBJECTS)}")
    parser.add_argument("--seed", type=int, default=1, help="of training (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder that has them (default: %(default)s)")
    parser.add_argument("--cases", type=int, help=f"of each measure (default: {SCALE.n})")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder that rows are kept in (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="DOCS", help=f"folder that gets {PAGE} and its JSON")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in SUBJECTS]:
        parser.error(f"no subject {unknown[0]!r}. There are: {', '.join(SUBJECTS)}")
    check(parser, given.cases, given.write)
    if given.write and given.cases:
        parser.error("--write takes as many cases as docs/protocol.md asks")
    paths = {name: given.models / f"{name}-seed{given.seed}.gguf" for name in given.names}
    for name, path in paths.items():
        if not path.is_file():
            parser.error(f"there is no {path}: python -m training.ablations.train {name} --seed {given.seed}")
    stored = _stored(given.write) if given.write else {}
    for name, path in paths.items():
        one = measured(path, SUBJECTS[name].lessons, given.seed, frozen(), given.cases, given.keep)
        print(name, *lines(one["verdict"]), sep="\n", flush=True)
        stored.setdefault(name, {})[str(given.seed)] = one
    if given.write:
        order = {name: stored[name] for name in SUBJECTS if name in stored}
        write(given.write / STORED, order)
        (given.write / PAGE).write_text(page(order), encoding="utf-8")
    return 0


def _stored(docs: Path) -> dict[str, dict[str, Any]]:
    """What was measured of each subject, by training seed."""
    path = docs / STORED
    return dict(read(path)) if path.is_file() else {}


def page(stored: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, of all that is stored."""
    sizes = {name: stored[name] for name in (*SIZES, *LONGER) if name in stored}
    lessons = {name: stored[name] for name in (*list(SIZES)[:1], *LESSONS) if name in stored}
    parts = [
        HEAD,
        "## By size",
        "All had the same lessons, and the same texts and steps but for the control, which had twice as many steps.",
        _tables(sizes),
    ]
    parts += ["## By lessons", "All have the size of the first. What differs from its lessons:", _tables(lessons)]
    parts += ["## The files", FILES]
    for name, seeds in stored.items():
        for seed, one in seeds.items():
            about = one["about"]
            parts.append(
                f"`{name}`, training seed {seed}: {SUBJECTS[name].what}; SHA-256 {about['weights'][:16]}, "
                f"{about['settings']}. Its training began with `{one['log'][0]}` and ended with `{one['log'][1]}`."
            )
    return "\n\n".join(parts) + "\n"


WHERE = {  # does a decision rest
    "field's rows fresh": "field's rows fresh: new value",
    "rows after it fresh": "rows after it fresh: new value",
    "note index": "note index",
    "note index, fields below": "fields below the rules: note index",
    "note index, fields below, by the field's whole line": "by the field's whole line",
}
THOUGHT = {
    "right, direct": "right, directly",
    "right after an erratum": "after an erratum",
    "right, reasoned": "after a chain of thought",
    "after a chain of thought: field's rows fresh": "after one, field's rows fresh: new value",
    "after a chain of thought: rows after it fresh": "rows after it fresh: new value",
}


def _tables(subjects: Mapping[str, Mapping[str, Any]]) -> str:
    """Where decisions rest, and then what is right and what a chain of thought does: a row for each file."""
    tables = []
    for shown in (WHERE, THOUGHT):
        rows = []
        for name, seeds in subjects.items():
            for seed, one in seeds.items():
                cells = (_cell(check_of(one["verdict"], what)) for what in shown)
                rows.append(" | ".join((f"`{name}`, seed {seed}: {SUBJECTS[name].what}", *cells)))
        tables.append(grid(" | ".join(("", *shown.values())), rows))
    return "\n\n".join(tables)


def _cell(check: Found | None) -> str:
    """A figure, and of how many cases, where they are fewer than R4 asks."""
    if not check:
        return "not measured"
    return number(check) + (f", {check['n']} cases alone" if check["n"] < SCALE.n else "")


if __name__ == "__main__":
    sys.exit(main())

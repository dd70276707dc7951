"""The paper's experiments on a model: tables on standard output, and with --write CSV, pictures and a page.

    python -m bench.experiments [NAME ...] [--model FILE] [--cases N] [--threads N] [--write docs]

Texts are of training/world.py, and training never saw them. Exits 1 if a bar is missed or the model is refused.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.experiments import EXPERIMENTS, figures
from bench.experiments.frame import SEED
from bench.experiments.report import PAGE, keep, load, refusal, results, section, summary
from bench.experiments.table import Row
from bench.experiments.texts import First
from bench.reversed_model import REVERSED, REVERSED_NAME
from notes_cli.engine.context import ContextOptions
from notes_cli.errors import NotesError
from notes_cli.runtime.workspace import Workspace


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    for name in given.names:
        if name not in EXPERIMENTS:
            parser.error(f"no experiment {name!r}. There are: {', '.join(EXPERIMENTS)}")
    if given.cases is not None and given.cases < 1:
        parser.error(f"--cases {given.cases}: there must be one at least")
    if given.write and not given.write.is_dir():
        parser.error(f"--write {given.write}: there is no such folder")
    met = True
    options = ContextOptions(n_ctx=4096, n_threads=given.threads, flash_attention=given.flash_attention)
    try:
        with TemporaryDirectory() as scratch:
            folder = given.write / "results" if given.write else Path(scratch)
            folder.mkdir(exist_ok=True)
            with Workspace(given.model or REVERSED, options) as workspace:
                for name in given.names or EXPERIMENTS:
                    _measure(workspace, name, given.cases, given.seed, folder)
                    tables = load(folder)
                    print(section(name, tables), end="\n\n", flush=True)
                    met &= not refusal(tables[name]) and all(bar.met for bar in summary(name, tables).bars)
                    if given.write:
                        _write(given.write, name)
    except NotesError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if met else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.experiments",
        description=__doc__,
        epilog="\n".join(["experiments:", *(f"  {name:14}{each.TITLE}" for name, each in EXPERIMENTS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments to run (default: all)")
    parser.add_argument("--model", type=Path, help="GGUF to measure (default: the reversed model of training/)")
    parser.add_argument("--cases", type=int, help="cases of each experiment (default: its own number)")
    parser.add_argument(
        "--threads", type=int, default=1, help="(default: 1, the quickest for a model as small as ours)"
    )
    parser.add_argument(
        "--flash-attention",
        choices=("auto", "on", "off"),
        default="off",
        help="(default: off, for llama.cpp's CPU kernel is slow on batches of less than 64 tokens)",
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the texts (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="DOCS", help=f"folder that gets {PAGE} and results/")
    return parser


def _measure(workspace: Workspace, name: str, cases: int | None, seed: int, folder: Path) -> None:
    """Leave the experiment's table in the folder, or why there is none."""
    experiment, model = EXPERIMENTS[name], workspace.model
    count, rows, refused = cases or experiment.CASES, [], ""
    try:
        rows = list(_told(name, count, experiment.measure(workspace, count, First(seed))))
    except NotesError as error:
        refused = str(error)
    said_of = REVERSED_NAME if model.path == REVERSED else model.name
    said = f"{said_of} {model.quantization}, flash attention {workspace.options.flash_attention}"
    about: Row = {"experiment": name, "model": said, "cases": count, "seed": seed, "refused": refused}
    keep(folder, about, rows)


def _told(name: str, count: int, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows as they come, and on standard error how far they are."""
    started, end = time.monotonic(), "\r" if sys.stderr.isatty() else "\n"
    case = 0
    for row in rows:
        if row["case"] != case and (end == "\r" or int(row["case"]) % 50 == 1):
            case = int(row["case"])
            sys.stderr.write(f"{name}: case {case} of {count}, {time.monotonic() - started:.0f} s{end}")
        yield row
    sys.stderr.write(f"{name}: {count} cases in {time.monotonic() - started:.0f} s\n")


def _write(docs: Path, name: str) -> None:
    table = load(docs / "results")[name]
    picture = docs / "results" / f"{name}.svg"
    if refusal(table):
        picture.unlink(missing_ok=True)
    else:
        figures.save(picture, partial(EXPERIMENTS[name].draw, table))
    (docs / PAGE).write_text(results(docs / "results"), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

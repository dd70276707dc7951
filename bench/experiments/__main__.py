"""The paper's experiments on a model: tables on standard output, and with --write CSV, pictures and a page.

    python -m bench.experiments [NAME ...] [--write docs]                  the reversed model, against bars
    python -m bench.experiments [NAME ...] --model FILE [--estimate]       any GGUF: what comes of it is reported

Texts are of training/world.py: policies in English, which the reversed model never saw in training. Rows are kept
case by case (--keep): the same command goes on where it was stopped. Of a model that is named it is told first what
memory and about what time it takes; then it is calibrated, and a report with a row for docs/models.md is written.
Exits 1 if the model is refused, or the reversed one misses a bar.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.experiments import EXPERIMENTS, figures
from bench.experiments.calibration import profile_of
from bench.experiments.frame import SEED
from bench.experiments.keeping import ROOT, KeptError
from bench.experiments.report import PAGE, REPORT, keep, load, report, results, section, summary
from bench.experiments.run import Run, told
from bench.resumed import check, goes_on
from bench.reversed_model import REVERSED, REVERSED_NAME
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import NotesError
from notes_cli.runtime.naming import model_file
from notes_cli.runtime.workspace import Workspace

KEPT = ROOT / "build" / "experiments"


@goes_on(NotesError, KeptError)
def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    for name in given.names:
        if name not in EXPERIMENTS:
            parser.error(f"no experiment {name!r}. There are: {', '.join(EXPERIMENTS)}")
    check(parser, given.cases, given.write)
    if given.estimate and not given.model:
        parser.error("--estimate is for --model FILE")
    return _one_named(given) if given.model else _reversed(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.experiments",
        description=__doc__,
        epilog="\n".join(["experiments:", *(f"  {name:14}{each.TITLE}" for name, each in EXPERIMENTS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments to run (default: all)")
    parser.add_argument("--model", help="GGUF file, or the name of a model (default: the reversed model of training/)")
    parser.add_argument("--estimate", action="store_true", help="only say what memory and time it will take")
    parser.add_argument("--cases", type=int, help="cases of each experiment (default: its own number)")
    parser.add_argument("--threads", type=int, help="(default: as `notes` does; 1 for the reversed model)")
    parser.add_argument(
        "--flash-attention",
        choices=("auto", "on", "off"),
        help="(default: auto; off for the reversed model, as llama.cpp's CPU kernel is slow on short batches)",
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the texts (default: %(default)s)")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder that rows are kept in (default: %(default)s)")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="DOCS",
        help="folder that gets the page and results/ (default: with --model --keep)",
    )
    return parser


def _reversed(given: argparse.Namespace) -> int:
    """The reversed model, whose page is in docs/."""
    options = ContextOptions(n_ctx=4096, n_threads=given.threads or 1, flash_attention=given.flash_attention or "off")
    with TemporaryDirectory() as scratch, Workspace(REVERSED, options) as workspace:
        run = Run(workspace, given.seed, given.cases, given.keep)
        folder = given.write or Path(scratch)
        met = True
        for name in given.names or EXPERIMENTS:
            table = _measured(run, workspace, REVERSED_NAME, name, folder / "results")
            met &= not table and all(bar.met for bar in summary(name, load(folder / "results")).bars)
            if given.write:
                (folder / PAGE).write_text(results(folder / "results"), encoding="utf-8")
    return 0 if met else 1


def _one_named(given: argparse.Namespace) -> int:
    """A model of the user's, with a report of its own."""
    path = model_file(given.model)
    options = ContextOptions(n_ctx=4096, n_threads=given.threads, flash_attention=given.flash_attention or "auto")
    names = given.names or list(EXPERIMENTS)
    with Workspace(path, options) as workspace:
        run = Run(workspace, given.seed, given.cases, given.keep)
        run.expect(names)
        if given.estimate:
            return 0
        folder = given.write or run.folder
        profile = profile_of(workspace, told("calibration"))
        refused = [name for name in names if _measured(run, workspace, path.stem, name, folder / "results")]
        (folder / REPORT).write_text(report(folder / "results", profile), encoding="utf-8")
    sys.stderr.write(f"written to {folder / REPORT}\n")
    return 1 if len(refused) == len(names) else 0


def _measured(run: Run, workspace: Workspace, model: str, name: str, folder: Path) -> str:
    """Leave the experiment's table and picture in the folder, say what it shows, and why it was refused, if it was."""
    table, refused = run.measure(name)
    about = f"{model} {workspace.model.quantization}, flash attention {workspace.options.flash_attention}"
    folder.mkdir(parents=True, exist_ok=True)
    keep(
        folder,
        {"experiment": name, "model": about, "cases": run.cases(name), "seed": run.seed, "refused": refused},
        table.rows,
    )
    tables = load(folder)
    picture = folder / f"{name}.svg"
    if refused:
        picture.unlink(missing_ok=True)
    else:
        figures.save(picture, partial(EXPERIMENTS[name].draw, tables[name]))
    print(section(name, tables), end="\n\n", flush=True)
    return refused


if __name__ == "__main__":
    sys.exit(main())

"""Measure every hypothesis of docs/protocol.md on a model of training/tiny: what, how often, between what, and its bar.

    python -m bench.protocol FILE [H1 H4 ...] [--seed-of-training N] [--cases N] [--write docs]
    python -m bench.protocol FILE --beside reversed    another model, to compare; --beside random: FILE's shape alone
    python -m bench.protocol --write docs    the page again, of what is stored: nothing is measured

Texts are of training/tiny/world.py, drawn from the commit that last changed docs/protocol.md: in a checkout without git
it is named by --commit. They come in two passes, with words that training never saw and with known ones. Rows are kept
case by case (--keep): what was stopped goes on where it was. Those of H21 take PyTorch: python -m training.tiny.heads
measures them, and here they are read. Exits 1 if a bar is missed, or there are too few cases.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.experiments.keeping import Kept, KeptError
from bench.experiments.table import Row, Table
from bench.protocol import picture, report
from bench.protocol.hypotheses import ADDED, APART, HYPOTHESES, Hypothesis, judge
from bench.protocol.measures import MEASURES, Measure
from bench.protocol.measures.weights import write_random
from bench.protocol.seeds import ROOT, CommitError, frozen, named, rng_of
from bench.protocol.sources import sources
from bench.protocol.texts import WORDS, Next
from bench.resumed import check, goes_on
from notes_cli.engine import system
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import NotesError, UnsupportedError
from notes_cli.runtime.workspace import Workspace

LONGEST = 450  # tokens of a memory, as in the last stage of training; the agent's and the blocks' are as they come
DRAWN = 2  # times the cases that are needed: where more than half decide alike, there are too few
KEPT = ROOT / "build" / "protocol"


@goes_on(NotesError, CommitError, KeptError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    names = list(dict.fromkeys(name.upper() for name in given.names)) or list(HYPOTHESES)
    for name in names:
        if name in APART:
            what, by, _ = APART[name]
            parser.error(f"{name} is of other models ({what}): {by}")
        if name not in HYPOTHESES:
            parser.error(f"no hypothesis {name!r}. There are: {', '.join(HYPOTHESES)}")
    check(parser, given.cases, given.write)
    which = given.seed_of_training or given.beside
    if given.model is None:
        if not given.write or names != list(HYPOTHESES) or which or given.cases:
            parser.error("FILE is missing; only --write DOCS does without, alone")
        return _page(given.write)
    if given.write and (given.cases or which is None):
        parser.error("--write takes --seed-of-training or --beside, and as many cases as docs/protocol.md asks")
    commit = named(given.commit) if given.commit else frozen()
    options = ContextOptions(n_ctx=4096, n_threads=given.threads)
    with TemporaryDirectory() as folder:
        model = given.model
        if given.beside == "random":
            seed = rng_of(commit, "random weights", 1).getrandbits(64)
            model = write_random(model, Path(folder, f"random-{model.name}"), seed)
        with Workspace(model, options) as workspace:
            run = Run(workspace, commit, given.cases, given.keep, which)
            found = run.judged([HYPOTHESES[name] for name in names])
    if given.write:
        _write(given.write, which, run.about, found)
    return 0 if all(one["says"] in ("holds", "reported") for one in found) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.protocol",
        description=__doc__,
        epilog="\n".join(
            [
                "hypotheses:",
                *(f"  {each.name:10}{each.what}" for each in HYPOTHESES.values()),
                "of other models:",
                *(f"  {name:10}{what}: {by}" for name, (what, by, _) in APART.items()),
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="FILE", help="GGUF to measure")
    parser.add_argument("names", nargs="*", metavar="H1", help="hypotheses (default: all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed-of-training", type=int, choices=report.SEEDS, help="which of the three models it is")
    which.add_argument("--beside", choices=report.BESIDE, help="it is another model, or random weights in its shape")
    parser.add_argument("--cases", type=int, help="cases of each measure (default: as many as the protocol asks)")
    parser.add_argument("--commit", help="that last changed docs/protocol.md before the first figure (default: git's)")
    parser.add_argument("--threads", type=int, default=1, help="(default: 1, the quickest for so small a model)")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder that rows are kept in (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="DOCS", help=f"folder that gets {report.PAGE} and its JSON")
    return parser


def _write(docs: Path, which: int | str, about: Mapping[str, Any], found: Sequence[report.Found]) -> None:
    """The JSON of this training seed or other model, with what it has of other hypotheses, and the page of all that are
    there, which says what was not measured. Raise KeptError, and write nothing, where they do not belong together."""
    files = report.files(docs)
    parts: dict[int | str, list[report.Found]] = {which: []}
    for one in found:
        later = isinstance(which, int) and one["hypothesis"] in ADDED
        parts.setdefault(report.later(int(which)) if later else which, []).append(one)
    parts = {name: of for name, of in parts.items() if of or len(parts) == 1}
    written = {name: report.document(about, report.merged(files[name], about, of)) for name, of in parts.items()}
    documents = _stored(docs) | written
    report.page(documents, docs)  # raises before anything is written
    (docs / "results").mkdir(exist_ok=True)
    for name, one in written.items():
        report.write(files[name], one)
    _draw(docs, documents)


def _page(docs: Path) -> int:
    """The page of what is stored. Returns an exit status."""
    try:
        _draw(docs, _stored(docs))
    except KeptError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _stored(docs: Path) -> dict[int | str, report.Found]:
    return {which: report.read(path) for which, path in report.files(docs).items() if path.is_file()}


def _draw(docs: Path, documents: Mapping[int | str, report.Found]) -> None:
    report.check(documents)
    drawn = picture.save(docs / report.PICTURE, report.by_seed(documents))
    (docs / report.PAGE).write_text(report.page(documents, docs, drawn), encoding="utf-8")


class Run:
    """One model: its rows are kept in a folder of its own, and its verdicts in results.json there."""

    def __init__(
        self, workspace: Workspace, commit: str, cases: int | None, keep: Path, which: int | str | None
    ) -> None:
        self._workspace, self._cases, self._commit = workspace, cases, commit
        self._folder = keep / workspace.weights[:16]
        model, options = workspace.model, workspace.options
        self.about: dict[str, Any] = {
            "model": model.path.name,
            "weights": workspace.weights,
            "settings": f"{model.quantization} weights, {options.cache} cache, "
            f"flash attention {options.flash_attention}",
            "commit": commit,
            "training seed": which,
            "sources": sources(),
            "engine": system.build(),
        }
        self._tables: dict[tuple[str, str], Table] = {}

    def judged(self, hypotheses: Sequence[Hypothesis]) -> list[dict[str, Any]]:
        """Measure what they need, words by words, and print each verdict as it comes."""
        found = []
        self._folder.mkdir(parents=True, exist_ok=True)
        for hypothesis in hypotheses:
            for words in WORDS:
                if words not in hypothesis.words:
                    continue
                tables = {name: self.measured(name, words) for name in hypothesis.measures}
                found.append(report.as_json(judge(hypothesis, words, tables)))
                print("\n".join(report.lines(found[-1])), flush=True)
                path = self._folder / "results.json"
                report.write(path, report.document(self.about, report.merged(path, self.about, found)))
        return found

    def measured(
        self, name: str, words: str, measure: Measure | None = None, about: Mapping[str, str] | None = None
    ) -> Table:
        """The rows of a measure: one of MEASURES, or the given one. `about`: what its rows depend on besides."""
        if (name, words) not in self._tables:
            self._tables[name, words] = self._rows(name, words, measure or MEASURES[name], about or {})
        return self._tables[name, words]

    def _rows(self, name: str, words: str, measure: Measure, more: Mapping[str, str]) -> Table:
        """What is kept already, and what is missing of it."""
        model, path = self._workspace.model, self._folder / f"{name}, {words}.jsonl"
        wanted = self._cases or measure.cases
        about = {
            **{key: str(self.about[key]) for key in ("weights", "settings", "commit", "sources", "engine")},
            **more,
        }
        if measure.rows is None and not path.exists():
            sys.stderr.write(f"{name}, {words}: not measured: run {measure.by} {model.path}\n")
            return Table([])
        kept = Kept(path, {**about, "measure": name, "words": words})
        texts = Next(
            *(self._commit, words, kept.next),
            fits=lambda text: len(model.tokenize(text)) <= LONGEST,
            several=lambda word: len(model.tokenize(" " + word)) > 1,
        )
        if measure.rows is None:
            if kept.used() < wanted:
                sys.stderr.write(f"{name}, {words}: {kept.used()} of {wanted} cases are there: run {measure.by}\n")
        elif kept.used() < wanted and kept.next <= DRAWN * wanted:
            rows = measure.rows(self._workspace, DRAWN * wanted, texts)
            try:
                for _ in kept.add(_told(f"{name}, {words}", wanted, rows)):
                    if kept.used() >= wanted:
                        break
            except UnsupportedError as error:
                sys.stderr.write(f"{name}: this model was refused: {error}\n")
        return kept.table


def _told(name: str, wanted: int, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows as they come, and on standard error now and then how far they are."""
    started = said = time.monotonic()
    for row in rows:
        if time.monotonic() - said > 20:
            said = time.monotonic()
            sys.stderr.write(f"{name}: case {row['case']}, {wanted} are needed; {said - started:.0f} s\n")
        yield row


if __name__ == "__main__":
    sys.exit(main())

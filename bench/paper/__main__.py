"""Run the paper's experiments on a model, and write a report.

    python -m bench.paper --model FILE.gguf --tasks tasks.json   # all experiments; run again, it goes on where it was
    python -m bench.paper ... --scale 0.2 --only facts           # a fifth of the tasks; some experiments alone
    python -m bench.paper ... --records CLONE                    # the author's records, of a clone of his repository
    python -m bench.paper ... --write                            # also docs/paper.md, with the models that it has

Each finished task is a line of build/paper/MODEL.jsonl. The report is MODEL.md and MODEL.json beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import notes_cli as notes
from bench.paper import report
from bench.paper import tasks as made
from bench.paper.caches import Lab
from bench.paper.experiments import EXPERIMENTS, PAIRS, Result, cells
from bench.paper.records import read_records
from notes_cli import config
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.errors import EngineError, NotesError
from notes_cli.runtime.naming import model_file, own_name
from notes_cli.text.erratum import Erratum, shipped_wordings, word

WORDING = "state"  # the author's; the tiny model's own tasks have the default one


class Results:
    """Results in a file, a line each, of one model with the same tasks."""

    def __init__(self, path: Path, model: str, fingerprint: str) -> None:
        """Raises NotesError for results of another model or of other tasks."""
        self.path, self.found = path, dict[str, Result]()
        head = {"model": model, "fingerprint": fingerprint}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # a run that was killed while it wrote
            path.write_text("".join(lines[:-1]), encoding="utf-8")
            del lines[-1]
        if not lines:
            self._append(head)
        elif json.loads(lines[0]) != head:
            raise NotesError(f"{path} has results of another model or of other tasks", "Remove it, or move it away")
        for line in lines[1:]:
            entry = json.loads(line)
            self.found[entry["cell"]] = entry["result"]

    def add(self, key: str, result: Result) -> None:
        self.found[key] = result
        self._append({"cell": key, "result": result})

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def run(model: str, tasks: Path, out: Path, scale: float, only: Sequence[str], n_ctx: int) -> tuple[str, Results]:
    """Run the cells that have no result yet. Returns the name of the model and all its results. Raises NotesError."""
    data = made.load(tasks)
    tiny = own_name(model_file(model)) == config.SHIPPED_TINY
    options = ContextOptions(n_ctx=n_ctx, n_sequences=4, unified=True)
    with (
        tempfile.TemporaryDirectory() as home,
        notes.open(model, options, paths=Paths.under(Path(home)), beyond_trained=True) as opened,
    ):
        workspace = opened.workspace
        fingerprint = hashlib.sha256(f"{workspace.weights} {json.dumps(data, sort_keys=True)}".encode()).hexdigest()
        results = Results(out / f"{opened.name.replace(' ', '-')}.jsonl", opened.name, fingerprint)
        author = Lab(workspace, system=False, erratum=lambda field, value: _word(field, value, WORDING))
        default = shipped_wordings()["default"]
        own = Lab(workspace, system=True, erratum=lambda field, value: _word(field, value, default))
        left = [cell for cell in cells(data, scale, only, tiny=tiny) if cell.key not in results.found]
        _print(f"{len(left)} tasks are left. Interrupt and run it again as you like")
        for cell in left:
            began = time.perf_counter()
            try:
                result = cell.run(own if tiny and cell.experiment in PAIRS else author)
            except EngineError as error:  # it does not fit
                result = {"left_out": str(error)}
            results.add(cell.key, result)
            _print(f"{cell.key}: {time.perf_counter() - began:.1f} s")
        return opened.name, results


def _word(field: str, value: str, wording: str) -> str:
    return word(Erratum(field, value, ""), wording)


def _print(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the paper's experiments on a model.")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a name that `notes models` lists")
    parser.add_argument("--tasks", type=Path, required=True, help="the author's tasks: a tasks.json, or his clone")
    parser.add_argument("--records", type=Path, help="a clone of the author's repository, for his records")
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", help="an experiment alone; repeatable")
    parser.add_argument("--scale", type=float, default=1.0, help="the share of each experiment's tasks (1.0)")
    parser.add_argument("--n-ctx", type=int, default=8192, help="cells of the cache (8192)")
    parser.add_argument("--out", type=Path, default=report.ROOT / "build" / "paper", help="where results are kept")
    parser.add_argument("--write", action="store_true", help="write docs/paper.md, too")
    given = parser.parse_args(arguments)
    if not 0 < given.scale <= 1:
        parser.error(f"--scale {given.scale:g}: it must be above 0, and 1 at most")
    try:
        name, results = run(
            given.model, given.tasks, given.out, given.scale, given.only or list(EXPERIMENTS), given.n_ctx
        )
        stored = report.stored()
        if given.records:
            stored["records"] = read_records(given.records)
    except NotesError as error:
        print(f"bench.paper: {error}", file=sys.stderr)
        return 1
    rows = report.rows(results.found)
    alone = {"records": stored["records"], "models": {name: rows}}
    results.path.with_suffix(".json").write_text(json.dumps(alone) + "\n", encoding="utf-8")
    results.path.with_suffix(".md").write_text(report.page(alone), encoding="utf-8")
    print(results.path.with_suffix(".md"))
    if given.write:
        stored["models"][name] = rows
        report.write(stored)
    return 0


if __name__ == "__main__":
    sys.exit(main())

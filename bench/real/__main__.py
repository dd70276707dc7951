"""Measure splices and corrections on real texts, with SmolLM2 or any GGUF.

    python -m bench.real                          # SmolLM2, all parts (about 40 minutes on two cores)
    python -m bench.real --model model.gguf       # another model
    python -m bench.real --only corrections       # one part: speed, fidelity, facts, corrections, places, seams
    python -m bench.real --facts tasks.json       # with the author's facts (bench/real/tasks.py)
    python -m bench.real --write                  # also write README's and docs' tables (bench/real/report.py)

What is asked is in tasks.yaml, about the texts in skills/.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import notes_cli as notes
from bench.real import measure, report, seams
from bench.real.tasks import ROOT, load_facts, load_tasks
from bench.results import Results
from notes_cli.config import Paths

PARTS = ("speed", "fidelity", "facts", "corrections", "places", "seams")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure splices and corrections on real texts.")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a name that `notes models` lists")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part alone; repeatable")
    parser.add_argument("--facts", type=Path, metavar="FILE", help="the author's word lists and passages")
    parser.add_argument("--write", action="store_true", help="write the tables into README and docs")
    given = parser.parse_args()
    parts = given.only or [part for part in PARTS[:4] if part != "facts" or given.facts]
    if {"facts", "seams"} & {*parts} and given.facts is None:
        parser.error("facts and seams need --facts FILE")
    tasks = load_tasks()
    with tempfile.TemporaryDirectory() as home, notes.open(given.model, paths=Paths.under(Path(home))) as model:
        whole: dict[str, Any] = {}
        run: dict[str, Callable[[], Any]] = {
            "speed": lambda: measure.speed(model, tasks, _progress),
            "fidelity": lambda: measure.fidelity(model, tasks, _progress),
            "facts": lambda: measure.facts(model.workspace, load_facts(given.facts), _progress),
            "seams": lambda: seams.measure(model.workspace, load_facts(given.facts), _kept(model, given.facts)),
            "corrections": lambda: measure.corrections(model, tasks, _progress),
            "places": lambda: measure.places(model, tasks, _progress),
        }
        for part in parts:
            whole[part] = run[part]()
            if given.write:
                report.write(model.name, part, whole[part])
        print(report.tables(whole))
    return 0


def _kept(model: notes.Model, tasks: Path) -> Results:
    """The results of earlier runs with this model and these tasks."""
    digest = hashlib.sha256(f"{model.workspace.weights} {tasks.read_text(encoding='utf-8')}".encode()).hexdigest()
    return Results(ROOT / "build" / "real" / f"seams-{model.name.replace(' ', '-')}.jsonl", model.name, digest)


def _progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

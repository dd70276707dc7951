"""Measure splices and corrections on real texts, with SmolLM2 or any GGUF.

    python -m bench.real                          # SmolLM2, all parts (about 40 minutes on two cores)
    python -m bench.real --model model.gguf       # another model
    python -m bench.real --only corrections       # one part: speed, fidelity, facts, corrections
    python -m bench.real --facts tasks.json       # with the author's facts (bench/real/tasks.py)
    python -m bench.real --write                  # also write README's and docs' tables (bench/real/report.py)

What is asked is in tasks.yaml, about the texts in skills/.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import notes_cli as notes
from bench.real import measure, report
from bench.real.tasks import load_facts, load_tasks
from notes_cli.config import Paths

PARTS: dict[str, Callable[[notes.Model, argparse.Namespace], Any]] = {
    "speed": lambda model, _: measure.speed(model, load_tasks(), _progress),
    "fidelity": lambda model, _: measure.fidelity(model, load_tasks(), _progress),
    "facts": lambda model, given: measure.facts(model.workspace, load_facts(given.facts), _progress),
    "corrections": lambda model, _: measure.corrections(model, load_tasks(), _progress),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure splices and corrections on real texts.")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a name that `notes models` lists")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part alone; repeatable")
    parser.add_argument("--facts", type=Path, metavar="FILE", help="the author's word lists and passages")
    parser.add_argument("--write", action="store_true", help="write the tables into README and docs")
    given = parser.parse_args()
    parts = given.only or [part for part in PARTS if part != "facts" or given.facts]
    if "facts" in parts and given.facts is None:
        parser.error("facts need --facts FILE")
    with tempfile.TemporaryDirectory() as home, notes.open(given.model, paths=Paths.under(Path(home))) as model:
        whole: dict[str, Any] = {}
        for part in parts:
            whole[part] = PARTS[part](model, given)
            if given.write:
                report.write(model.name, part, whole[part])
        print(report.tables(whole))
    return 0


def _progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

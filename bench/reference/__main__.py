"""Compare the engine with the author's PyTorch code on his tasks: `make reference CLONE=path-or-URL`.

    .venv-reference/bin/python -m bench.reference --clone DIR [--tasks FILE] [--model FILE]... [--facts N] [--write]

Both compute with the same weights in f32 and the same token ids. Exits 1 if a case differs by more than report.DISTANCE
or decides otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from bench.marked import put_between
from bench.random_model import ROOT
from bench.real.tasks import FACTS
from bench.reference import cases, ours, report
from notes_cli.config import shipped_model
from notes_cli.engine.model import Model
from notes_cli.library.models import SMOLLM2

FOLDER = ROOT / "build" / "reference"
PAGE, BEGIN, END = ROOT / "docs" / "reference.md", "<!-- make reference: begin -->\n", "<!-- make reference: end -->"
NEEDED = ("torch", "transformers", "accelerate")
SIZE = 4096  # tokens of the context, for a sequence and its fork


def cloned(source: str) -> Path:
    """The folder of a clone; a URL is cloned once. Exits with one line where there is none."""
    if not source:
        raise SystemExit("name a clone of the author's repository (programmable-kv): make reference CLONE=path-or-URL")
    folder = FOLDER / "author" if "://" in source else Path(source)
    if "://" in source and not folder.exists():
        subprocess.run(["git", "clone", "-q", "--depth", "1", source, str(folder)])
    if not (folder / "editkv" / "core.py").is_file():
        raise SystemExit(f"{source} is no clone of the author's repository: it has no editkv/core.py")
    return folder.resolve()


def run(path: Path, clone: Path, tasks: Path, facts: int, threads: int) -> tuple[str, list[report.Compared]]:
    """Compare all cases on a model. Returns its name and the comparisons."""
    from bench.reference.author import Author

    found = []
    with Model(ours.in_f32(path, FOLDER), gpu_layers=0) as model, ours.open_context(model, SIZE, threads) as context:
        tokenize = partial(cases.encode, model)
        author, todo = Author(clone, path, tokenize, threads), cases.load(tasks, model, facts)
        for number, given in enumerate(todo):
            print(f"{time.strftime('%H:%M:%S')} {model.name}: {number} of {len(todo)} cases", file=sys.stderr)
            case = cases.padded(given, tokenize)
            tokens = cases.tokens_of(case, model)
            mine, his = ours.logits_of(context, tokens), author.logits_of(case, tokens)
            if case != given:
                tokens = cases.tokens_of(given, model)
                mine |= ours.logits_of_other_length(context, tokens)
                his |= author.logits_of_other_length(given, tokens)
            answers = [tokenize(answer)[0] for answer in case.answers]
            found += report.compare(f"{case.group}, {case.name}", mine, his, answers)
        return model.name, found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clone", default="", help="path or URL of the author's repository")
    parser.add_argument("--tasks", type=Path, help="his tasks as JSON instead of those in the clone")
    parser.add_argument("--model", type=Path, action="append", help="a GGUF of the architecture llama")
    parser.add_argument("--facts", type=int, default=FACTS, help=f"of the {FACTS} facts, the first so many")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    clone = cloned(given.clone)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not installed: make reference CLONE=... installs the extra `reference`")
    for path in (*([given.tasks] if given.tasks else []), *(given.model or [])):
        if not path.is_file():
            raise SystemExit(f"there is no file {path}")
    models = [SMOLLM2.find(FOLDER), shipped_model()]
    if not given.model and models[0] is None:
        raise SystemExit("SmolLM2 is missing: make dev installs it, or name a model with --model")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.tasks is None:
        from bench.reference.author import write_tasks

        given.tasks = write_tasks(clone, FOLDER / "tasks.json")
    found = dict(run(path, clone, given.tasks, given.facts, given.threads) for path in given.model or models)
    print(report.table(found))
    failed = [f"{name}: {line}" for name, some in found.items() for line in report.failures(some)]
    if given.write:
        put_between(PAGE, BEGIN, END, f"\n{report.table(found)}\n\n")
    print("\n".join(failed) or "Every case conforms.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

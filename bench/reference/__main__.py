"""Compare the engine with the author's PyTorch code, on his tasks: `make reference CLONE=path-or-URL`.

    .venv-reference/bin/python -m bench.reference --clone DIR [--tasks FILE] [--model FILE]... [--facts N] [--write]

Both compute with the same weights in f32 and the same token ids. Exits 1 if a case differs by more than report.COSINE
allows or decides otherwise. `--tasks`: his tasks as JSON, else they are read from the clone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.marked import put_between
from bench.random_model import ROOT
from bench.real.tasks import FACTS
from bench.reference import cases, ours, report
from notes_cli.config import shipped_model
from notes_cli.engine.model import Model
from notes_cli.library import smollm2

FOLDER = ROOT / "build" / "reference"
PAGE, BEGIN, END = ROOT / "docs" / "reference.md", "<!-- make reference: begin -->\n", "<!-- make reference: end -->"
NEEDED = ("torch", "transformers", "accelerate")
SIZE = 4096  # tokens of the context, for a sequence and its fork


def cloned(source: str) -> Path:
    """The folder of a clone; that of a URL is made once. Exits with one line where there is none."""
    if not source:
        raise SystemExit("name a clone of the author's repository (programmable-kv): make reference CLONE=path-or-URL")
    folder = Path(source)
    if not folder.is_dir() and "://" in source:
        folder = FOLDER / "author"
        if not folder.is_dir():
            subprocess.run(["git", "clone", "--quiet", "--depth", "1", source, str(folder)], check=False)
    if not (folder / "editkv" / "core.py").is_file():
        raise SystemExit(f"{source}: no clone of the author's repository is there: it has no editkv/core.py")
    return folder.resolve()


def default_models() -> list[Path]:
    """The model that ships, and SmolLM2."""
    real = smollm2.find_file(FOLDER)
    if real is None:
        raise SystemExit("SmolLM2 is missing: make dev installs it, or name a model with --model")
    return [shipped_model(), real]


def run(path: Path, clone: Path, tasks: Path, facts: int, threads: int) -> tuple[str, list[report.Compared], int]:
    """Compare all cases on a model. Returns its name, what was found, and the number of cases with a padded value."""
    from bench.reference.author import Author

    found, unequal = [], 0
    with Model(ours.in_f32(path, FOLDER), gpu_layers=0) as model, ours.open_context(model, SIZE, threads) as context:

        def tokenize(text: str) -> list[int]:
            return cases.encode(model, text)

        author = Author(clone, path, tokenize, threads)
        todo = cases.load(tasks, model, facts)
        for number, given in enumerate(todo):
            if number % 10 == 0:
                line = f"{time.strftime('%H:%M:%S')} {model.name}: case {number} of {len(todo)}"
                print(line, file=sys.stderr, flush=True)
            case = cases.padded(given, tokenize)
            tokens = cases.tokens_of(case, model)
            answers = [tokenize(answer)[0] for answer in case.answers]
            mine, his = ours.logits_of(context, tokens), author.logits_of(case, tokens)
            stale = his["stale"]
            if case != given:
                unequal += 1
                tokens = cases.tokens_of(given, model)
                mine |= ours.logits_of_other_length(context, tokens)
                his |= author.logits_of_other_length(given, tokens)
            found += report.compare(case.group, case.name, mine, his, answers, stale)
        return model.name, found, unequal


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clone", default="", help="path or URL of the author's repository")
    parser.add_argument("--tasks", type=Path, help="his tasks as JSON instead of those in the clone")
    parser.add_argument(
        "--model", type=Path, action="append", help="a GGUF of the architecture llama, any quantization"
    )
    parser.add_argument("--facts", type=int, default=FACTS, help="of the 104 facts, the first so many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    clone = cloned(given.clone)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} is missing: make reference CLONE=... installs it")
    if given.tasks and not given.tasks.is_file():
        raise SystemExit(f"{given.tasks}: there is no such file of tasks")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.tasks:
        tasks = given.tasks
    else:
        from bench.reference.author import write_tasks

        tasks = write_tasks(clone, FOLDER / "tasks.json")
    parts, failed = [], []
    for path in given.model or default_models():
        name, found, unequal = run(path, clone, tasks, given.facts, given.threads)
        count = len({(one.group, one.case) for one in found})
        parts.append(f"{name}, {count} cases, {unequal} with a padded value:\n\n{report.table(found)}\n")
        print(parts[-1], flush=True)
        failed += [f"{name}: {line}" for line in report.failures(found)]
    if given.write:
        put_between(PAGE, BEGIN, END, "\n" + "\n".join(parts) + "\n")
    print("\n".join(failed) or "Every case conforms.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

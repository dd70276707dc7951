"""Tabulate every architecture of llama.cpp, as a tiny random model, in every kind of context.

    python -m bench.zoo [--models build/zoo/models] [--arch REGEX] [--columns REGEX] [--write docs/architectures.md]

Prints a line a combination: exact, refused, wrong or crash. What is measured, and how, is in bench/zoo_model.py, which
runs in a process a model, so that a crash is a verdict, too. Exits 1 if anything is wrong, crashes, or if a control
that must be caught is not: all but those that move rows by less than a quantized cache rounds them.

The installed library refuses architectures that nobody has measured. To measure one, set NOTES_LIBRARY to the folder
of the library that `make zoo` builds beside the models, which refuses none. A tiny model does not exercise everything:
SmolLM3 leaves every fourth layer unrotated, and has two here. Read the graph of an architecture before you believe its
`exact`, and write down in native/notes_graph.cpp what it does of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("exact", "refused", "wrong", "crash")
OPERATIONS = ("splice", "restore", "rewrite", "carry")

LEAST = 1e-29  # errors below are none

Line = dict[str, Any]  # a Verdict of bench.zoo_model as JSON, with the model's name
Errors = tuple[float, ...]  # of K rows and of logits; empty where nothing was compared


def measure(path: Path, columns: str) -> list[Line]:
    """The lines of one model, measured in a process of its own."""
    command = [sys.executable, "-m", "bench.zoo_model", str(path), "--columns", columns]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    # a dying process prints a backtrace, too
    lines = [{"model": path.stem} | json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        why = f"status {done.returncode}: {done.stderr.strip()[-200:]}"
        crash = {"column": "the one after", "why": why, "errors": {}, "missed": [], "blind": [], "amplified": []}
        crash |= dict.fromkeys(OPERATIONS, "crash")
        lines.append({"model": path.stem} | crash)
    return lines


def sentence(line: Line) -> str:
    """One combination for people."""
    words = " ".join(f"{operation} {line[operation]}" for operation in OPERATIONS)
    errors = next((line["errors"][one] for one in ("splice", "carry", "restore") if one in line["errors"]), {})
    numbers = " ".join(f"{name} {value:.0e}" for name, value in errors.items())
    missed = f" NOT CAUGHT: {', '.join(line['missed'])}" if line["missed"] else ""
    missed += f" (below the cache's rounding: {', '.join(line['blind'])})" if line["blind"] else ""
    missed += f" (amplified: {', '.join(line['amplified'])})" if line["amplified"] else ""
    why = f" ({line['why']})" if line["why"] else ""
    return f"{line['model']:<22} {line['column']:<26} {words}  {numbers}{why}{missed}"


def counts(lines: Iterable[Line], operation: str = "splice") -> str:
    found = Counter(line[operation] for line in lines)
    return " | ".join(str(found[word]) for word in WORDS)


def report(lines: list[Line]) -> str:
    """docs/architectures.md."""
    models = sorted({line["model"] for line in lines})
    columns = list(dict.fromkeys(line["column"] for line in lines))
    plain = [line for line in lines if line["column"].startswith("f16 plain")]
    exact = {
        word: sum(all(one[word] == "exact" for one in plain if one["model"] == name) for name in models)
        for word in ("splice", "restore", "carry")
    }
    results, controls = [], []
    for group in dict.fromkeys(column.split()[0] for column in columns if len(column.split()) == 4):
        results.append(f"| {group} | {counts(line for line in lines if line['column'].startswith(group + ' '))} |")
    results += [f"| *all, {operation}* | {counts(lines, operation)} |" for operation in OPERATIONS]
    for control in ("no rotation", "distance off by one", "magnitude twice"):
        for kv in dict.fromkeys(column.split()[0] for column in columns):
            tried = [x for x in lines if control in x["errors"] and x["column"].split()[0] == kv]
            missed, blind = ([x for x in tried if control in x[word]] for word in ("missed", "blind"))
            if tried:
                caught = len(tried) - len(missed) - len(blind)
                controls.append(f"| {control} | {kv} | {caught} | {_named(blind)} | {_named(missed)} |")
    shared: dict[tuple[str, ...], list[tuple[str, Errors]]] = {}
    for name in models:
        found, errors = _results([line for line in lines if line["model"] == name])
        shared.setdefault(found, []).append((name, errors))
    tables = {"results": results, "controls": controls, "models": [_row(*one) for one in shared.items()]}
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    joined = {name: "\n".join(rows) for name, rows in tables.items()}
    return text.format(count=len(models), columns=len(columns), **exact, **joined)


def _row(results: tuple[str, ...], found: list[tuple[str, Errors]]) -> str:
    """The row of models that have the same results: the outcome of each operation, and reasons."""
    known = [errors for _, errors in found if errors]
    worst = [f"{error:.0e}" if error >= LEAST else "0" for error in map(max, zip(*known, strict=True))] or ["", ""]
    return f"| {', '.join(name for name, _ in found)} | {' | '.join((*results[:-1], *worst, results[-1]))} |"


def _named(lines: list[Line]) -> str:
    """How many, and of which models."""
    return f"{len(lines)}: {', '.join(sorted({x['model'] for x in lines}))}" if lines else "0"


def _results(lines: list[Line]) -> tuple[tuple[str, ...], Errors]:
    """The outcome of each operation on a model, and reasons; its largest errors of K rows and of logits."""
    f16 = [line for line in lines if line["column"].startswith("f16")] or lines
    # A context in which nothing is possible (longer than the learned positions) is no evidence for others.
    f16 = [line for line in f16 if any(line[one] not in ("", "refused") for one in OPERATIONS)] or f16

    def word(operation: str) -> str:
        return max((line[operation] for line in f16), key=("", *WORDS).index)

    def marked(operation: str) -> str:
        found = word(operation)
        return found + "*" * (found == "exact" and any(operation in line["amplified"] for line in f16))

    operation = next((one for one in ("splice", "carry") if word(one) == "exact"), "restore")
    errors = [line["errors"][operation] for line in f16 if operation in line["errors"]]
    worst = tuple(max(error[key] for error in errors) for key in ("rows", "logits")) if errors else ()
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if "exact" not in (line["splice"], line["carry"]):
            why = re.sub(r"^llama.cpp cannot make a context .*? for .*? \((.*)\)$", r"llama.cpp: \1", line["why"])
            reasons.setdefault(why or line["carry"] or line["splice"], []).append(line["column"])
    notes = [why if len(where) == len(lines) else f"{_where(where)}: {why}" for why, where in reasons.items()]
    return (*map(marked, OPERATIONS), "; ".join(notes)), worst


def _where(columns: list[str]) -> str:
    """Return the common part of a list of columns."""
    parts = zip(*(column.split() for column in columns), strict=True)
    names = ("", "", "flash attention ", "")
    found = [
        name + "/".join(dict.fromkeys(part)) for name, part in zip(names, parts, strict=False) if len(set(part)) < 3
    ]
    return " ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "zoo" / "models")
    parser.add_argument("--arch", default="", help="only models whose name matches")
    parser.add_argument("--columns", default="", help="only combinations that match, such as '^f16 plain on one'")
    parser.add_argument("--write", type=Path, help="write the table into this Markdown file, too")
    given = parser.parse_args()

    paths = [path for path in sorted(given.models.glob("*.gguf")) if re.search(given.arch, path.stem)]
    lines: list[Line] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(lambda path: measure(path, given.columns), paths):
            lines += found
            for line in found:
                print(sentence(line), flush=True)
    for operation in OPERATIONS:
        print(f"{operation}: " + ", ".join(f"{Counter(x[operation] for x in lines)[word]} {word}" for word in WORDS))
    missed = sum(bool(line["missed"]) for line in lines)
    blind = sum(bool(line["blind"]) for line in lines)
    print(
        f"{len(paths)} models, {len(lines)} combinations, {missed} with a control not caught, {blind} that cannot show"
    )
    if given.write:
        given.write.write_text(report(lines), encoding="utf-8")
    return 0 if lines and not any(map(failed, lines)) else 1


def failed(line: Line) -> bool:
    """True if a result is wrong or a crash, or a control was not detected."""
    return bool(line["missed"]) or any(line[operation] in ("wrong", "crash") for operation in OPERATIONS)


if __name__ == "__main__":
    sys.exit(main())

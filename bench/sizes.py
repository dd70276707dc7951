"""Measure how long models of four sizes read a text, and how long they take for it from a file: README's table.

    python -m bench.sizes [--write]   a quarter of an hour on two quiet cores; 10 GB in build/bench, of memory 12 GB

Models have random weights in the shapes of Qwen3 0.6B to 8B as Q4_0, with the words of SmolLM2. Each is measured as by
`notes bench`, in turn: a prefill, a splice of the same text from its file, each with a question after it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.in_process import smollm2
from bench.marked import grid, put_between
from bench.random_model import MODEL, Q4_0, ROOT, Shape, random_model
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.measure.speed import Benching, bench
from notes_cli.runtime.workspace import Workspace

TOKENS, RUNS = 2048, 5
SHAPES = {
    "0.6B": Shape(kind=Q4_0),
    "1.7B": Shape(width=2048, feed_forward=6144, kind=Q4_0),
    "4B": Shape(layers=36, width=2560, heads=32, feed_forward=9728, kind=Q4_0),
    "8B": Shape(layers=36, width=4096, heads=32, feed_forward=12288, kind=Q4_0),
}
RESULTS = ROOT / "docs" / "results" / "sizes.json"
BEGIN, END = "<!-- sizes -->\n", "<!-- end -->"
HEAD = f"model | reads {TOKENS:,} tokens in | takes them from a file in | answers begin | file"


def measure(path: Path) -> dict[str, float]:
    """Return seconds and bytes."""
    options = ContextOptions(n_ctx=TOKENS + Benching().around)
    with Workspace(path, options, paths=Paths.under(path.parent / "home")) as workspace:
        length = bench(workspace, Benching((TOKENS,), RUNS)).lengths[0]
    return {
        "prefill": length.prefill.median,
        "splice": length.splice.median,
        "question": length.question.median,
        "bytes": length.stored,
    }


def table(found: dict[str, dict[str, float]]) -> str:
    rows = []
    for name, row in found.items():
        sooner = (row["prefill"] + row["question"]) / (row["splice"] + row["question"])
        times = f"{row['prefill']:.0f} s | {row['splice']:.2f} s | {sooner:.0f} times sooner"
        rows.append(f"{name} | {times} | {row['bytes'] / 1e6:.0f} MB")
    return grid(HEAD, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure prefill and splice by size of model.")
    parser.add_argument("--write", action="store_true", help="write the table into README and docs/results")
    write = parser.parse_args().write
    found = {}
    for name, shape in SHAPES.items():
        found[name] = measure(random_model(MODEL.with_name(f"qwen3-{name}-q4_0.gguf"), shape, tokenizer=smollm2()))
        print(name, found[name], flush=True)
    print(table(found))
    if write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        put_between(ROOT / "README.md", BEGIN, END, f"{table(found)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

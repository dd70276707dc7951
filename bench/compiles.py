"""What a compile costs: several skills in one batch, and physical batches of several sizes.

    python -m bench.compiles [--lengths 16 32 64 128 256 512] [--many 8] [--repeat 5] [--threads N] [--model FILE]
    python -m bench.compiles --ubatch 128 256 512 1024 [--tokens 1024]

A random model of the shape of Qwen3-0.6B. Several skills one after the other, against all at once, a sequence each: the
left context is there already, in cells that all share. `time` is that of the processor for one batch over that for one
after the other, medians of turns that alternate; `calls` is calls of llama.cpp; `rows` says whether each skill has the
rows that it has alone, to the bit, and else how far they are apart (squared, relative, the worst layer). With --ubatch
one text in physical batches of each size, as a compile decodes it, with progress told, over one plain call of
llama_decode for the same tokens in batches of 512.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from bench.experiments.frame import grid
from bench.random_model import random_model
from notes_cli.engine.context import Context
from notes_cli.engine.decoding import decode
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import LayerRows, Tokens

LEFT = 16  # tokens of the left context
Rows = list[tuple[LayerRows, ...]]


def read(notebook: Notebook) -> tuple[LayerRows, ...]:
    return notebook.context.read(notebook.sequence, LEFT, len(notebook) - LEFT, base=LEFT)


def one_by_one(left: Notebook, skills: Sequence[Tokens]) -> tuple[Rows, float, int]:
    """Rows of each, the time that decoding took, and how many calls that were."""
    found, took, calls = [], 0.0, 0
    for tokens in skills:
        with left.share() as notebook:
            notebook.append(tokens)
            started = time.process_time()
            while notebook.pending:
                decode([notebook])
                calls += 1
            took += time.process_time() - started
            found.append(read(notebook))
    return found, took, calls


def at_once(left: Notebook, skills: Sequence[Tokens]) -> tuple[Rows, float, int]:
    """The same in as few batches as hold them all."""
    notebooks, calls = [left.share() for _ in skills], 0
    try:
        for notebook, tokens in zip(notebooks, skills, strict=True):
            notebook.append(tokens)
        started = time.process_time()
        while waiting := [notebook for notebook in notebooks if notebook.pending]:
            decode(waiting)
            calls += 1
        took = time.process_time() - started
        return [read(notebook) for notebook in notebooks], took, calls
    finally:
        for notebook in notebooks:
            notebook.close()


def apart(one: Rows, other: Rows) -> float:
    """Squared distance of the rows of a layer relative to their squares, the largest; 0: bit for bit."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            for x, y in ((a.k, b.k), (a.v, b.v)):
                if not np.array_equal(x, y):
                    x, y = x.astype(np.float32), y.astype(np.float32)
                    worst = max(worst, float(((x - y) ** 2).sum() / (y**2).sum()))
    return worst


def by_size(path: Path, sizes: Sequence[int], count: int, repeat: int, threads: int) -> str:
    """A table: what compiles in physical batches of these sizes take, over a plain decode."""
    tokens = np.random.default_rng(1).integers(0, 256, count).astype(np.int32)
    times: dict[int, list[float]] = {size: [] for size in (0, *sizes)}
    with Model(path) as model:
        for _ in range(repeat + 1):
            for size, taken in times.items():
                options = ContextOptions(n_ctx=count + 256, n_batch=2048, n_ubatch=size or 512, n_threads=threads)
                with Context(model, options) as context, Notebook(context) as notebook:
                    started = time.process_time()
                    if size:
                        notebook.append(tokens)
                        notebook.flush(lambda done, total: None)
                    else:
                        context.decode_at(notebook.sequence, 0, tokens)
                    taken.append(time.process_time() - started)
    plain = median(times[0][1:])
    lines = [f"{size} | {-(-count // size)} | {median(times[size][1:]) / plain:.2f}" for size in sizes]
    return grid(f"-ub | calls for {count} tokens | time, over a plain decode", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--many", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ubatch", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=1024)
    given = parser.parse_args()
    if given.ubatch:
        print(by_size(given.model or random_model(), given.ubatch, given.tokens, given.repeat, given.threads))
        return
    random, lines = np.random.default_rng(0), []
    options = ContextOptions(
        n_ctx=LEFT + given.many * max(given.lengths) + 256,
        n_threads=given.threads,
        n_sequences=given.many + 1,
        unified=True,
    )
    with Model(given.model or random_model()) as model, Context(model, options) as context, Notebook(context) as left:
        left.append(random.integers(0, model.n_vocab, LEFT).astype(np.int32))
        left.flush()
        for length in given.lengths:
            skills = [random.integers(0, model.n_vocab, length).astype(np.int32) for _ in range(given.many)]
            apiece, batched = [], []
            for _ in range(given.repeat + 1):
                alone, taken, calls = one_by_one(left, skills)
                apiece.append(taken)
                together, taken, fewer = at_once(left, skills)
                batched.append(taken)
            again = one_by_one(left, skills)[0]
            same = "the same" if not apart(together, alone) else f"{apart(together, alone):.0e}"
            ratio = median(batched[1:]) / median(apiece[1:])
            lines.append(f"{length} | {calls} | {fewer} | {ratio:.2f} | {same}")
            if apart(again, alone):
                lines[-1] += " (and so are two compiles alone)"
    print(grid(f"tokens of each of {given.many} skills | calls, each alone | in batches | time | rows", lines))


if __name__ == "__main__":
    main()

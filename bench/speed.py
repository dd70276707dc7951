"""Time splice against prefill and memcpy, on a random model in the shape of Qwen3-0.6B.

    python -m bench.speed [--tokens 1024 4096 8192]

The segment's file is in the page cache, and llama.cpp has written to the context's cells before. `file` opens the file
and splices it, every byte checked on the way; `read` has the system copy the same bytes out of its page cache, all
threads, a megabyte at a time into the same place. `splice` places rows that are in memory already: the first time, the
median and the fastest of the following times. memcpy moves as many bytes as the splice puts into the cache, between two
buffers that have been written before; they take turns, so that a busy machine slows all. Times are the fastest of all
turns where not said otherwise. Prefill is timed once, with flash attention and an f16 cache; its rows are spliced.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bench.random_model import ROOT, random_model
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows, Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.library.container import open_segment, open_stored, write_segment

FOLDER = ROOT / "build" / "bench"
COMPILED_AT, SPLICED_AT = 16, 100  # the segment moves by the difference
QUESTION = 16
THREADS = os.cpu_count() or 1
REPEAT = 9  # splices of each kind
HEAD = (
    f"{'':6} {'':>4} {'':>4} {'K/V':>7} {'prefill':>10} {'file':>8} {'read':>8} {'splice':>8} {'':>8} {'':>8}"
    f" {'memcpy':>8} {'':>8} {'splice/memcpy':>15} {'file/':>7} {'question':>9} {'prefill/':>9}\n"
    f"{'tokens':>6} {'FA':>4} {'type':>4} {'MB':>7} {'s':>10} {'ms':>8} {'ms':>8}"
    f" {'first ms':>8} {'median':>8} {'min':>8} {'1 thread':>8} {'%s thr.':>8}"
    f" {'1 thr.':>7} {'%s thr.':>7} {'%s thr.':>7} {'ms':>9} {'splice':>9}"
)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Copies:
    """memmove between two buffers whose pages are all there, and reads of a file in the page cache."""

    PIECE = 1 << 20  # bytes of a buffer that stays in a thread's caches

    def __init__(self, size: int, path: Path) -> None:
        self.source, self.target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        self.target[:] = 1
        self.path, self.pool = path, ThreadPoolExecutor(THREADS)
        self.parts = list(pairwise(size * i // THREADS for i in range(THREADS + 1)))
        self.buffers = [bytearray(self.PIECE) for _ in range(THREADS)]

    def one(self) -> None:
        """By one thread."""
        ctypes.memmove(self.target.ctypes.data, self.source.ctypes.data, len(self.source))

    def several(self) -> None:
        """By all threads, each a part."""

        def move(part: tuple[int, int]) -> None:
            first, last = part
            ctypes.memmove(self.target.ctypes.data + first, self.source.ctypes.data + first, last - first)

        list(self.pool.map(move, self.parts))

    def read(self) -> None:
        """The file, by all threads."""

        def part(number: int) -> None:
            with self.path.open("rb", buffering=0) as file:
                for at in range(number * self.PIECE, self.path.stat().st_size, len(self.buffers) * self.PIECE):
                    os.preadv(file.fileno(), [self.buffers[number]], at)

        list(self.pool.map(part, range(len(self.buffers))))


def make_segment(context: Context, tokens: Tokens, layers: tuple[LayerRows, ...]) -> Segment:
    before, identity = np.zeros(COMPILED_AT, np.int32), context.identity("0" * 64)
    return Segment("random", "", "", tokens, COMPILED_AT, before, (), identity, layers)


def random_rows(context: Context, count: int) -> tuple[LayerRows, ...]:
    random = np.random.default_rng(0)

    def rows(width: int) -> NDArray[np.float16]:
        return random.standard_normal((count, width), np.float32).astype(np.float16)

    return tuple(LayerRows(layer.layer, rows(layer.n_embd_k), rows(layer.n_embd_v)) for layer in context.layers)


def compile_all(model: Model, counts: list[int]) -> dict[int, tuple[Path, float]]:
    """A segment of the first n tokens of one text for each n, on disk, and how long their prefill took."""
    tokens = np.random.default_rng(1).integers(0, 256, max(counts)).astype(np.int32)
    made = {}
    options = ContextOptions(n_ctx=max(counts) + 256, n_threads=THREADS, flash_attention="on")
    with Context(model, options) as context:
        sequence = KVSequence(context)
        sequence.append(np.arange(COMPILED_AT))
        sequence.flush()
        took = 0.0
        for count in sorted(counts):
            sequence.append(tokens[len(sequence) - COMPILED_AT : count])
            took += seconds(sequence.flush)
            layers = context.read(0, COMPILED_AT, count, base=COMPILED_AT)
            path = FOLDER / f"random-{count}.notes"
            write_segment(path, make_segment(context, tokens[:count], layers))
            made[count] = path, took
            print(f"compiled {count} tokens in {took:.1f} s", file=sys.stderr)
    return made


def measure(model: Model, path: Path, prefill: float, flash: Literal["on", "off"], cache: str) -> str:
    """A line of the table."""
    segment = open_segment(path)
    size = segment.nbytes * (2 if cache == "f32" else 1)
    options = ContextOptions(len(segment) + 256, n_threads=THREADS, flash_attention=flash, type_k=cache, type_v=cache)
    copies = Copies(size, path)
    with Context(model, options) as context:
        sequence = KVSequence(context)
        sequence.append(np.arange(SPLICED_AT))
        sequence.flush()
        files, reads, splices, ones, severals, questions = [], [], [], [], [], []
        for _ in range(REPEAT):
            sequence.truncate(SPLICED_AT)
            files.append(seconds(lambda: sequence.splice(open_stored(path))))
            reads.append(seconds(copies.read))
            sequence.truncate(SPLICED_AT)
            splices.append(seconds(lambda: sequence.splice(segment)))
            ones.append(seconds(copies.one))
            severals.append(seconds(copies.several))
        for _ in range(3):
            sequence.truncate(SPLICED_AT + len(segment))
            sequence.append(np.arange(QUESTION))
            questions.append(seconds(sequence.flush))
    file, splice, one, several = map(min, (files, splices, ones, severals))
    times = (file, min(reads), splices[0], median(splices[1:]), splice, one, several)
    return (
        f"{len(segment):6} {flash:>4} {cache:>4} {size / 1e6:7.0f} {prefill:10.1f}"
        f"{''.join(f' {each * 1e3:8.1f}' for each in times)}"
        f" {splice / one:7.2f} {splice / several:7.2f} {file / several:7.2f}"
        f" {min(questions) * 1e3:9.1f} {prefill / splice:9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192], help="lengths of the segment")
    args = parser.parse_args()
    with Model(random_model(), gpu_layers=0) as model:
        made = compile_all(model, args.tokens)
        print(HEAD % ((THREADS,) * 3))
        flashes: tuple[Literal["on", "off"], ...] = ("on", "off")
        for count, flash, cache in product(args.tokens, flashes, ("f16", "f32")):
            print(measure(model, *made[count], flash, cache), flush=True)
    for segment, _ in made.values():
        segment.unlink()


if __name__ == "__main__":
    main()

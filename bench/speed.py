"""Time splice against prefill and memcpy, on a random model in the shape of Qwen3-0.6B.

    python -m bench.speed [--tokens 1024 4096 8192] [--threads N] [--repeat N] [--no-prefill] [--json]

What is warm: the segment's file is in the page cache, and the cache of the context has been written once by llama.cpp.
`file` opens the file and splices it, every byte checked on the way; `read` has the system copy the same bytes out of
its page cache, all threads, a megabyte at a time into the same place: what `file` cannot do without. `splice` places
rows that are in memory already. `first` is the first one of these; the following ones go to the same cells. memcpy
moves as many bytes as the splice puts into the cache, between two buffers that have been written before; they take
turns, so that a busy machine slows all. Times are the fastest of all turns where not said otherwise. Prefill is timed
once, with flash attention and an f16 cache; its rows, f16, are what is spliced everywhere.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bench.random_model import ROOT, random_model
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import LayerRows, Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.library.container import open_segment, open_stored, write_segment

FOLDER = ROOT / "build" / "bench"
COMPILED_AT, SPLICED_AT = 16, 100  # the segment moves by the difference
QUESTION = 16
MEGABYTE = 1e6


@dataclass(frozen=True)
class Result:
    """One row of the table. Times in seconds."""

    tokens: int
    flash_attention: str
    cache: str
    bytes: int
    prefill: float | None
    file: float
    read: float
    splice_first: float
    splice_median: float
    splice: float
    memcpy_1: float
    memcpy_n: float
    question: float

    def line(self) -> str:
        prefill = f"{self.prefill:10.1f}" if self.prefill else f"{'-':>10}"
        gain = f"{self.prefill / self.splice:9.0f}" if self.prefill else f"{'-':>9}"
        return (
            f"{self.tokens:6} {self.flash_attention:>4} {self.cache:>4} {self.bytes / MEGABYTE:7.0f} {prefill}"
            f" {self.file * 1e3:8.1f} {self.read * 1e3:8.1f} {self.splice_first * 1e3:8.1f}"
            f" {self.splice_median * 1e3:8.1f} {self.splice * 1e3:8.1f}"
            f" {self.memcpy_1 * 1e3:8.1f} {self.memcpy_n * 1e3:8.1f}"
            f" {self.splice / self.memcpy_1:7.2f} {self.splice / self.memcpy_n:7.2f} {self.file / self.memcpy_n:7.2f}"
            f" {self.question * 1e3:9.1f} {gain}"
        )


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


class Memcpy:
    """memmove of `size` bytes between two buffers whose pages are all there, by one thread or several."""

    def __init__(self, size: int, threads: int) -> None:
        self.source, self.target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        self.target[:] = 1
        self.pool = ThreadPoolExecutor(threads)
        edges = [size * i // threads for i in range(threads + 1)]
        self.parts = list(pairwise(edges))

    def move(self, first: int, last: int) -> None:
        ctypes.memmove(self.target.ctypes.data + first, self.source.ctypes.data + first, last - first)

    def one(self) -> None:
        self.move(0, len(self.source))

    def several(self) -> None:
        list(self.pool.map(lambda part: self.move(*part), self.parts))


class Reading:
    """A file in the page cache, read by several threads, each into a buffer of its own that stays in its caches."""

    PIECE = 1 << 20

    def __init__(self, path: Path, threads: int) -> None:
        self.path, self.size = path, path.stat().st_size
        self.buffers = [bytearray(self.PIECE) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads)

    def part(self, number: int) -> None:
        with self.path.open("rb", buffering=0) as file:
            for at in range(number * self.PIECE, self.size, len(self.buffers) * self.PIECE):
                os.preadv(file.fileno(), [self.buffers[number]], at)

    def all(self) -> None:
        list(self.pool.map(self.part, range(len(self.buffers))))


def make_segment(context: Context, tokens: Tokens, layers: tuple[LayerRows, ...]) -> Segment:
    return Segment(
        name="random",
        description="",
        text="",
        tokens=tokens,
        base=COMPILED_AT,
        context=np.zeros(COMPILED_AT, np.int32),
        fields=(),
        identity=context.identity("0" * 64),
        layers=layers,
    )


def random_rows(context: Context, count: int) -> tuple[LayerRows, ...]:
    random = np.random.default_rng(0)

    def rows(width: int) -> NDArray[np.float16]:
        return random.standard_normal((count, width), np.float32).astype(np.float16)

    return tuple(LayerRows(layer.layer, rows(layer.n_embd_k), rows(layer.n_embd_v)) for layer in context.layers)


def compile_all(model: Model, counts: list[int], threads: int, prefill: bool) -> dict[int, tuple[Path, float | None]]:
    """A segment of the first n tokens of one text for each n, on disk, and how long their prefill took."""
    tokens = np.random.default_rng(1).integers(0, 256, max(counts)).astype(np.int32)
    made: dict[int, tuple[Path, float | None]] = {}
    options = ContextOptions(n_ctx=max(counts) + 256, n_threads=threads, flash_attention="on")
    with Context(model, options) as context:
        sequence = KVSequence(context)
        sequence.append(np.arange(COMPILED_AT))
        sequence.flush()
        took = 0.0
        for count in sorted(counts):
            if prefill:
                sequence.append(tokens[len(sequence) - COMPILED_AT : count])
                took += seconds(sequence.flush)
                layers = context.read(0, COMPILED_AT, count, base=COMPILED_AT)
            else:
                layers = random_rows(context, count)
            path = FOLDER / f"random-{count}.notes"
            write_segment(path, make_segment(context, tokens[:count], layers))
            made[count] = path, took if prefill else None
            print(f"compiled {count} tokens" + (f" in {took:.1f} s" if prefill else ""), file=sys.stderr)
    return made


def measure(
    model: Model,
    path: Path,
    prefill: float | None,
    flash: Literal["on", "off"],
    cache: str,
    *,
    threads: int,
    repeat: int,
) -> Result:
    segment = open_segment(path)
    size = segment.nbytes * (2 if cache == "f32" else 1)
    options = ContextOptions(
        n_ctx=len(segment) + 256, n_threads=threads, flash_attention=flash, type_k=cache, type_v=cache
    )
    copy, reading = Memcpy(size, threads), Reading(path, threads)
    with Context(model, options) as context:
        sequence = KVSequence(context)
        sequence.append(np.arange(SPLICED_AT))
        sequence.flush()
        files, reads, splices, ones, severals, questions = [], [], [], [], [], []
        for _ in range(repeat):
            sequence.truncate(SPLICED_AT)
            files.append(seconds(lambda: sequence.splice(open_stored(path))))
            reads.append(seconds(reading.all))
            sequence.truncate(SPLICED_AT)
            splices.append(seconds(lambda: sequence.splice(segment)))
            ones.append(seconds(copy.one))
            severals.append(seconds(copy.several))
        for _ in range(3):
            sequence.truncate(SPLICED_AT + len(segment))
            sequence.append(np.arange(QUESTION))
            questions.append(seconds(sequence.flush))
    return Result(
        tokens=len(segment),
        flash_attention=flash,
        cache=cache,
        bytes=size,
        prefill=prefill,
        file=min(files),
        read=min(reads),
        splice_first=splices[0],
        splice_median=median(splices[1:]),
        splice=min(splices),
        memcpy_1=min(ones),
        memcpy_n=min(severals),
        question=min(questions),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192], help="lengths of the segment")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=9, help="splices of each kind, two at least")
    parser.add_argument("--no-prefill", action="store_true", help="splice random rows instead: minutes less")
    parser.add_argument("--json", action="store_true", help="a list of results instead of the table")
    args = parser.parse_args()

    path = random_model()
    with Model(path, gpu_layers=0) as model:
        made = compile_all(model, args.tokens, args.threads, not args.no_prefill)
        if not args.json:
            print(HEAD % ((args.threads,) * 3))
        results = []
        flash: Literal["on", "off"]
        for count in args.tokens:
            for flash in ("on", "off"):
                for cache in ("f16", "f32"):
                    result = measure(
                        model, *made[count], flash, cache, threads=args.threads, repeat=max(2, args.repeat)
                    )
                    results.append(result)
                    if not args.json:
                        print(result.line(), flush=True)
        if args.json:
            print(json.dumps([asdict(result) for result in results], indent=2))
    for segment, _ in made.values():
        segment.unlink()


if __name__ == "__main__":
    main()

"""Compiling against llama.cpp's own prefill: the same tokens, batches, threads and attention, by turns in one run.

    python -m bench.prefill [--tokens 4000] [--repeat 3] [--threads N] [-b 2048] [-ub 512] [-fa on|off]

Ours is what `notes compile` does with the tokens: a notebook is decoded, with progress told. Theirs is llama-bench, on
the library of notes, built once from the sources of `make zoo`; the model's file is in the page cache. In seconds of
the clock and of the processor, which other work on the machine disturbs less. Prints the ratio of the fastest; exits 1
if it is beyond 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.random_model import ROOT, random_model
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.native import LIBRARY_PATH
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.options import ContextOptions

BAR = 1.05
ZOO = ROOT / "build" / "zoo"
PROGRAM = ROOT / "build" / "bench-llama" / "llama-bench"


def build() -> Path:
    """llama-bench, linked to the library of notes."""
    if not PROGRAM.exists():
        PROGRAM.parent.mkdir(parents=True, exist_ok=True)
        source, library = ZOO / "llama.cpp", LIBRARY_PATH.parent
        includes = [f"-I{source / part}" for part in ("common", "include", "ggml/include", "vendor")]
        files = [str(source / "tools" / "llama-bench" / name) for name in ("llama-bench.cpp", "main.cpp")]
        links = [f"-L{library}", f"-L{ZOO / 'bin'}", "-lllama-common"]
        links += [f"-lnotes-{name}" for name in ("llama", "ggml", "ggml-base", "ggml-cpu")]
        links += ["-lpthread", f"-Wl,-rpath,{library}:{ZOO / 'bin'}"]
        shared = ["-DGGML_BACKEND_SHARED", "-DGGML_SHARED", "-DLLAMA_SHARED"]
        command = [os.environ.get("CXX", "c++"), "-O2", "-std=c++17", *shared, *includes, *files, "-o", str(PROGRAM)]
        subprocess.run([*command, *links], check=True)
    return PROGRAM


def processor(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def theirs(model: Path, args: argparse.Namespace, tokens: int) -> tuple[float, float]:
    """Seconds of the clock for the prefill alone, and of the processor for all that the program does."""
    settings = {"-p": tokens, "-n": 0, "-r": 1, "-b": args.b, "-ub": args.ub, "-t": args.threads, "-ngl": 0}
    settings |= {"-fa": 1 if args.fa == "on" else 0, "-o": "json"}
    command = [str(build()), "-m", str(model), *(str(part) for pair in settings.items() for part in pair)]
    before = processor(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, "--no-warmup"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    took = json.loads(done.stdout)[0]["avg_ns"] / 1e9
    return took, processor(resource.RUSAGE_CHILDREN) - before


def ours(model: Model, args: argparse.Namespace, tokens: int) -> tuple[float, float]:
    options = ContextOptions(
        n_ctx=tokens + 256, n_batch=args.b, n_ubatch=args.ub, n_threads=args.threads, flash_attention=args.fa
    )
    with Context(model, options) as context, Notebook(context) as book:
        book.append(np.random.default_rng(1).integers(0, 256, tokens))
        started, before = time.perf_counter(), processor(resource.RUSAGE_SELF)
        book.flush(lambda done, total: None)
        return time.perf_counter() - started, processor(resource.RUSAGE_SELF) - before


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-b", type=int, default=2048)
    parser.add_argument("-ub", type=int, default=512)
    parser.add_argument("-fa", choices=["on", "off"], default="on")
    args = parser.parse_args()
    path = random_model()
    found = []
    with Model(path, gpu_layers=0) as model:
        ours(model, args, 64)
        start = theirs(path, args, 1)[1]  # what it takes to load the model
        for _ in range(args.repeat):
            (wall, used), (their_wall, their_used) = ours(model, args, args.tokens), theirs(path, args, args.tokens)
            found.append((wall, used, their_wall, their_used - start))
            theirs_too = f"llama-bench {their_wall:.2f} s (processor {their_used - start:.2f})"
            print(f"ours {wall:.2f} s (processor {used:.2f}), {theirs_too}", flush=True)
    wall, used, their_wall, their_used = (min(times) for times in zip(*found, strict=True))
    ratio = wall / their_wall
    print(f"{args.tokens} tokens: ours / llama-bench = {ratio:.3f}, of the processor {used / their_used:.3f}")
    return int(ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())

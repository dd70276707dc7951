"""How long Ctrl-C takes while a long text is compiled, on a random model of the shape of Qwen3-0.6B.

    python -m bench.interrupt [--depths 0 500 2000 4000] [--times 5] [--threads N] [-b 2048] [-ub 512] [-fa auto]

At depth 0: from SIGINT to the end of `notes compile`. Deeper: to the end of a process that prefills after so many rows,
which are random and placed there, as prefilling them would take minutes. Signals come at other moments of a batch each
time. Prints the times in seconds and the longest; exits 1 if that is beyond a tenth of a second.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.random_model import MODEL, random_model
from bench.speed import random_rows
from notes_cli import stops
from notes_cli.commands.late import end_when_late
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.options import ContextOptions

BAR = 0.1  # seconds


def prefill(depth: int, args: argparse.Namespace) -> None:
    """Decode a batch after `depth` rows, and say when that begins."""
    options = ContextOptions(
        n_ctx=depth + args.b, n_batch=args.b, n_ubatch=args.ub, n_threads=args.threads, flash_attention=args.fa
    )
    with Model(MODEL, gpu_layers=0) as model, Context(model, options) as context:
        book = Notebook(context)
        tokens = np.zeros(depth, np.int32)
        if depth:
            context.splice(book.sequence, 0, tokens, random_rows(context, depth), 0)
        book._tokens += tokens.tolist()  # as if they had been decoded
        book.advance(depth)
        book.append([1] * args.b)
        stops.begin()
        end_when_late()  # as a command does
        print("now", flush=True)
        try:
            book.flush(lambda done, total: None)
        except KeyboardInterrupt:
            os._exit(130)


def interrupted(command: list[str], wait: float, home: str) -> float:
    """Seconds from SIGINT, `wait` seconds after it says that it computes, to the end of the command."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "NOTES_HOME": home})
    if "--child" in command:
        assert process.stdout and process.stdout.readline() == b"now\n"
    time.sleep(wait)
    started = time.perf_counter()
    process.send_signal(signal.SIGINT)
    status = process.wait()
    took = time.perf_counter() - started
    if status != 130:
        raise SystemExit(f"it ended with status {status}, not 130")
    return took


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.interrupt", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 500, 2000, 4000], help="rows before the prefill")
    parser.add_argument("--times", type=int, default=5, help="signals at each depth")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-b", type=int, default=2048)
    parser.add_argument("-ub", type=int, default=512)
    parser.add_argument("-fa", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    random_model()
    if args.child is not None:
        prefill(args.child, args)
        return 1  # nobody interrupted it
    longest = 0.0
    options = ["--threads", str(args.threads), "-b", str(args.b), "-ub", str(args.ub), "-fa", args.fa]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "long.txt"
        text.write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
        command = [sys.executable, "-m", "notes_cli", "compile", str(text), "-m", str(MODEL), "--force", *options]
        for depth in args.depths:
            child = [sys.executable, "-m", "bench.interrupt", "--child", str(depth), *options]
            waits = [(0 if depth else 6) + 0.37 * number for number in range(1, args.times + 1)]
            times = [interrupted(child if depth else command, wait, folder) for wait in waits]
            print(f"{depth:6} rows before: " + " ".join(f"{took:.3f}" for took in times), flush=True)
            longest = max(longest, *times)
    print(f"longest: {longest:.3f} s")
    return int(longest > BAR)


if __name__ == "__main__":
    sys.exit(main())

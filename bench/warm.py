"""`notes ask` that a server answers against the same without one, by turns: time, modules loaded, tokens decoded.

    python -m bench.warm [--model FILE] [--repeat 9]

The skill is in the library, and the server has answered before. Each call is a process of its own; times are medians of
the whole command, from its start to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from notes_cli.config import shipped_model
from tests.samples import SAMPLES

COUNTING = "import sys; from notes_cli.cli import run; run(sys.argv[1:]); print(len(sys.modules), file=sys.stderr)"
ASK = ("ask", "May I return this?", "--splice", "returns", "--json", "--seed", "1")


def notes(*arguments: str, start: tuple[str, ...] = ("-m", "notes_cli")) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *start, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@contextmanager
def serving() -> Iterator[str]:
    """A server, and its address."""
    command = [sys.executable, "-m", "notes_cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            yield next(line for line in process.stderr if "http://" in line).split()[-1]
        finally:
            process.terminate()


def measured(server: str) -> tuple[float, dict[str, Any]]:
    """Seconds of one call, and its document."""
    started = time.perf_counter()
    done = notes(*ASK, "--server", server)
    return time.perf_counter() - started, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=shipped_model())
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"NOTES_HOME": home, "NOTES_MODEL": str(args.model)}
        notes("compile", str(SAMPLES / "returns"))
        with serving() as url:
            ways = {"off": [], url: []}
            answers = []
            for number in range(args.repeat + 1):
                for server, times in ways.items():
                    seconds, document = measured(server)
                    answers.append((document["answer"], document["tokens"]["decoded"]))
                    if number:  # the first of each fills caches
                        times.append(seconds)
            modules = {way: notes(*ASK, "--server", way, start=("-c", COUNTING)).stderr.split()[-1] for way in ways}
    cold, warm = (median(times) for times in ways.values())
    print(f"without a server: {1000 * cold:.0f} ms, {modules['off']} modules")
    print(f"with a server: {1000 * warm:.0f} ms, {modules[url]} modules")
    print(f"ratio: {cold / warm:.1f}; answers and tokens decoded: {', '.join(f'{a}, {n}' for a, n in set(answers))}")


if __name__ == "__main__":
    main()

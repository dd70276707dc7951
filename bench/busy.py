"""Time `notes ask` alone and next to two busy processes, by how OpenMP's threads wait.

    python -m bench.busy                # SmolLM2, a sample skill; a minute on a quiet machine
    python -m bench.busy --model FILE --runs 5

The busy processes are loops that compute and never wait. docs/speed.md has the figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bench.real.tasks import SKILLS

WAYS: Mapping[str, Mapping[str, str]] = {
    "as notes sets it": {},
    "GNU's default": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
NOTES = [sys.executable, "-m", "notes_cli"]
QUESTION = "Which carrier delivers the parcels?"


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that keep a core busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds(model: str, runs: int, environment: Mapping[str, str]) -> list[float]:
    """Wall-clock seconds of each run, process start included."""
    command = [*NOTES, "ask", QUESTION, "--splice", "store-handbook", "-m", model, "-n", "16", "-q"]
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="One `notes ask` alone and beside two busy processes.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=7)
    given = parser.parse_args()
    clean: dict[str, str] = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    print("| | alone, s | beside two busy processes, s | ratio of medians | slowest |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as home:
        clean["NOTES_HOME"] = home
        compiled = [*NOTES, "compile", str(SKILLS / "store-handbook"), "-m", given.model, "-q"]
        subprocess.run(compiled, env=clean, check=True, stdout=subprocess.DEVNULL)
        for name, variables in WAYS.items():
            alone = seconds(given.model, given.runs, {**clean, **variables})
            with neighbours(2):
                beside = seconds(given.model, given.runs, {**clean, **variables})
            usual, busy = statistics.median(alone), statistics.median(beside)
            print(f"| {name} | {usual:.2f} | {busy:.2f} | {busy / usual:.1f} | {max(beside):.1f} |", flush=True)


if __name__ == "__main__":
    main()

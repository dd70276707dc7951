"""Time `notes` beside llama-server, llama-completion and llama-cpp-python on SmolLM2 and real texts.

    python -m bench.race [WORK[/PEER] ...] [--write docs]

Measures all cells in one go (under an hour on two quiet cores), or those named, and keeps them in
docs/results/race.json. `--write` puts the tables into docs/race.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench.race import report
from bench.race.peers import PEERS, Peer, Run
from bench.race.workloads import Work, works
from bench.selecting import chosen


@dataclass(frozen=True)
class Cell:
    """A workload and a program."""

    work: Work
    peer: Peer

    @property
    def name(self) -> str:
        return f"{self.work.name}/{self.peer.name}"


def measure(cell: Cell) -> list[Run]:
    """Ask the prompts in order until the program's time is over; all of them where the figure is a sum."""
    started, runs = 0.0, []
    with closing(cell.peer.run(cell.work)) as answers:  # type: ignore[type-var]  # generators, whose servers end here
        for run in answers:
            runs.append(run)
            started = started or time.monotonic()
            if not cell.work.summed and time.monotonic() - started > cell.peer.cap:
                break
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="CELL", help="some: WORK or WORK/PEER")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="put the report into the documents there")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with us
    every = [Cell(work, peer) for work in works() for peer in PEERS if peer.works(work)]
    found, begun = (report.load() if given.only else {}), time.monotonic()
    for cell in chosen(every, given.only, "cell", "WORK or WORK/PEER"):
        started = time.monotonic()
        runs = measure(cell)
        found[cell.name] = runs
        report.keep(found)
        print(f"{cell.name}: {report.sentence(runs)} ({time.monotonic() - started:.0f} s with the start)", flush=True)
    print(f"{(time.monotonic() - begun) / 60:.0f} minutes")
    if given.write:
        report.write(given.write, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

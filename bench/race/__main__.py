"""Time `notes`, llama-server, llama-completion and llama-cpp-python of the same sdist, on the same tokens.

    python -m bench.race [MODEL[/WORK-SIZE[/PEER]] ...] [--again] [--report] [--write docs]

Without names all cells that are not there yet are measured; with names these alone. Each is kept as soon as it is
there (docs/results/race.json), so that a run can be ended and gone on with at any time. `--again` measures what is
there, too.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from bench.race import report
from bench.race.cells import CAP, cells, keep, load, measure


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", metavar="CELL", help="some: MODEL, MODEL/WORK-SIZE or MODEL/WORK-SIZE/PEER")
    parser.add_argument("--again", action="store_true", help=f"also what is there (a cell takes {CAP:.0f} s and more)")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="put the report into the documents there")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with us
    wanted = cells(given.only)
    for cell in [] if given.report else wanted:
        if cell.name in load() and not given.again:
            continue
        started = time.monotonic()
        runs = measure(cell)
        keep(cell, runs)
        print(f"{cell.name}: {report.sentence(runs)} ({time.monotonic() - started:.0f} s with the start)", flush=True)
    done = load()
    missing = [cell.name for cell in wanted if cell.name not in done]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} cells are measured")
    if given.write:
        report.write(given.write, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())

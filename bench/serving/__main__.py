"""Load-test `notes serve` with errata against llama.cpp's server with the prompt edited.

    python -m bench.serving [MODEL[/SYSTEM[/RATE]] ...] [--write docs]

Without names all phases are measured, afresh; with names these alone, and the others stay as they were. What was seen
is kept in build/serving/phases, and the report put together from it.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path

from bench.serving import report
from bench.serving.phases import PIECES, measure, measured, phases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="PHASE", help="some: MODEL, MODEL/SYSTEM or MODEL/SYSTEM/RATE")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="put the report into the documents there")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with us
    wanted = phases(given.only)
    if not given.only and not given.report:
        shutil.rmtree(PIECES, ignore_errors=True)
    for phase in [] if given.report else wanted:
        started = time.monotonic()
        found = measure(phase)
        print(f"{report.sentence(phase, found)} ({time.monotonic() - started:.0f} s with the start)", flush=True)
    done = measured()
    for phase in wanted:
        if phase not in done:
            print(f"{phase.name}: not measured, or with other settings")
    if given.write:
        report.write(given.write, done)
    return 1 if any(one.failed for _, one in done.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

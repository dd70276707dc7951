"""Run the fault campaign, print a line per kind of fault, and with --write update the table in docs/reliability.md.

    python -m bench.faults [KIND ...] [--full | --seconds N] [--seed S] [--write docs/reliability.md]

Exits 1 if anything fails. Files that made a case fail are kept in build/faults; nothing of yours is touched.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.faults.archives import Archives
from bench.faults.containers import Containers
from bench.faults.disk import Disk
from bench.faults.forgeries import Forgeries
from bench.faults.frame import BAD, FOUND, OUTCOMES, SCRATCH, Kind, Row, run
from bench.faults.kills import Kills
from bench.faults.snapshots import Snapshots
from bench.faults.stale import Stale
from bench.marked import put_between

SLICE = 120  # seconds, without --full
SEED = 9
BEGIN, END = "<!-- make faults: begin -->", "<!-- make faults: end -->"
KINDS: dict[str, type[Kind]] = {  # in the order in which they run
    one.__module__.rpartition(".")[2]: one for one in (Containers, Forgeries, Snapshots, Archives, Kills, Disk, Stale)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"some of: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="every case of the campaign (about an hour)")
    parser.add_argument("--seconds", type=float, default=SLICE, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="(default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into docs/reliability.md")
    given = parser.parse_args()
    if unknown := [kind for kind in given.kinds if kind not in KINDS]:
        parser.error(f"no kind {unknown[0]!r}. There are: {', '.join(KINDS)}")
    chosen = [kind for kind in KINDS if kind in (given.kinds or KINDS)]
    prepare()
    rows = []
    for kind in chosen:
        share = KINDS[kind].share / sum(KINDS[one].share for one in chosen)
        one = KINDS[kind](given.seed)
        row = run(one, until=float("inf") if given.full else time.monotonic() + given.seconds * share)
        found = ", ".join(f"{row.counts[outcome]:,} {outcome}" for outcome in OUTCOMES)
        print(f"{row.kind:<14}{sum(row.counts.values()):>8,} cases: {found} ({row.seconds:.0f} s)", flush=True)
        print(*(f"  {failure}\n" for failure in row.failures), sep="", end="", flush=True)
        rows.append(row)
        if given.write:
            write(given.write, rows)
    return 1 if any(row.failed for row in rows) else 0


def prepare() -> None:
    """Prepare a private scratch folder, and one thread per model."""
    shutil.rmtree(FOUND, ignore_errors=True)
    FOUND.mkdir(parents=True)
    SCRATCH.mkdir(mode=0o700)
    atexit.register(_remove_scratch, os.getpid())
    for name in [name for name in os.environ if name.startswith("NOTES_") and name != "NOTES_LIBRARY"]:
        del os.environ[name]
    os.environ.update(NOTES_HOME=str(SCRATCH / "home"), NOTES_MODEL="notes-tiny")
    os.environ.update(NOTES_THREADS="1", OMP_NUM_THREADS="1", NO_COLOR="1")


def _remove_scratch(owner: int) -> None:
    if os.getpid() == owner:  # exit handlers registered here would run in forked processes, too
        shutil.rmtree(SCRATCH, ignore_errors=True)


def write(page: Path, rows: Sequence[Row]) -> None:
    """Put the rows in place of those of the same kind, into the page and into results/faults.json beside it."""
    kept = page.parent / "results" / "faults.json"
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    every = {row.kind: row for row in (*(Row(**row) for row in known), *rows)}
    ordered = [every[kind] for kind in KINDS if kind in every]
    kept.write_text(json.dumps([asdict(row) for row in ordered], indent=1) + "\n", encoding="utf-8")
    put_between(page, BEGIN, END, f"\n\n{table(ordered)}\n\n")


def table(rows: Sequence[Row]) -> str:
    """The table, and below it further figures and failures."""
    lines = [
        "| kind | seed | cases | accepted, sound | refused | crashes | hangs | wrong | losses | minutes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = " | ".join(f"{row.counts[outcome]:,}" for outcome in OUTCOMES)
        cases = sum(row.counts.values())
        lines.append(f"| {row.kind} | {row.seed} | {cases:,} | {cells} | {row.seconds / 60:.1f} |")
    bad = " | ".join(f"{sum(row.counts[outcome] for row in rows):,}" for outcome in BAD)
    lines += [f"| *all* | | {sum(sum(row.counts.values()) for row in rows):,} | | | {bad} | |", ""]
    for row in rows:
        lines += [f"* **{row.kind}**: {row.notes}."] if row.notes else []
        lines += [f"* **{row.kind}**: {failure}" for failure in row.failures]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    sys.exit(main())

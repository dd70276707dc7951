"""The fault campaign: a line a kind of fault on standard output, and with --write the table in docs/reliability.md.

    python -m bench.faults [KIND ...] [--full | --seconds N] [--seed S] [--write docs/reliability.md]

Exits 1 if anything fails. Files that made a case fail are kept in build/faults; nothing of yours is touched.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

from bench.faults import KINDS
from bench.faults.frame import FOUND, SCRATCH, Budget, Row
from bench.faults.report import sentence, write

SLICE = 120  # seconds, without --full
SEED = 9


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"some of: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="every case of the campaign (about an hour)")
    parser.add_argument("--seconds", type=float, default=SLICE, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="(default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into docs/reliability.md")
    given = parser.parse_args(arguments)
    for kind in given.kinds:
        if kind not in KINDS:
            parser.error(f"no kind {kind!r}. There are: {', '.join(KINDS)}")
    chosen = [kind for kind in KINDS if kind in (given.kinds or KINDS)]
    modules = {kind: importlib.import_module(f"bench.faults.{kind}") for kind in KINDS}
    _settle()
    rows = []
    shares = sum(modules[kind].SHARE for kind in chosen)
    for kind in chosen:
        seconds = float("inf") if given.full else given.seconds * modules[kind].SHARE / shares
        row = campaign(kind, modules[kind], Budget.of(modules[kind].CASES, seconds), given.seed)
        print(sentence(row), flush=True)
        for failure in row.failures:
            print(f"  {failure}", flush=True)
        rows.append(row)
        if given.write:
            write(given.write, rows, {kind: (modules[kind].TITLE, modules[kind].FAILS) for kind in KINDS})
    return 1 if any(row.failed for row in rows) else 0


def campaign(kind: str, module: ModuleType, budget: Budget, seed: int) -> Row:
    """One kind of fault."""
    begun = time.monotonic()
    row: Row = module.run(budget, seed)
    row.kind, row.seed, row.seconds = kind, seed, time.monotonic() - begun
    return row


def _settle() -> None:
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


if __name__ == "__main__":
    sys.exit(main())

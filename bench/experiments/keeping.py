"""Rows kept as they are measured, case by case, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.experiments.table import Row, Table

ROOT = Path(__file__).resolve().parents[2]
KINDS = (".py", ".yaml", ".txt", ".cpp", ".h")


class KeptError(Exception):
    """What is kept was measured otherwise; what to do is said."""


def digest(paths: Iterable[Path]) -> str:
    """That of source files, by their names and what is in them; of folders all that may change what is measured."""
    files = {file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.suffix in KINDS}
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


class Kept:
    """The rows of one measure: JSON lines, the first of them what they are of, then a line a case with its seconds."""

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        """Open or begin it. Raise KeptError if it is of something else."""
        self.path = path
        self.cases: dict[int, list[Row]] = {}
        self.seconds: dict[int, float] = {}
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        whole = lines[:-1]  # a run that is killed leaves the beginning of a line
        if whole:
            was = json.loads(whole[0])
            differ = [name for name in about if was.get(name) != about[name]]
            if differ:
                raise KeptError(
                    f"{path} has rows of other {', '.join(differ)}: mixed with these they would mean nothing. "
                    "Remove it, or name another folder by --keep"
                )
            for line in whole[1:]:
                found = json.loads(line)
                self._take(found)
        else:
            whole = [json.dumps(dict(about)).encode()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(whole) + b"\n")

    @property
    def next(self) -> int:
        """The number of the first case that is not there."""
        return max(self.cases, default=0) + 1

    @property
    def table(self) -> Table:
        return Table(row for case in sorted(self.cases) for row in self.cases[case])

    def used(self) -> int:
        """How many cases are not left out."""
        return sum(not all(row.get("excluded") for row in rows) for rows in self.cases.values())

    def add(self, rows: Iterable[Row]) -> Iterator[int]:
        """Keep rows that come case by case; give the number of each case that is there as a whole."""
        began = time.monotonic()
        for number, group in groupby(rows, lambda row: int(row["case"])):
            found = list(group)
            seconds = round(time.monotonic() - began, 3)
            # As they are read again: truths are numbers, and numpy's are Python's.
            text = json.dumps({"case": number, "seconds": seconds, "rows": found}, default=float)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
            self._take(json.loads(text))
            yield number
            began = time.monotonic()

    def _take(self, line: Mapping[str, Any]) -> None:
        number = int(line["case"])
        self.cases[number] = line["rows"]
        self.seconds[number] = float(line["seconds"])

"""Observations as a table: one row an observation, kept as CSV. All that is reported is computed from it again."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean

Value = str | int | float  # a truth is 0 or 1, what does not apply or was refused is ""
Row = dict[str, Value]


class Table:
    """Rows with the same columns. Those of `where` are of the same table."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def where(self, **wanted: Value) -> Table:
        return Table(row for row in self.rows if all(row[name] == value for name, value in wanted.items()))

    def unique(self, column: str) -> list[Value]:
        """The values of the column, each once, in the order of the rows."""
        return list(dict.fromkeys(row[column] for row in self.rows))

    def numbers(self, column: str) -> list[float]:
        """Those of the column; what is empty is left out."""
        return [float(row[column]) for row in self.rows if row[column] != ""]

    def mean(self, column: str) -> float:
        """NaN where there is nothing."""
        found = self.numbers(column)
        return fmean(found) if found else math.nan

    def total(self, column: str) -> float:
        return math.fsum(self.numbers(column))


def write_table(path: Path, rows: Iterable[Row]) -> None:
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _written(value) for name, value in row.items()} for row in rows)


def read_table(path: Path) -> Table:
    with path.open(newline="", encoding="utf-8") as file:
        return Table({name: _read(text) for name, text in row.items()} for row in csv.DictReader(file))


def _written(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(int(value)) if isinstance(value, bool) else str(value)


def _read(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

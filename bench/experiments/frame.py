"""What an experiment is, and what is said of one."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from matplotlib.figure import Figure

from bench.experiments.table import Row, Table
from bench.experiments.texts import Texts
from bench.reversed_model import REVERSED_NAME
from notes_cli.runtime.workspace import Workspace

SEED = 20260614  # of what is reported; look for settings with others


@dataclass(frozen=True)
class Bar:
    """What the project asks of itself."""

    what: str
    value: float
    relation: str  # >=, <= or <
    bound: float

    @property
    def met(self) -> bool:
        """A value that could not be measured meets nothing."""
        compare = {">=": operator.ge, "<=": operator.le, "<": operator.lt}[self.relation]
        return bool(compare(self.value, self.bound))


@dataclass(frozen=True)
class Summary:
    """What is said of an experiment: what was done, Markdown tables, bars, and what it shows."""

    lead: str
    tables: tuple[str, ...]
    bars: tuple[Bar, ...]
    shows: tuple[str, ...]


class Experiment(Protocol):
    """A module of this package. Rows have a column `case`, from 1 on; `others` has tables of other experiments."""

    TITLE: str
    CASES: int

    def measure(self, workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
        """Raise UnsupportedError where this model cannot be measured."""

    def summarise(self, table: Table, others: Mapping[str, Table]) -> Summary: ...

    def draw(self, table: Table, figure: Figure) -> None: ...


def explained(table: Table) -> bool:
    """Whether it is of the reversed model: what is known of its training explains some figures."""
    return str(table.rows[0]["model"]).startswith(REVERSED_NAME)


def grid(head: str, rows: list[str]) -> str:
    """A Markdown table: cells parted by |, the columns of numbers flushed right."""
    columns = zip(*([cell.strip() for cell in row.split("|")] for row in rows), strict=True)
    marks = ["---:" if any(cell[:1].isdigit() for cell in column) else "---" for column in columns]
    return "\n".join(f"| {line} |" for line in (head, " | ".join(marks), *rows))


def share(value: float, digits: int = 3) -> str:
    """A number in a table, never -0.00; what was refused is said."""
    return "refused" if value != value else f"{round(value, digits) + 0.0:.{digits}f}"


def ratio(a: float, b: float) -> float:
    """NaN where there is nothing to compare with."""
    return a / b if b else math.nan


def interval(table: Table, column: str) -> str:
    """A share and Wilson's 95% interval of it."""
    found = table.numbers(column)
    if not found:
        return "refused"
    n, p, z = len(found), table.mean(column), 1.96
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return f"{p:.3f} ({max(0.0, low):.2f} to {min(1.0, high):.2f})"

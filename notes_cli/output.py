"""What people see: results on stdout, everything else on stderr, colour and progress only on a terminal.

Commands print through these few functions. rich decides on colour (NO_COLOR, FORCE_COLOR, TERM=dumb).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click


def say(message: str) -> None:
    """A line for people, on stderr."""
    click.echo(message, err=True)


def result(text: str) -> None:
    """A line that scripts may read, on stdout."""
    click.echo(text)


def as_json(value: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table on stdout, for people; a script should ask for --json."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    # A pipe has no width: nothing may be cut or wrapped for want of columns.
    Console(width=None if sys.stdout.isatty() else 10_000, highlight=False, markup=False).print(grid)


@contextmanager
def progress(label: str, unit: str = "tokens", hidden: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with speed and ETA on stderr, shown on a terminal only; yields update(done, total)."""
    if hidden or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}")),
        *(TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, state="")

        def update(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            state = f"{amount(done, unit)}/{amount(total, unit)} {unit}" + (
                f" {speed:,.0f}/s" if speed and unit == "tokens" else ""
            )
            bar.update(task, completed=done, total=total, state=state)

        yield update


def amount(count: int, unit: str) -> str:
    return f"{count / 1e6:,.0f}" if unit == "MB" else f"{count:,}"


def line(text: str, length: int | None = None) -> str:
    """A text on one line, its beginning if it is longer, without what would move the cursor of a terminal: it may be
    anybody's."""
    return _cut("".join(part if part.isprintable() else "\ufffd" for part in " ".join(text.split())), length)


def spelt(text: str, length: int) -> str:
    """The beginning of a text with all its blanks, line breaks written out, and no control character (no SVG may)."""
    return _cut("".join(part if part.isprintable() else "." for part in text.replace("\n", "\\n")), length)


def _cut(text: str, length: int | None) -> str:
    return text if length is None or len(text) <= length else text[: length - 1] + "…"


def human_size(count: float) -> str:
    """Bytes as people read them: 12.3 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

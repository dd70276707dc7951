"""Pages that a bench writes in part: Markdown tables, put between two marks; all else is written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def grid(head: str, rows: Sequence[str]) -> str:
    """A Markdown table. Cells are separated by |; columns of numbers are right-aligned."""
    columns = zip(*([cell.strip() for cell in row.split("|")] for row in rows), strict=True)
    marks = ["---:" if any(cell[:1].isdigit() for cell in column) else "---" for column in columns]
    return "\n".join(f"| {line} |" for line in (head, " | ".join(marks), *rows))


def put_between(path: Path, begin: str, end: str, text: str) -> None:
    """Put a text between two marks of a page. Raise SystemExit for a page without them: nothing is written then."""
    before, begun, rest = path.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise SystemExit(f"{path} has no place for this: {begin} and {end}")
    path.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")

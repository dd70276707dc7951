"""Pages that a bench writes in part: what is between two marks is its own, all else is written by hand."""

from __future__ import annotations

from pathlib import Path


def put_between(path: Path, begin: str, end: str, text: str) -> None:
    """Put a text between two marks of a page. Raise SystemExit for a page without them: nothing is written then."""
    before, begun, rest = path.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise SystemExit(f"{path} has no place for this: {begin} and {end}")
    path.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")

"""Minimal ledger lines for tests: turns and edits of a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from notes_cli.engine.segment import Identity
from notes_cli.sessions import HEAD, LEDGER
from notes_cli.sessions.state import Header, read_ledger, serialize

IDENTITY = Identity("tiny", "llama", "F32", "0" * 64, "r", "norm base 10000", "f16/f16", "")
HEADER = Header(IDENTITY, "f16/f16", False, "/models/tiny.gguf")


def turn(*tokens: int, rows: str = "0001.gguf", **more: Any) -> dict[str, Any]:
    piece = {"kind": "text", "name": "", "text": "x", "position": 0, "how": "decoded", "tokens": tokens}
    changed = [[0, len(tokens)]]
    line = {"op": "turn", "question": "Why?", "pieces": [piece], "skills": [], "errata": {}, "rows": rows}
    return {**line, "read_at": "", "rows_checksum": "?", "changed": changed, **more}


def edit(value: str, patches: list[tuple[int, int, list[int]]], changed: list[list[int]], pending: str = "") -> Any:
    parts = [{"first": first, "last": last, "tokens": tokens} for first, last, tokens in patches]
    line = {"op": "edit", "field": "date", "value": value, "method": "field", "pending": pending, "skills": []}
    line |= {"patches": parts, "changed": changed, "read_at": ""}
    return {**line, "rows": "0002.gguf" if changed else "", "rows_checksum": "?"}


def forget(moves: Any) -> Any:
    """A line that cuts nothing and leaves no turns."""
    rest = {"system": "", "questions": [], "pieces": [], "skills": [], "values": {}, "pending": {}, "stated": []}
    line = {"op": "forget", "method": "cut", "what": [], "rest": {**rest, "marks": {}, "read_at": {}}, "moves": moves}
    return {**line, "patches": [], "changed": [], "rows": "", "rows_checksum": ""}


def turn_of(*pieces: tuple[str, str, list[int]], rows: str = "0001.gguf", **more: Any) -> dict[str, Any]:
    """A turn of (kind, name, tokens)."""
    parts = [
        {"kind": kind, "name": name, "text": "x", "position": 0, "how": "decoded", "tokens": tokens}
        for kind, name, tokens in pieces
    ]
    return turn(rows=rows, pieces=parts, **more)


def toggles() -> list[Any]:
    """Two errata of a date and one without a field, each with a question, and a third erratum that is pending."""
    return [
        turn_of(("splice", "returns", [1, 2]), ("question", "", [3])),
        turn_of(("erratum", "date", [4]), ("erratum", "", [5]), ("question", "", [6]), errata={"date": "b"}),
        turn_of(("erratum", "date", [7, 8]), ("question", "", [9]), errata={"date": "c"}),
    ]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def forge(folder: Path, change: Callable[[list[Any]], object]) -> None:
    """Change the lines of a session's ledger and recompute the checksums."""
    lines: list[Any] = read_ledger((folder / LEDGER).read_bytes()).lines
    change(lines)
    (folder / LEDGER).write_bytes(serialize(lines))
    (folder / HEAD).unlink(missing_ok=True)

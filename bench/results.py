"""Stores the results of a measurement in a file, so that an interrupted one continues where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from notes_cli.errors import NotesError

Result = dict[str, Any]


class Results:
    """Results in a file, a line each, of one model with the same tasks."""

    def __init__(self, path: Path, model: str, fingerprint: str) -> None:
        """Raises NotesError for results of another model or of other tasks."""
        self.path, self.found = path, dict[str, Result]()
        head = {"model": model, "fingerprint": fingerprint}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # a run that was killed while it wrote
            path.write_text("".join(lines[:-1]), encoding="utf-8")
            del lines[-1]
        if not lines:
            self._append(head)
        elif json.loads(lines[0]) != head:
            raise NotesError(f"{path} has results of another model or of other tasks", "Remove it, or move it away")
        for line in lines[1:]:
            entry = json.loads(line)
            self.found[entry["cell"]] = entry["result"]

    def add(self, key: str, result: Result) -> None:
        self.found[key] = result
        self._append({"cell": key, "result": result})

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

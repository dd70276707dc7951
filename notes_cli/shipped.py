"""Files that ship with notes and are read at each start.

They are YAML that is JSON but for its lines of comment: Python's own reader takes a thousandth of a second for them,
PyYAML thirty. Whoever writes other YAML there waits for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_shipped(path: Path, *, typed: bool = False) -> Any:
    """What a file holds; `typed`: numbers and truth values are such also where it is no JSON. Raise NotesError as
    read_yaml does."""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads("".join(line for line in text.splitlines(keepends=True) if not line.startswith("#")))
    except (OSError, ValueError, RecursionError):
        from notes_cli.documents import Typed, Untyped, read_yaml

        return read_yaml(path, Typed if typed else Untyped)

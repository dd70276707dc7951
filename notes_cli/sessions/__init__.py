"""Sessions: conversations kept on disk. This module lists them without numpy, so that shell completion is fast."""

from __future__ import annotations

import re
from pathlib import Path

from notes_cli.errors import SessionError, reason
from notes_cli.library.safe_files import check_private
from notes_cli.text import names

SNAPSHOT = re.compile(r"(?:0[0-9]{3}|[1-9][0-9]{3,8})\.json")  # a state; its new K/V has the same name
LEDGER = "ledger.jsonl"  # of earlier versions


def session_names(folder: Path) -> list[str]:
    """Return the sorted names of the sessions in a folder, none if it does not exist. Raises NotesError if another user
    may have created it (safe_files.py), or it cannot be read."""
    check_private(folder)
    try:
        entries = [(names.typed(path.name), path) for path in folder.iterdir()]
        return sorted(name for name, path in entries if names.is_name(name) and path.is_dir() and _has_state(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SessionError(f"cannot read {folder}: {reason(error)}") from error


def _has_state(folder: Path) -> bool:
    return any(SNAPSHOT.fullmatch(path.name) or path.name == LEDGER for path in folder.iterdir())

"""Sessions: conversations kept on disk. This module lists them without numpy, so that shell completion is fast."""

from __future__ import annotations

from pathlib import Path

from notes_cli.errors import SessionError, reason
from notes_cli.library.safe_files import check_private
from notes_cli.text import names

LEDGER = "ledger.jsonl"
HEAD = "ledger.head"  # number of lines in the ledger, and checksum of the last


def session_names(folder: Path) -> list[str]:
    """Return the sorted names of the sessions in a folder, none if it does not exist. Raises NotesError if another user
    may have created it (safe_files.py), or it cannot be read."""
    check_private(folder)
    try:
        entries = [(names.typed(path.name), path) for path in folder.iterdir()]
        return sorted(
            name
            for name, path in entries
            if names.is_name(name) and any((path / file).is_file() for file in (LEDGER, HEAD))  # the other may be lost
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SessionError(f"cannot read {folder}: {reason(error)}") from error

"""Names of the sessions on disk, without numpy and without reading a ledger, so that a shell completes them at once."""

from __future__ import annotations

from pathlib import Path

from notes_cli.errors import SessionError, reason
from notes_cli.library.safe_files import check_private
from notes_cli.text import names

LEDGER = "ledger.jsonl"
HEAD = "ledger.head"  # the number of lines of the ledger, and the checksum of the last


def session_names(folder: Path) -> list[str]:
    """The sessions in a folder, which need not be there. Raise NotesError if it may be of somebody else's making
    (safe_files.py), or cannot be read."""
    check_private(folder)
    try:
        found = [(names.typed(path.name), path) for path in folder.iterdir()]
        return sorted(
            name
            for name, path in found
            if names.is_name(name) and any((path / one).is_file() for one in (LEDGER, HEAD))  # one may be lost
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SessionError(f"cannot read {folder}: {reason(error)}") from error

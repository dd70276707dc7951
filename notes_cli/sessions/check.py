"""Checking the sessions on disk: every ledger, and the rows that it names.

A session cannot be made again, so nothing that a ledger needs is ever touched.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from notes_cli.errors import HeldSessionError, Help, NotesError, SessionError
from notes_cli.library.check import Finding, Told, modes
from notes_cli.sessions.archive import faults
from notes_cli.sessions.folder import SessionFolder, Sessions, clear
from notes_cli.sessions.listing import HEAD
from notes_cli.text import names

IMPORT = re.compile(r"\.(?P<name>.+)\.import")


def check_sessions(sessions: Sessions, told: Told = lambda size: None) -> Iterator[Finding]:
    """What is wrong with the sessions; every byte of their rows is read. Raise NotesError if the folder may be of
    another user's making, or cannot be read."""
    for name in sessions.names():
        try:
            with sessions.locked(name, reading=True) as stored:
                yield from _session(sessions, stored)
                told(stored.nbytes)
        except SessionError as error:
            kind = "busy" if isinstance(error, HeldSessionError) else "damaged"
            yield Finding(kind, sessions.folder / name, error.what, error.remedy)
        except NotesError as error:
            yield Finding("permission", sessions.folder / name, error.what, error.remedy)
    yield from _unfinished(sessions)


def _session(sessions: Sessions, stored: SessionFolder) -> Iterator[Finding]:
    """One that this process holds. It is let go before anything is mended."""
    for path in (stored.ledger, stored.folder / HEAD, *(stored.folder / name for name in stored.kept())):
        yield from modes(path)
    for path, why in faults(stored):
        yield Finding("damaged", path, f"session {stored.name}: {why}", Help.UNDO(name=stored.name))

    def sweep() -> str:
        with sessions.locked(stored.name) as held:
            held.sweep()
        return "removed it"

    def trim() -> str:
        with sessions.locked(stored.name) as held:
            held.trim()
        return "cut it off"

    for path in stored.unneeded():
        yield Finding("leftover", path, f"session {stored.name} does not need it", mend=sweep)
    if stored.torn:
        what = f"its last {stored.torn} bytes are of a line that was not written to its end"
        yield Finding("leftover", stored.ledger, what, mend=trim)


def _unfinished(sessions: Sessions) -> Iterator[Finding]:
    """Folders of imports and forks that were killed: without a ledger there is no session."""
    known = sessions.names()
    with suppress(FileNotFoundError):
        for path in sorted(path for path in sessions.folder.iterdir() if path.is_dir()):
            match = IMPORT.fullmatch(path.name)
            name = match["name"] if match else path.name
            if not names.is_name(names.typed(name)) or (names.typed(name) in known and not match):
                continue

            def remove(path: Path = path, name: str = name, whole: bool = bool(match)) -> str:
                with sessions.locked(name, new=True):
                    shutil.rmtree(path) if whole else clear(path)
                return "removed what was ours of it" if path.exists() else "removed it"

            what = "an import that was not finished left it" if match else "it has no ledger, and so is no session"
            yield Finding("leftover" if match else "orphan", path, what, mend=remove)

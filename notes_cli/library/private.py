"""Folders that are one user's: made for that user alone, and looked at before each use, as ssh does with its own.

Who can write in a folder can put any file there, and what a segment holds is believed. Where a system has no owners and
modes, nothing is looked at.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from notes_cli.errors import Help, NotesError, Remedy

OTHERS = stat.S_IRWXG | stat.S_IRWXO
WRITE = stat.S_IWGRP | stat.S_IWOTH


def make(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for us alone whatever the umask is. Raise OSError."""
    try:
        _make_one(folder)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make(folder.parent)
        _make_one(folder)  # where nothing can be made, as in /proc, no such file is said of the folder itself


def _make_one(folder: Path) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise


def check(folder: Path) -> None:
    """Raise NotesError if others can write in the folder, or in the one that it is in, or own one of them. Where others
    can only read, their permission is removed. One that is not there is fine."""
    if not hasattr(os, "geteuid"):
        return
    open_ = []
    for place in (folder.parent, folder):
        try:
            found = place.stat()
        except OSError:
            continue
        _check_owner(place, found, "Name a folder of your own: NOTES_HOME=FOLDER")
        if found.st_mode & WRITE and not (place != folder and found.st_mode & stat.S_ISVTX):  # as /tmp has it
            open_.append(place)
        elif place == folder and found.st_mode & OTHERS and found.st_uid == os.geteuid():
            with suppress(OSError):  # a file system that is read-only
                place.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
    if open_:
        raise NotesError(
            f"others can write in {' and '.join(map(str, open_))}, so what is there may not be yours",
            Help.CLOSE_FOLDERS(folders=open_),
        )


def check_file(path: Path) -> None:
    """Raise NotesError if the file is another user's. One that is not there is fine."""
    if hasattr(os, "geteuid"):
        with suppress(OSError):
            _check_owner(path, path.stat(), Help.REMOVE_FILE(path=path))


def _check_owner(path: Path, found: os.stat_result, remedy: Remedy | str) -> None:
    """Root may do anything anyway: what is root's is no danger."""
    if found.st_uid not in (0, os.geteuid()):
        raise NotesError(f"{path} belongs to {_user(found.st_uid)}, not to you, and may be forged", remedy)


def _user(number: int) -> str:
    import pwd  # not on every system, nor is its caller

    try:
        return f"{pwd.getpwuid(number).pw_name} (user {number})"
    except KeyError:
        return f"user {number}"

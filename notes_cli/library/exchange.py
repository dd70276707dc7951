"""Segments that leave the library for a file or a folder that others read, and those found in such a folder."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

from notes_cli.errors import DamagedError, Help, SegmentError, UnwritableError, reason
from notes_cli.library.container import SegmentInfo, open_segment, peek, write_segment
from notes_cli.library.files import name_in

READ = stat.S_IRGRP | stat.S_IROTH


def export(path: Path, target: Path, *, force: bool = False, shared: bool = False) -> bool:
    """Write a segment to a file, every byte checked on the way; whether that was needed: not if it is there already.

    Where its text came from is left out, how long this machine took, and how it rounds. `shared`: who can read the
    folder can read the file. Raise SegmentError if there is another file, unless `force` says to write over it.
    """
    segment, info = open_segment(path), peek(path)
    if target.exists() and not force:
        if target.is_file() and _same(info, target):
            return False
        raise SegmentError(f"{target} is there already, and is another file", Help.OTHER_FILE_OR_FORCE())
    bare = replace(segment, source="", stamp=(), prefill=None, backend="")
    write_segment(target, bare, writer=info.writer, created=info.created)
    if shared:
        try:
            target.chmod(0o600 | (stat.S_IMODE(target.parent.stat().st_mode) & READ))
        except OSError as error:
            raise UnwritableError(f"cannot let others read {target}: {reason(error)}") from error
    return True


def found_in(folder: Path) -> dict[str, list[Path]]:
    """The segment files in a folder that others share, by the name of their skill. Raise SegmentError."""
    found: dict[str, list[Path]] = {}
    try:
        for path in sorted(folder.iterdir()):
            name = name_in(path)
            if name:
                found.setdefault(name, []).append(path)
    except OSError as error:
        raise SegmentError(f"cannot read {folder}: {reason(error)}") from error
    return found


def _same(info: SegmentInfo, target: Path) -> bool:
    """Whether the file there is that segment, exported before."""
    try:
        there = open_segment(target)
        return (there.text, there.identity) == (info.text, info.identity) and peek(target).created == info.created
    except DamagedError:
        return False

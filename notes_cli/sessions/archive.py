"""Exports and imports sessions as tar archives (docs/format.md), and checks all sessions on disk."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from notes_cli.errors import HeldSessionError, Help, NotesError, SessionError, reason
from notes_cli.library.check import Finding
from notes_cli.library.safe_files import replacing
from notes_cli.sessions import SNAPSHOT
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import ROWS, SnapshotError, read_snapshot, serialize
from notes_cli.text import names

SUFFIX = ".notes.tar"
CHUNK = 1 << 20
MAX_SNAPSHOT = 64 << 20  # bytes: far above any conversation
IMPORT = re.compile(r"\..+\.import")


class ArchiveError(ValueError):
    """The reason why bytes are not an archive of a session."""


def name_of(path: Path) -> str:
    """Return the session name from the name of its archive. Raises SessionError if it is not valid."""
    name = names.typed(path.name.removesuffix(SUFFIX))
    if not names.is_name(name):
        raise SessionError(
            f"{path.name.removesuffix(SUFFIX)!r} is not a valid session name: use {names.RULE}", Help.OTHER_NAME()
        )
    return name


def save(stored: SessionFolder, out: BinaryIO) -> int:
    """Write the session to `out` and return the number of files in the archive. Equal sessions give equal bytes.
    Raises SessionError if the session is damaged, OSError on a failed write."""
    for _, error in stored.faults():
        message = f"session {stored.name} cannot be exported: {error.what}"
        raise SessionError(message, error.remedy or Help.UNDO(name=stored.name)) from error
    paths = [path for name in stored.kept() if (path := stored.folder / name).exists()]
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for number in stored.in_force:
            snapshot = stored.read_number(number)
            header = replace(snapshot.header, model=Path(snapshot.header.model).name)  # its path is private
            data = serialize(replace(snapshot, header=header))
            archive.addfile(_member(stored.path(number).name, len(data)), io.BytesIO(data))
        for path in paths:
            with path.open("rb") as file:
                archive.addfile(_member(path.name, path.stat().st_size), file)
    return len(stored.in_force) + len(paths)


def load(sessions: Sessions, source: BinaryIO, title: str, name: str) -> SessionFolder:
    """Import a session from the archive `source`; `title` names that in errors. Raises SessionError, without changing
    anything, if a session of that name exists or the archive is damaged."""
    with sessions.locked(name, new=True) as target:
        if target.header:
            raise SessionError(f"there is a session {name} already", Help.OTHER_NAME())
        try:
            with sessions.built(target) as folder:
                _unpack(source, folder)
        except ArchiveError as error:
            raise SessionError(f"{title} is not an export of a session: {error}. Nothing was changed") from error
        except OSError as error:
            raise SessionError(f"cannot import {title}: {reason(error)}. Nothing was changed") from error
        return sessions.find(name)


def _member(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info


def _unpack(source: BinaryIO, folder: Path) -> None:
    """Unpack the files of a session, each K/V file after its snapshot, and check them."""
    while (info := _next_member(source)) is not None:
        path = folder / info.name
        is_snapshot = SNAPSHOT.fullmatch(info.name) is not None
        of_a_session = is_snapshot or (ROWS.fullmatch(info.name) and path.with_suffix(".json").exists())
        if not of_a_session or path.exists() or int(path.stem) >= 10**8:  # later snapshots need numbers
            raise ArchiveError(f"{_printable_name(info)} does not belong in it")
        if is_snapshot and info.size > MAX_SNAPSHOT:
            raise ArchiveError(f"{info.name} has {info.size:,} bytes, the limit is {MAX_SNAPSHOT:,}")
        free = shutil.disk_usage(folder).free
        if info.size > free:
            raise ArchiveError(f"{info.name} has {info.size:,} bytes, the disk has {free:,} left")
        with replacing(path) as temporary:
            _copy(source, info, temporary)
        if is_snapshot:
            try:
                read_snapshot(path.read_bytes())
            except SnapshotError as error:
                raise ArchiveError(f"{info.name} cannot be read: {error}") from error
    try:
        stored = SessionFolder(folder)
        if not stored.header:
            raise ArchiveError("it does not begin with a snapshot")
        for _, fault in stored.faults():
            raise fault
    except NotesError as error:
        raise ArchiveError(error.what) from error
    for path in stored.unneeded():
        raise ArchiveError(f"{path.name!r} does not belong in it")


def _next_member(source: BinaryIO) -> tarfile.TarInfo | None:
    """Return the header of the next regular file, None at the end. Raises ArchiveError for folders, links, long names
    and sparse files."""
    block = source.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise ArchiveError("it ends too early")
    if not any(block):
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise ArchiveError("it is not a tar file, or damaged") from error
    if info.type != tarfile.REGTYPE or info.size < 0:
        raise ArchiveError(f"{_printable_name(info)} is not a regular file")
    return info


def _printable_name(info: tarfile.TarInfo) -> str:
    return ascii(info.name[:60])


def _copy(source: BinaryIO, info: tarfile.TarInfo, path: Path) -> None:
    left = info.size + -info.size % tarfile.BLOCKSIZE  # padded with zeros
    with path.open("wb") as out:
        while left:
            data = source.read(min(left, CHUNK))
            if not data:
                raise ArchiveError("it ends too early")
            out.write(data)
            left -= len(data)
        out.truncate(info.size)


def check_sessions(sessions: Sessions) -> Iterator[Finding]:
    """Yield the problems of all sessions that no other process has open, reading every byte of their K/V.

    Raises NotesError if the folder may have been created by another user, or cannot be read.
    """
    for name in sessions.names():
        try:
            with sessions.locked(name, reading=True) as stored:
                for path, error in stored.faults():
                    yield Finding(path, f"session {name}: {error.what}", error.remedy or Help.UNDO(name=name))
        except HeldSessionError:
            continue
        except NotesError as error:
            yield Finding(sessions.folder / name, error.what, error.remedy)
    with suppress(FileNotFoundError):
        for path in sorted(path for path in sessions.folder.iterdir() if path.is_dir()):
            name = names.typed(path.name)
            if IMPORT.fullmatch(path.name) or (names.is_name(name) and name not in sessions.names()):
                what = "it is no session: an import or a fork that was not finished left it"
                yield Finding(path, what, Help.ADVICE(text="Remove that folder"))

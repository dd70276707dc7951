"""Exports and imports sessions as tar archives (docs/format.md), and checks all sessions on disk."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from notes_cli.errors import DamagedError, HeldSessionError, Help, NotesError, SegmentError, SessionError, reason
from notes_cli.library.check import Finding
from notes_cli.library.container import checksum_of, open_segment
from notes_cli.library.safe_files import replacing
from notes_cli.sessions import SNAPSHOT
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import (
    FORMAT,
    OtherFormatError,
    Snapshot,
    SnapshotError,
    read_snapshot,
    serialize,
)
from notes_cli.text import names

SUFFIX = ".notes.tar"
CHUNK = 1 << 20
MAX_SNAPSHOT = 64 << 20  # bytes: far above any conversation


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
    try:
        snapshots = _snapshots(stored)
        paths = _existing_rows(stored)
        _check_complete(snapshots.values(), {path.name for path in paths})
        for path in paths:
            _check_rows(path, snapshots.values())
    except (ArchiveError, SnapshotError) as error:
        raise SessionError(f"session {stored.name} is damaged: {error}", Help.UNDO(name=stored.name)) from error
    except SegmentError as error:
        raise SessionError(f"cannot export session {stored.name}: {error.what}", error.remedy) from error
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for name, snapshot in snapshots.items():
            header = replace(snapshot.header, model=Path(snapshot.header.model).name)  # its path is private
            data = serialize(replace(snapshot, header=header))
            archive.addfile(_member(name, len(data)), io.BytesIO(data))
        for path in paths:
            with path.open("rb") as file:
                archive.addfile(_member(path.name, path.stat().st_size), file)
    return len(snapshots) + len(paths)


def _snapshots(stored: SessionFolder) -> dict[str, Snapshot]:
    """Read all snapshots, by the names of their files. Raises SnapshotError for a damaged one."""
    paths = map(stored.path, stored.in_force)
    return {path.name: read_snapshot(path.read_bytes()) for path in paths}


def _existing_rows(stored: SessionFolder) -> list[Path]:
    return [path for name in stored.kept() if (path := stored.folder / name).exists()]


def faults(stored: SessionFolder) -> Iterator[tuple[Path, str]]:
    """Yield each damaged file that a session needs, with the reason; for a missing one, the last snapshot."""
    last = stored.path(stored.in_force[-1])
    try:
        snapshots = _snapshots(stored).values()
    except SnapshotError as error:
        yield stored.folder, f"an earlier snapshot is damaged: {error}"
        return
    for path in _existing_rows(stored):
        try:
            _check_rows(path, snapshots)
        except (ArchiveError, SegmentError) as error:
            yield path, error.what if isinstance(error, SegmentError) else str(error)
    try:
        _check_complete(snapshots, {path.name for path in _existing_rows(stored)})
    except ArchiveError as error:
        yield last, str(error)


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
        except SegmentError as error:
            raise SessionError(f"cannot import {title}: {error.what}. Nothing was changed", error.remedy) from error
        except OSError as error:
            raise SessionError(f"cannot import {title}: {reason(error)}. Nothing was changed") from error
        return sessions.find(name)


def _member(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info


def _unpack(source: BinaryIO, folder: Path) -> None:
    """Unpack and check an archive: the snapshots first, in order, then only files that they name."""
    snapshots: dict[str, Snapshot] = {}
    seen: set[str] = set()
    while (info := _next_member(source)) is not None:
        if _follows(info.name, [*snapshots]) and not seen:
            snapshots[info.name] = _unpack_snapshot(source, info, folder, list(snapshots.values()))
            continue
        if not snapshots:
            raise ArchiveError("it does not begin with a snapshot")
        named = {name for snapshot in snapshots.values() for name in snapshot.files}
        if info.name not in named - seen or info.name.replace(".gguf", ".json") not in snapshots:
            raise ArchiveError(f"{_printable_name(info)} does not belong in it")
        free = shutil.disk_usage(folder).free
        if info.size > free:
            raise ArchiveError(f"{info.name} has {info.size:,} bytes, the disk has {free:,} left")
        with replacing(folder / info.name) as temporary:
            _copy(source, info, temporary)
        _check_rows(folder / info.name, snapshots.values())
        seen.add(info.name)
    if not snapshots:
        raise ArchiveError("it does not begin with a snapshot")
    _check_complete(snapshots.values(), seen)


def _follows(name: str, before: list[str]) -> bool:
    """Return True for the name of a snapshot after these, which leaves numbers for later ones."""
    numbers = [int(Path(each).stem) for each in before[-1:]]
    return bool(SNAPSHOT.fullmatch(name)) and [*numbers, -1][0] < int(Path(name).stem) < 10**8


def _unpack_snapshot(source: BinaryIO, info: tarfile.TarInfo, folder: Path, before: list[Snapshot]) -> Snapshot:
    if info.size > MAX_SNAPSHOT:
        raise ArchiveError(f"{info.name} has {info.size:,} bytes, the limit is {MAX_SNAPSHOT:,}")
    with replacing(folder / info.name) as temporary:
        _copy(source, info, temporary)
    try:
        snapshot = read_snapshot((folder / info.name).read_bytes())
    except OtherFormatError as error:
        raise ArchiveError(f"it has format {error}, this version of notes reads {FORMAT}") from error
    except SnapshotError as error:
        raise ArchiveError(f"{info.name} in it is damaged: {error}") from error
    if snapshot.first == bool(before) or (before and snapshot.header != before[0].header):
        raise ArchiveError(f"{info.name} in it is of another session")
    return snapshot


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


def _check_complete(snapshots: Iterable[Snapshot], present: set[str]) -> None:
    """Raise ArchiveError if K/V files are missing, also ones that only an undo would read. Those of prefix-only models
    are optional: without them the text is decoded again."""
    for snapshot in snapshots:
        missing = {rows.file for rows in snapshot.state.rows} - present
        if missing and not snapshot.header.prefix_only:
            raise ArchiveError(f"the rows {min(missing) or 'of some tokens'} are missing")


def _check_rows(path: Path, snapshots: Iterable[Snapshot]) -> None:
    """Raise SegmentError or ArchiveError unless the file is intact and has K/V of the tokens in the snapshots."""
    try:
        segment, checksum = open_segment(path), checksum_of(path)
    except DamagedError as error:
        raise ArchiveError(f"{path.name} in it is damaged") from error
    tokens = segment.tokens.tolist()
    for snapshot in snapshots:
        if path.name not in snapshot.files:
            continue
        if checksum != snapshot.files[path.name]:
            raise ArchiveError(f"{path.name} in it is not the file that the session names")
        header, state, at = snapshot.header, snapshot.state, 0
        if segment.prefix_only != header.prefix_only or segment.identity.differences(header.identity):
            raise ArchiveError(f"{path.name} in it is of another model")
        for rows in state.rows:
            held = tokens[rows.first : rows.first + rows.count]
            if rows.file == path.name and held != state.tokens[at : at + rows.count]:
                raise ArchiveError(f"{path.name} in it holds the rows of other tokens")
            at += rows.count


IMPORT = re.compile(r"\..+\.import")


def check_sessions(sessions: Sessions) -> Iterator[Finding]:
    """Yield the problems of all sessions that no other process has open, reading every byte of their K/V.

    Raises NotesError if the folder may have been created by another user, or cannot be read.
    """
    for name in sessions.names():
        try:
            with sessions.locked(name, reading=True) as stored:
                for path, why in faults(stored):
                    yield Finding(path, f"session {name}: {why}", Help.UNDO(name=name))
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

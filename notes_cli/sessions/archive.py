"""Exports and imports sessions as tar archives (docs/format.md), and checks all sessions on disk."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from notes_cli.errors import DamagedError, HeldSessionError, Help, NotesError, SegmentError, SessionError, reason
from notes_cli.library.check import Finding
from notes_cli.library.container import checksum_of, open_segment
from notes_cli.library.safe_files import make_private, replacing, sync_folder
from notes_cli.sessions import HEAD, LEDGER
from notes_cli.sessions.folder import SessionFolder, Sessions, clear
from notes_cli.sessions.state import FORMAT, FormatError, Ledger, LedgerError, read_ledger, serialize
from notes_cli.text import names

SUFFIX = ".notes.tar"
CHUNK = 1 << 20
MAX_LEDGER = 256 << 20  # bytes: far above any conversation


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
    first, *lines = read_ledger(stored.ledger.read_bytes()[: stored.end]).lines
    data = serialize([{**first, "model": Path(first["model"]).name}, *lines])  # the path of its model is private
    ledger = read_ledger(data)
    paths = _existing_rows(stored, ledger)
    try:
        _check_complete(ledger, set(paths))
        for path in paths.values():
            _check_rows(path, ledger)
    except ArchiveError as error:
        raise SessionError(f"session {stored.name} is damaged: {error}", Help.UNDO(name=stored.name)) from error
    except SegmentError as error:
        raise SessionError(f"cannot export session {stored.name}: {error.what}", error.remedy) from error
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(_member(LEDGER, len(data)), io.BytesIO(data))
        for name, path in paths.items():
            with path.open("rb") as file:
                archive.addfile(_member(name, path.stat().st_size), file)
    return 1 + len(paths)


def faults(stored: SessionFolder) -> Iterator[tuple[Path, str]]:
    """Yield each damaged K/V file that a session needs, with the reason; for a missing file, the ledger."""
    ledger = read_ledger(stored.ledger.read_bytes()[: stored.end])
    paths = _existing_rows(stored, ledger)
    for path in paths.values():
        try:
            _check_rows(path, ledger)
        except (ArchiveError, SegmentError) as error:
            yield path, error.what if isinstance(error, SegmentError) else str(error)
    try:
        _check_complete(ledger, set(paths))
    except ArchiveError as error:
        yield stored.ledger, str(error)


def _existing_rows(stored: SessionFolder, ledger: Ledger) -> dict[str, Path]:
    return {name: stored.folder / name for name in ledger.kept if (stored.folder / name).exists()}


def load(sessions: Sessions, source: BinaryIO, title: str, name: str) -> SessionFolder:
    """Import a session from the archive `source`; `title` names that in errors. Raises SessionError, without changing
    anything, if a session of that name exists or the archive is damaged."""
    with sessions.locked(name, new=True) as target:
        if target.header:
            raise SessionError(f"there is a session {name} already", Help.OTHER_NAME())
        folder = sessions.folder / f".{name}.import"
        shutil.rmtree(folder, ignore_errors=True)  # from an import that was killed
        try:
            make_private(folder)
            _unpack(source, folder)
            if target.folder.exists():  # without a ledger: from a fork that was killed
                clear(target.folder)
            folder.rename(target.folder)
            sync_folder(sessions.folder)
        except ArchiveError as error:
            raise SessionError(f"{title} is not an export of a session: {error}. Nothing was changed") from error
        except SegmentError as error:
            raise SessionError(f"cannot import {title}: {error.what}. Nothing was changed", error.remedy) from error
        except OSError as error:
            raise SessionError(f"cannot import {title}: {reason(error)}. Nothing was changed") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return sessions.find(name)


def _member(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info


def _unpack(source: BinaryIO, folder: Path) -> None:
    """Unpack and check an archive: the ledger first, then only files that it names."""
    info = _next_member(source)
    if info is None or info.name != LEDGER:
        raise ArchiveError(f"it does not begin with {LEDGER}")
    if info.size > MAX_LEDGER:
        raise ArchiveError(f"its ledger has {info.size:,} bytes, the limit is {MAX_LEDGER:,}")
    with replacing(folder / LEDGER) as temporary:
        _copy(source, info, temporary)
    try:
        ledger = read_ledger((folder / LEDGER).read_bytes())
    except FormatError as error:
        raise ArchiveError(f"it has format {error}, this version of notes reads {FORMAT}") from error
    except LedgerError as error:
        raise ArchiveError(f"its ledger is damaged: {error}") from error
    kept, seen = ledger.kept, set[str]()
    while (info := _next_member(source)) is not None:
        if info.name not in kept or info.name in seen:
            raise ArchiveError(f"{_printable_name(info)} does not belong in it")
        free = shutil.disk_usage(folder).free
        if info.size > free:
            raise ArchiveError(f"{info.name} has {info.size:,} bytes, the disk has {free:,} left")
        with replacing(folder / info.name) as temporary:
            _copy(source, info, temporary)
        _check_rows(folder / info.name, ledger)
        seen.add(info.name)
    _check_complete(ledger, seen)
    with replacing(folder / HEAD) as temporary:
        temporary.write_text(str(ledger.head), encoding="ascii")


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


def _check_complete(ledger: Ledger, present: set[str]) -> None:
    """Raise ArchiveError if K/V files are missing, also ones that only an undo would read. Those of prefix-only models
    are optional: without them the text is decoded again."""
    needed = set() if ledger.header.prefix_only else {*ledger.kept, *(name for name, _ in ledger.state.rows)}
    if needed - present:
        raise ArchiveError(f"the rows {min(needed - present) or 'of some tokens'} are missing")


def _check_rows(path: Path, ledger: Ledger) -> None:
    """Raise SegmentError or ArchiveError unless the file is intact and has K/V of the tokens in the ledger."""
    try:
        segment, checksum = open_segment(path), checksum_of(path)
    except DamagedError as error:
        raise ArchiveError(f"{path.name} in it is damaged") from error
    if checksum != ledger.state.checksums.get(path.name):
        raise ArchiveError(f"{path.name} in it is not the file that the ledger names")
    if segment.prefix_only != ledger.header.prefix_only or segment.identity.differences(ledger.header.identity):
        raise ArchiveError(f"{path.name} in it is of another model")
    if not ledger.header.prefix_only:
        state, tokens = ledger.state, segment.tokens.tolist()
        rows = [(token, row) for token, (file, row) in zip(state.tokens, state.rows, strict=True) if file == path.name]
        if not all(row < len(tokens) and tokens[row] == token for token, row in rows):
            raise ArchiveError(f"{path.name} in it holds the rows of other tokens")


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

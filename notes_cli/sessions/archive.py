"""Archives of sessions, each one file (docs/format.md), and the check of all sessions on disk."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from notes_cli.engine.segment import Segment
from notes_cli.errors import DamagedError, HeldSessionError, Help, NotesError, SegmentError, SessionError, reason
from notes_cli.library.check import Finding, OnChecked, check_permissions
from notes_cli.library.container import checksum_of, open_segment
from notes_cli.library.safe_files import make_private, replacing, sync_folder
from notes_cli.sessions.folder import SessionFolder, Sessions, clear
from notes_cli.sessions.ledger import FORMAT, FormatError, Ledger, LedgerError, read_ledger, sealed
from notes_cli.sessions.listing import HEAD, LEDGER
from notes_cli.text import names

SUFFIX = ".notes.tar"
CHUNK = 1 << 20
MAX_LEDGER = 256 << 20  # bytes: far above any conversation


class ArchiveError(ValueError):
    """Bytes that are not an archive of a session, and why."""


def name_of(path: Path) -> str:
    """The session's name by that of its archive. Raise SessionError if that is not a valid one."""
    name = names.typed(path.name.removesuffix(SUFFIX))
    if not names.is_name(name):
        raise SessionError(
            f"{path.name.removesuffix(SUFFIX)!r} is not a valid session name: use {names.RULE}", Help.OTHER_NAME()
        )
    return name


def save(stored: SessionFolder, out: BinaryIO) -> int:
    """Write the session to `out`, the same one in the same bytes; return the number of files in it.

    Raise SessionError if it is damaged; OSError as `out` does.
    """
    data = _portable(stored)
    ledger = read_ledger(data)
    here = {name: stored.folder / name for name in ledger.kept if (stored.folder / name).exists()}
    try:
        _check_complete(ledger, set(here))
        for path in here.values():
            _check_rows(path, ledger)
    except ArchiveError as error:
        raise SessionError(f"session {stored.name} is damaged: {error}", Help.UNDO(name=stored.name)) from error
    except SegmentError as error:
        raise SessionError(f"cannot export session {stored.name}: {error.what}", error.remedy) from error
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(_member(LEDGER, len(data)), io.BytesIO(data))
        for name, path in here.items():
            with path.open("rb") as file:
                archive.addfile(_member(name, path.stat().st_size), file)
    return 1 + len(here)


def faults(stored: SessionFolder) -> Iterator[tuple[Path, str]]:
    """What is wrong with the rows that a session needs: each file with why, the ledger where one is missing."""
    ledger = read_ledger(stored.ledger.read_bytes()[: stored.end])
    here = {name: stored.folder / name for name in ledger.kept if (stored.folder / name).exists()}
    for path in here.values():
        try:
            _check_rows(path, ledger)
        except (ArchiveError, SegmentError) as error:
            yield path, error.what if isinstance(error, SegmentError) else str(error)
    try:
        _check_complete(ledger, set(here))
    except ArchiveError as error:
        yield stored.ledger, str(error)


def load(sessions: Sessions, source: BinaryIO, title: str, name: str) -> SessionFolder:
    """Make a session of what `source` holds; `title` is what people call that.

    Raise SessionError if there is one of that name, or the source is not sound; then nothing is changed.
    """
    with sessions.locked(name, new=True) as there:
        if there.header:
            raise SessionError(f"there is a session {name} already", Help.OTHER_NAME())
        folder = sessions.folder / f".{name}.import"
        shutil.rmtree(folder, ignore_errors=True)  # of an import that was killed
        try:
            make_private(folder)
            _unpack(source, folder)
            if there.folder.exists():  # without a ledger: of a fork that was killed
                clear(there.folder)
            folder.rename(there.folder)
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


def _portable(stored: SessionFolder) -> bytes:
    """The ledger without the folder of its model, which is nobody else's business."""
    first, *lines = read_ledger(stored.ledger.read_bytes()[: stored.end]).lines
    return sealed([{**first, "model": Path(first["model"]).name}, *lines])


def _member(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info


def _unpack(source: BinaryIO, folder: Path) -> None:
    """The ledger first, and then what it names and nothing else."""
    info = _next(source)
    if info is None or info.name != LEDGER:
        raise ArchiveError(f"it does not begin with {LEDGER}")
    if info.size > MAX_LEDGER:
        raise ArchiveError(f"its ledger has {info.size:,} bytes, the limit is {MAX_LEDGER:,}")
    with replacing(folder / LEDGER) as temporary:
        _copy(source, info, temporary)
    ledger = _ledger((folder / LEDGER).read_bytes())
    kept, seen = ledger.kept, set[str]()
    while (info := _next(source)) is not None:
        if info.name not in kept or info.name in seen:
            raise ArchiveError(f"{_short(info)} does not belong in it")
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


def _ledger(data: bytes) -> Ledger:
    try:
        return read_ledger(data)
    except FormatError as error:
        raise ArchiveError(f"it has format {error}, this version of notes reads {FORMAT}") from error
    except LedgerError as error:
        raise ArchiveError(f"its ledger is damaged: {error}") from error


def _next(source: BinaryIO) -> tarfile.TarInfo | None:
    """The next regular file, None at the end. Nothing else belongs here: folders, links, long names, holes."""
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
        raise ArchiveError(f"{_short(info)} is not a regular file")
    return info


def _short(info: tarfile.TarInfo) -> str:
    """Its name, which may be anything."""
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


def _check_complete(ledger: Ledger, there: set[str]) -> None:
    """Raise ArchiveError where rows are missing, also those that only an undo would need. Pinned rows are not kept of
    every turn: without them the text is decoded again."""
    needed = set() if ledger.header.prefix_only else {*ledger.kept, *(name for name, _ in ledger.state.rows)}
    if needed - there:
        raise ArchiveError(f"the rows {min(needed - there) or 'of some tokens'} are missing")


def _check_rows(path: Path, ledger: Ledger) -> None:
    """Raise SegmentError or ArchiveError unless the file is sound and holds rows of the tokens that the ledger says."""
    try:
        segment, checksum = open_segment(path), checksum_of(path)
    except DamagedError as error:
        raise ArchiveError(f"{path.name} in it is damaged") from error
    if checksum != ledger.state.checksums.get(path.name):
        raise ArchiveError(f"{path.name} in it is not the file that the ledger names")
    if segment.prefix_only != ledger.header.prefix_only or segment.identity.differences(ledger.header.identity):
        raise ArchiveError(f"{path.name} in it is of another model")
    if not ledger.header.prefix_only and not _fits(segment, path.name, ledger):
        raise ArchiveError(f"{path.name} in it holds the rows of other tokens")


def _fits(segment: Segment, name: str, ledger: Ledger) -> bool:
    state, tokens = ledger.state, segment.tokens.tolist()
    mine = [(token, row) for token, (file, row) in zip(state.tokens, state.rows, strict=True) if file == name]
    return all(row < len(tokens) and tokens[row] == token for token, row in mine)


IMPORT = re.compile(r"\.(?P<name>.+)\.import")


def check_sessions(sessions: Sessions, told: OnChecked = lambda size: None) -> Iterator[Finding]:
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
        yield from check_permissions(path)
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

"""Checks all files of the library, the profiles and the JSON caches for damage, leftovers and unsafe permissions.

Damaged files are moved aside, leftovers of killed processes are removed.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from notes_cli.errors import (
    DamagedError,
    Help,
    NewerError,
    NotesError,
    OutdatedError,
    Remedy,
    SegmentError,
    reason,
)
from notes_cli.library.container import SegmentInfo, open_segment, peek
from notes_cli.library.profiles import Profiles, calibration_checkpoints
from notes_cli.library.safe_files import (
    OTHERS,
    HeldError,
    check_private,
    check_private_file,
    is_unused,
    locked,
    make_private,
    remove_unused,
    sync_folder,
)
from notes_cli.library.segment_files import (
    CHECKPOINTS,
    FILE,
    compile_checkpoints,
    forget_uses,
    lock_of,
    orphaned_uses,
    segment_files,
)

ASIDE = ".damaged"
OLD = 30 * 86400.0  # seconds after which a checkpoint counts as abandoned
OnChecked = Callable[[int], object]  # gets the size of each checked file, in bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with a file, and its remedy. `mend`, where a repair loses nothing, does it and returns a description of
    it, or raises OSError or NotesError."""

    kind: str  # damaged, newer, unreadable, renamed, leftover, orphan, permission, outdated, busy
    path: Path
    what: str
    remedy: Remedy | None = None
    mend: Callable[[], str] | None = None


def check_library(folder: Path, on_checked: OnChecked = lambda size: None) -> Iterator[Finding]:
    """Yield the problems of a library, reading every byte of each segment. Raises NotesError if another user may have
    made the folder, or it cannot be read."""
    for name, path in segment_files(folder):
        yield from _segment(name, path)
        with suppress(OSError):
            on_checked(path.stat().st_size)
    yield from leftovers(folder)
    yield from leftovers(folder / CHECKPOINTS)
    yield from _abandoned(compile_checkpoints(folder), "a compile")
    for record in orphaned_uses(folder):
        yield Finding("orphan", record, "the segment whose uses it counts is gone", mend=_removal(record))


def check_profiles(folder: Path) -> Iterator[Finding]:
    """Yield the problems of the profiles of models. Raises NotesError as check_library does."""
    profiles = Profiles(folder)
    for name in profiles.names():
        path = folder / f"{name}.json"
        yield from check_permissions(path)
        try:
            profile = profiles.read(profiles.named(name))
        except OutdatedError as error:
            yield Finding("outdated", path, error.what, error.remedy)
        except NotesError as error:
            yield Finding("damaged", path, error.what, error.remedy, partial(set_aside, path))
        else:
            if path != profiles.path(profile.identity, profile.cache):
                yield Finding("renamed", path, "its name is not that of the model that it was measured of")
    yield from leftovers(folder)
    yield from _abandoned(calibration_checkpoints(folder), "a calibration")


def check_memory(folder: Path) -> Iterator[Finding]:
    """Yield the problems of the JSON caches of facts about models, which are computed again without them."""
    check_private(folder)
    for path in sorted(folder.glob("*.json")):
        yield from check_permissions(path)
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            problem = f"it is not JSON ({error}); what it held is found out again"
            yield Finding("damaged", path, problem, mend=_removal(path))
        except OSError as error:
            yield Finding("unreadable", path, reason(error))
    yield from leftovers(folder)


def leftovers(folder: Path) -> Iterator[Finding]:
    """Yield the temporary files of killed processes, not those that are being written."""
    for path in sorted(folder.glob(".*.tmp")):
        with suppress(OSError):  # renamed meanwhile
            if path.is_file() and not path.is_symlink() and is_unused(path):
                yield Finding("leftover", path, "a process that was killed left it", mend=_removal(path, sure=True))


def _abandoned(checkpoints: Iterable[Path], work: str) -> Iterator[Finding]:
    """Yield the checkpoints of work that was interrupted long ago."""
    for path in checkpoints:
        with suppress(OSError):  # removed meanwhile
            if time.time() - path.stat().st_mtime > OLD:
                problem = f"{work} was interrupted, and was not taken up again"
                yield Finding("leftover", path, problem, mend=_removal(path))


def check_permissions(path: Path) -> Iterator[Finding]:
    """Yield a finding if others can read or write a file of ours, or own it."""
    try:
        check_private_file(path)
        status = path.lstat()
    except NotesError as error:
        yield Finding("permission", path, error.what, error.remedy)
        return
    except OSError:
        return
    mode = stat.S_IMODE(status.st_mode)
    if mode & OTHERS and stat.S_ISREG(status.st_mode) and hasattr(os, "geteuid"):

        def restrict() -> str:
            path.chmod(mode & ~OTHERS)
            return "took the others' rights to it"

        yield Finding("permission", path, f"others have rights to it (mode {mode:o})", mend=restrict)


def set_aside(path: Path) -> str:
    """Move a file into a folder that no library reads. Raises OSError."""
    aside = aside_of(path)
    make_private(aside.parent)
    path.replace(aside)
    sync_folder(path.parent)
    return f"moved it to {aside}"


def aside_of(path: Path) -> Path:
    """Return a free path to move a damaged file to."""
    aside, count = path.parent / ASIDE / path.name, 1
    while os.path.lexists(aside):
        count += 1
        aside = aside.with_name(f"{path.stem}.{count}{path.suffix}")
    return aside


def _segment(name: str, path: Path) -> Iterator[Finding]:
    yield from check_permissions(path)
    info: SegmentInfo | None = None
    try:
        info = peek(path)
        open_segment(path)
    except NewerError as error:
        yield Finding("newer", path, error.what, error.remedy)
    except DamagedError as error:

        def mend() -> str:
            try:
                with locked(lock_of(path), wait=0):
                    with suppress(DamagedError):
                        open_segment(path)
                        return "it was compiled again meanwhile"  # checking the rest of the library took long
                    done = set_aside(path)
                    forget_uses(path)
                return done
            except HeldError:
                raise SegmentError(f"{name} is being compiled") from None

        yield Finding("damaged", path, error.what, _again(name, path, info), mend)
    except SegmentError as error:
        if path.exists():  # else it was removed meanwhile
            yield Finding("unreadable", path, error.what, error.remedy)
    else:
        match = FILE.fullmatch(path.name)
        if match and (match["key"] != info.identity.key or info.name != name):
            problem = (
                f"it holds {info.name} for {info.identity.model} {info.identity.quantization}, and is called otherwise"
            )
            yield Finding("renamed", path, problem, Help.TAKE_OVER(path=path))


def _again(name: str, path: Path, info: SegmentInfo | None) -> Remedy:
    """Return the command that compiles a damaged segment again: from its source, or from the segment if its head is
    sound."""
    if info is None:
        return Help.COMPILE_TEXT(name=name)
    if info.source not in ("", "-") and os.path.isfile(info.source):
        return Help.COMPILE_FILE(source=info.source, name=name)
    return Help.COMPILE_SEGMENT(path=aside_of(path))


def _removal(path: Path, *, sure: bool = False) -> Callable[[], str]:
    """Return a function that removes a file that no process uses."""

    def remove() -> str:
        if not remove_unused(path, sure=sure):
            raise SegmentError(f"{path} is in use")
        return "removed it"

    return remove

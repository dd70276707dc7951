"""Limits of the system for tests: few file descriptors, small files, files of another owner."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from notes_cli.library import safe_files


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Limit the number of further open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)  # the lowest that is free; the limit is on numbers
    os.close(probe)
    taken = {int(name) for name in os.listdir("/proc/self/fd")} if Path("/proc/self/fd").exists() else set()
    held = []
    while taken and probe < max(taken):  # fill the gaps, so that the limit counts
        held.append(os.open(os.devnull, os.O_RDONLY))
        probe = held[-1] + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def as_a_new_process() -> None:
    """Have folders checked again, as a process does that has not opened them yet."""
    safe_files._checked.clear()


def belongs_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the file or folder another owner, or fake it without the right to; root as owner would be accepted."""
    as_a_new_process()
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        return
    stat, other = os.stat, path.stat().st_ino

    def found(place: Any, **more: Any) -> os.stat_result:
        result = stat(place, **more)
        return os.stat_result((*result[:4], 12345, *result[5:])) if result.st_ino == other else result

    monkeypatch.setattr(os, "stat", found)


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """Limit the size of files in bytes: writes fail as on a full disk, with EFBIG for ENOSPC."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@contextmanager
def unprivileged_here() -> Iterator[None]:
    """This thread may not pass over the modes of files, which root may (on Linux)."""
    overrides = 0b110  # to write, and to read and search
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if not hasattr(libc, "capget") or libc.capget(header, held):
        yield
        return
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~overrides  # clears the first word of the effective set; the permitted set stays
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0

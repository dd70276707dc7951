"""A process that the system grants little: few descriptors, small files."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """No more than so many files can be opened beside those that are open."""
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


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: what a full disk does to a write, with EFBIG for ENOSPC."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)

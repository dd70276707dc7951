"""Ctrl-C while llama.cpp computes: a signal is written into a pipe, which llama.cpp looks at between two operations.

Python's own handler runs when the call returns; without this that is after a batch, which takes seconds on a laptop.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

_pipe: tuple[int, int] | None = None  # to read from, to write to


def descriptor() -> int:
    """What native/notes_watch.h looks at; -1 where the system has no such thing."""
    global _pipe
    if os.name != "posix":
        return -1
    if _pipe is None:
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
    return _pipe[0]


def _renew() -> None:
    """After a fork: the child gets a pipe of its own under the same descriptors, which its contexts look at; the old
    one is its parent's."""
    if _pipe is None:
        return
    for mine, new in zip(_pipe, os.pipe(), strict=True):
        os.dup2(new, mine, inheritable=False)
        os.set_blocking(mine, False)
        os.close(new)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class Listening:
    """While this is entered, a signal that Python handles stops the computation. In the main thread, and unless
    others (asyncio) listen already."""

    def __init__(self) -> None:
        self._armed = False
        self.silent = False  # whether it has listened, and no signal came

    def __enter__(self) -> None:
        self._armed = self.silent = False
        if _pipe is None or threading.current_thread() is not threading.main_thread():
            return
        _drain(_pipe[0])  # an interrupt may have come on the way out
        before = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
        self._armed = before in (-1, _pipe[1])
        if not self._armed:
            signal.set_wakeup_fd(before)
            came = _drain(_pipe[0])
            if came:  # between the two
                os.write(before, came)

    def __exit__(self, *_: object) -> None:
        if self._armed and _pipe is not None:
            self._armed = False
            signal.set_wakeup_fd(-1)
            self.silent = not _drain(_pipe[0])


def _drain(end: int) -> bytes:
    """Empty the pipe; return what was in it."""
    found = b""
    with suppress(BlockingIOError):
        while part := os.read(end, 64):
            found += part
    return found

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


def _forget() -> None:
    """In a child of a fork: the pipe is its parent's."""
    global _pipe
    _pipe = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Listening:
    """While this is entered, a signal that Python handles stops the computation. In the main thread, and unless
    somebody else (asyncio) listens already."""

    def __init__(self) -> None:
        self._armed = False

    def __enter__(self) -> None:
        if _pipe is None or threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        self._armed = before == -1

    def __exit__(self, *_: object) -> None:
        if self._armed and _pipe is not None:
            signal.set_wakeup_fd(-1)
            with suppress(BlockingIOError):  # nothing came
                os.read(_pipe[0], 64)

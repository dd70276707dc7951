"""Ctrl-C while llama.cpp computes: a signal is written into a pipe, which llama.cpp looks at between two operations.

Python's own handler runs when the call returns; without this that is after a batch, which takes seconds on a laptop.
One operation can still take longer than people wait, such as the attention of many tokens to many: a program that need
not go on can have itself told (`when_late`).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

PATIENCE = 0.015  # seconds that a computation has for stopping before it is late

_pipe: tuple[int, int] | None = None  # to read from, to write to
_late: Callable[[int], object] | None = None
_computing: object = None  # what is being listened for, another one each time
_local = threading.local()  # `stop`: the Stop that the thread has entered


class Cancelled(BaseException):
    """Raised where a thread computes: another one has asked it to stop."""


class Stop:
    """Lets other threads end what a thread computes while it has entered this."""

    def __init__(self) -> None:
        self._asked = self._entered = False
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._entered = True
            _local.stop = self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered = False
            _local.stop = None
            if self._asked and _pipe is not None:
                _drain(_pipe[0])  # what `ask` wrote would stop others

    def ask(self) -> None:
        """Have the computation raise Cancelled, in the middle of a batch or before the next one."""
        with self._lock:
            self._asked = True
            if self._entered and _pipe is not None:
                with suppress(BlockingIOError):
                    os.write(_pipe[1], b"\0")

    @property
    def asked(self) -> bool:
        return self._asked


def check_stop() -> None:
    """Raise Cancelled if this thread was asked to stop."""
    stop: Stop | None = getattr(_local, "stop", None)
    if stop is not None and stop.asked:
        raise Cancelled


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


def when_late(call: Callable[[int], object]) -> None:
    """From now on have this called, in a thread of its own, with the number of a signal for which a computation in the
    main thread has not stopped within PATIENCE. Only for programs in which every signal with a handler of Python's asks
    for the end."""
    global _late
    begun, _late = _late is not None, call
    if descriptor() >= 0 and not begun:
        threading.Thread(target=_attend, name="late", daemon=True).start()


def _attend() -> None:
    came = select.poll()
    came.register(descriptor(), select.POLLIN)
    while True:
        came.poll()
        computing = _computing
        time.sleep(PATIENCE)
        if computing is not None and computing is _computing:
            for number in _drain(descriptor())[:1]:
                if _late:
                    _late(number)


def end_by(number: int) -> NoReturn:
    """End the process by a signal, in whatever thread: only the main one may change what Python does with signals."""
    ctypes.pythonapi.PyOS_setsig(number, None)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


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
        global _computing
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
            return
        _computing = object()

    def __exit__(self, *_: object) -> None:
        global _computing
        if self._armed and _pipe is not None:
            _computing, self._armed = None, False
            signal.set_wakeup_fd(-1)
            self.silent = not _drain(_pipe[0])


def _drain(end: int) -> bytes:
    """Empty the pipe; return what was in it."""
    found = b""
    with suppress(BlockingIOError):
        while part := os.read(end, 64):
            found += part
    return found

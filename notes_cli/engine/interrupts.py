"""Makes Ctrl-C stop a llama.cpp computation: signals go to a pipe that llama.cpp polls between operations.

Python's own handler only runs when the call returns, after a whole batch, which takes seconds on a laptop. A single
operation, such as attention over a long prompt, can still take long: `when_late` lets a program exit then.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

PATIENCE = 0.015  # seconds that a computation has to stop

_pipe: tuple[int, int] | None = None  # read end, write end
_late: Callable[[int], object] | None = None
_computing: object = None  # token of the running computation, a new object each time
_local = threading.local()  # `stop`: the Stop that the thread has entered


class Cancelled(BaseException):
    """Raised in a computing thread when another thread has asked it to stop."""


class Stop:
    """Lets other threads cancel the computation of the thread that has entered it."""

    def __init__(self) -> None:
        self.asked = self._entered = False
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._entered = True
            _local.stop = self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered = False
            _local.stop = None
            if self.asked and _pipe is not None:
                _drain(_pipe[0])  # the byte from `ask` would stop other computations

    def ask(self) -> None:
        """Cancel the computation, within a batch or before the next one: raises Cancelled there."""
        with self._lock:
            self.asked = True
            if self._entered and _pipe is not None:
                with suppress(BlockingIOError):
                    os.write(_pipe[1], b"\0")


def check_stop() -> None:
    """Raise Cancelled if this thread was asked to stop."""
    stop: Stop | None = getattr(_local, "stop", None)
    if stop is not None and stop.asked:
        raise Cancelled


def descriptor() -> int:
    """Return the descriptor that native/notes_watch.h polls; -1 where the system has none."""
    global _pipe
    if os.name != "posix":
        return -1
    if _pipe is None:
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
    return _pipe[0]


def when_late(call: Callable[[int], object]) -> None:
    """Register a function to call, in its own thread and with the signal number, when a computation in the main thread
    has not stopped within PATIENCE. Only for programs in which every signal with a Python handler ends them."""
    global _late
    started, _late = _late is not None, call
    if descriptor() >= 0 and not started:
        threading.Thread(target=_watch_late, name="late", daemon=True).start()


def _watch_late() -> None:
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
    """End the process by a signal from any thread: only the main one may change Python's signal handlers."""
    ctypes.pythonapi.PyOS_setsig(number, None)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _renew() -> None:
    """Give a forked child its own pipe under the same descriptors, which its contexts poll."""
    if _pipe is None:
        return
    for end, new in zip(_pipe, os.pipe(), strict=True):
        os.dup2(new, end, inheritable=False)
        os.set_blocking(end, False)
        os.close(new)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextmanager
def listening() -> Iterator[list[bytes]]:
    """During the block, a signal with a Python handler stops the computation: in the main thread, and unless asyncio
    uses the wakeup descriptor. The list then gets the bytes of the signals that arrived, b"" if there were none."""
    global _computing
    arrived: list[bytes] = []
    if _pipe is None or threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    _drain(_pipe[0])  # an interrupt may have arrived after the last block
    before = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if before not in (-1, _pipe[1]):
        signal.set_wakeup_fd(before)
        if signals := _drain(_pipe[0]):  # between the two calls
            os.write(before, signals)
        yield arrived
        return
    try:
        _computing = object()
        yield arrived
    finally:
        _computing = None
        signal.set_wakeup_fd(-1)
        arrived.append(_drain(_pipe[0]))


def _drain(end: int) -> bytes:
    """Read the pipe empty and return its bytes."""
    data = b""
    with suppress(BlockingIOError):
        while part := os.read(end, 64):
            data += part
    return data

"""Handle SIGINT, SIGTERM and SIGHUP: raise KeyboardInterrupt until it arrives, and end the process on a second signal.

Python drops exceptions in finalizers, and C code drops those of functions that it calls (`PyObject_HasAttr`), so the
interrupt is raised again until it propagates. A signal before the work has begun ends the process at once. This module
is imported first and imports little: `signal` itself takes 6 ms.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_WORDS = {"SIGTERM": "terminated", "SIGHUP": "the terminal was closed"}
_INTERVAL = 0.02  # seconds until a dropped KeyboardInterrupt is raised again, at most

INTERRUPTED = 130  # exit status after Ctrl-C

received = 0  # first signal received; 0: none
working = False  # True while KeyboardInterrupt is caught
holding = False  # True: the first SIGINT is left in `received`, for a program that goes on
_ending = _thread.RLock()  # held by the thread that ends the process, and never released


def install() -> None:
    """Install handlers, except for signals that the parent process ignores (nohup, background jobs)."""
    for name in _NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _on_signal)
    sys.unraisablehook = _on_unraisable


def end_unread() -> NoReturn:
    """End quietly by SIGPIPE, after EPIPE on stdout."""
    end(getattr(signal, "SIGPIPE", 0), say=False)


def begin() -> None:
    """From now on, raise KeyboardInterrupt, for which the caller cleans up."""
    global working
    working = True


def _on_signal(number: int, _frame: Any) -> None:
    global received
    second, received = bool(received), received or number
    if second or not working:
        end()
    if holding and number == signal.SIGINT:
        return
    if hasattr(signal, "setitimer"):  # else a dropped interrupt is noticed at the end, by `received`
        signal.signal(signal.SIGALRM, _raise_again)
        signal.setitimer(signal.ITIMER_REAL, _INTERVAL, _INTERVAL)
    raise KeyboardInterrupt


def _raise_again(_number: int, _frame: Any) -> None:
    """Raise KeyboardInterrupt unless it propagates already, that is, code runs while handling it."""
    reason = sys.exc_info()[1]
    while reason is not None and not isinstance(reason, KeyboardInterrupt):
        reason = reason.__context__
    if reason is None:
        raise KeyboardInterrupt


def _on_unraisable(unraisable: sys.UnraisableHookArgs, /) -> None:
    """Print unraisable exceptions, except KeyboardInterrupt, which is raised again."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def claim(*, wait: bool = True) -> bool:
    """Let only the calling thread end the process. Other threads wait until it has ended, or get False."""
    return _ending.acquire(blocking=wait)


def ignore() -> None:
    """Ignore all signals from now on."""
    for name in (*_NAMES, "SIGALRM"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def describe() -> str:
    """Return the reason for the end, for an error message."""
    return next((text for name, text in _WORDS.items() if received == getattr(signal, name, -1)), "interrupted")


def status() -> int:
    """Return the exit status: 130 after Ctrl-C, else 128 + the signal's number."""
    return 128 + received if received else INTERRUPTED


def end(number: int = 0, *, say: bool = True) -> NoReturn:
    """End the process now: with status 130 after Ctrl-C, else by signal `number`, by default the one received. `say`:
    print a line on stderr."""
    claim()
    number = number or received
    ignore()
    if say:
        try:  # noqa: SIM105  # importing contextlib takes long, too
            os.write(2, f"notes: {describe()}\n".encode())
        except OSError:  # stderr is closed
            pass
    if number in (0, signal.SIGINT):
        os._exit(INTERRUPTED)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # if the signal did not end the process

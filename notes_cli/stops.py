"""Ctrl-C, and the other signals that ask a program to end: from its first moment on, and never lost.

A signal is raised as KeyboardInterrupt where Python runs. Python drops it where nothing can be raised (in a finalizer),
and C code may drop whatever was raised in a function that it called (`PyObject_HasAttr` does), without a word: so it is
raised again for as long as it is not on its way. A second signal ends the process at once, and so does one that comes
before the work has begun. This is loaded before all else, so it imports next to nothing: `signal` itself takes 6 ms.
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
_AGAIN = 0.02  # seconds until a KeyboardInterrupt that was dropped is raised again, at most

INTERRUPTED = 130  # exit status after Ctrl-C

received = 0  # the signal that asked for the end; 0: none did
working = False  # whether there is somebody who catches KeyboardInterrupt
_ending = _thread.RLock()  # for whoever tells people of the end, and ends the process: it is never released


def install() -> None:
    """Take the signals, but not those that whoever started us has us ignore (nohup, a job in the background)."""
    for name in _NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    sys.unraisablehook = _dropped


def end_unread() -> NoReturn:
    """End as whatever writes into a pipe that nobody reads: quietly, by SIGPIPE."""
    end(getattr(signal, "SIGPIPE", 0), say=False)


def begin() -> None:
    """From here on there is something to be put away when it is interrupted."""
    global working
    working = True


def _stop(number: int, _frame: Any) -> None:
    global received
    again, received = bool(received), received or number
    if again or not working:
        end()
    if hasattr(signal, "setitimer"):  # else `received` tells of a dropped one in the end
        signal.signal(signal.SIGALRM, _again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
    raise KeyboardInterrupt


def _again(_number: int, _frame: Any) -> None:
    """Raise it again, unless it is on its way: then what runs here runs because of it."""
    reason = sys.exc_info()[1]
    while reason is not None and not isinstance(reason, KeyboardInterrupt):
        reason = reason.__context__
    if reason is None:
        raise KeyboardInterrupt


def _dropped(found: sys.UnraisableHookArgs, /) -> None:
    """What Python could not raise. An interrupt comes back; the rest is shown as ever."""
    if not issubclass(found.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(found)


def claim(*, wait: bool = True) -> bool:
    """Be the only thread that tells people of the end. A later one waits, and ends with the process, or is refused."""
    return _ending.acquire(blocking=wait)


def ignore() -> None:
    """From here on nothing is interrupted: all is done, or is being ended."""
    for name in (*_NAMES, "SIGALRM"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def word() -> str:
    """What happened, for people."""
    return next((text for name, text in _WORDS.items() if received == getattr(signal, name, -1)), "interrupted")


def status() -> int:
    """The exit status that a shell sees of the end: 130 after Ctrl-C, else 128 and the number of the signal."""
    return 128 + received if received else INTERRUPTED


def end(number: int = 0, *, say: bool = True) -> NoReturn:
    """End the process now: with 130 after Ctrl-C, else by the signal that was received, or by this one. `say`: tell
    people."""
    claim()
    number = number or received
    ignore()
    if say:
        try:  # noqa: SIM105  # contextlib takes long to load, too
            os.write(2, f"notes: {word()}\n".encode())
        except OSError:  # there is nobody to tell
            pass
    if number in (0, signal.SIGINT):
        os._exit(INTERRUPTED)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # where a signal does not end a process

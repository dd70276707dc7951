"""Holds llama.cpp's process-wide state: its log, its crash message, and exceptions raised in callbacks from C."""

from __future__ import annotations

import ctypes
import os
import sys
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from notes_cli.engine import native
from notes_cli.engine.native import llama

KEPT = 50  # collected lines of the log at most, the latest
_CRASHED = ". The file is damaged, or llama.cpp has a bug: compare its SHA-256 with the one it was published with"


class Interrupts:
    """Keeps exceptions that a signal handler raises in a function called from C, where nothing can be raised."""

    def __init__(self) -> None:
        self.kept: tuple[int, BaseException] | None = None  # (thread, exception)

    def keep(self, error: BaseException) -> None:
        self.kept = get_ident(), error

    def raise_kept(self) -> None:
        """Raise the exception kept for this thread, if any."""
        if self.kept and self.kept[0] == get_ident():
            error, self.kept = self.kept[1], None
            raise error

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Also keep an exception raised before the first line of `_on_log`, which Python would print and drop. An
        aborted computation is logged, so that the signal's handler runs there."""
        before = sys.unraisablehook

        def hook(args: sys.UnraisableHookArgs) -> None:
            if args.object is _on_log and args.exc_value is not None:
                self.keep(args.exc_value)
            else:
                before(args)

        sys.unraisablehook = hook
        try:
            yield
        finally:
            sys.unraisablehook = before


class Log:
    """llama.cpp's log, dropped unless `set_output` or `collected` takes it."""

    def __init__(self) -> None:
        self._shown: Callable[[str], object] | None = None
        self._collecting: list[tuple[int, deque[str]]] = []  # (thread, lines)

    def set_output(self, write: Callable[[str], object] | None) -> None:
        """Pass all output to `write` as it arrives, in parts of lines; None drops it."""
        self._shown = write

    @contextmanager
    def collected(self) -> Iterator[deque[str]]:
        """Collect the last lines logged in this thread during the block, for an error message."""
        entry: tuple[int, deque[str]] = (get_ident(), deque(maxlen=KEPT))
        self._collecting.append(entry)
        try:
            yield entry[1]
        finally:
            self._collecting = [item for item in self._collecting if item is not entry]

    def add(self, part: str) -> None:
        """Handle a part of a line."""
        if self._shown:
            self._shown(part)
        if part.strip(" .\n"):
            for thread, lines in self._collecting:
                if thread == get_ident():
                    lines.append(part.rstrip())


interrupts, log = Interrupts(), Log()
_working: list[str] = []  # latest last


def guard(work: str) -> None:
    """Until `unguard`, end the process with one line about this work and status 1 when llama.cpp crashes: a damaged
    model makes it run into assertions and bad memory. Existing signal handlers are kept; off with NOTES_DEBUG."""
    _working.append(work)
    _set_guard()


def unguard(work: str) -> None:
    """End the guard of this work, if there is one."""
    if work in _working:
        _working.remove(work)
        _set_guard()


def _set_guard() -> None:
    """Hand the beginning and the end of the line to the native library; None leaves crashes to the system."""
    if not _working or os.environ.get("NOTES_DEBUG"):
        native.call("notes_guard", None, None)
    else:
        line = f"notes: {_working[-1]}: llama.cpp failed on this model"
        native.call("notes_guard", line.encode(errors="replace"), _CRASHED.encode())


def _on_log(_level: int, text: bytes, _data: object) -> None:
    try:
        log.add(text.decode(errors="replace"))
    except BaseException as error:
        interrupts.keep(error)


log_callback = llama.llama_log_callback(_on_log)  # must live as long as the library
llama.llama_log_set(log_callback, ctypes.c_void_p(0))


def loading(on_progress: Callable[[float], object] | None) -> Any:
    """Make llama.cpp's progress callback for loading: `on_progress` is called with the loaded fraction, 0 to 1. An
    interrupt ends the load."""

    @llama.llama_progress_callback  # type: ignore[untyped-decorator]
    def step(part: float, _data: object) -> bool:
        try:
            if on_progress:
                on_progress(part)
        except KeyboardInterrupt as error:
            interrupts.keep(error)
        return interrupts.kept is None

    return step

"""What llama.cpp has one of in a process: its log, its crash handler, and interrupts that came while it called Python.

Nothing here is about one model or context: these take from it what they need while they need it.
"""

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

KEPT = 50  # lines of the log that are collected at most, the latest
_CRASHED = ". The file is damaged, or llama.cpp has a bug: compare its SHA-256 with the one it was published with"


class Interrupts:
    """What a signal's handler raises in a function that C called: a KeyboardInterrupt, or what others have it raise.
    Nothing can be raised there."""

    def __init__(self) -> None:
        self._kept: tuple[int, BaseException] | None = None  # by thread

    @property
    def came(self) -> bool:
        return self._kept is not None

    def keep(self, error: BaseException) -> None:
        self._kept = get_ident(), error

    def raise_kept(self) -> None:
        """Raise what came in this thread, if something did."""
        if self._kept and self._kept[0] == get_ident():
            error, self._kept = self._kept[1], None
            raise error

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Keep what is raised before the first line of `_hear`, which Python would print and forget, while the block
        runs. A computation that a signal stops is logged, and so its handler runs there."""
        before = sys.unraisablehook

        def hook(found: sys.UnraisableHookArgs) -> None:
            if found.object is _on_log and found.exc_value is not None:
                self.keep(found.exc_value)
            else:
                before(found)

        sys.unraisablehook = hook
        try:
            yield
        finally:
            sys.unraisablehook = before


class Log:
    """llama.cpp's log. Its lines are passed on only where that was asked for."""

    def __init__(self) -> None:
        self._shown: Callable[[str], object] | None = None
        self._collecting: list[tuple[int, deque[str]]] = []  # by thread

    def set_output(self, write: Callable[[str], object] | None) -> None:
        """Hand all of it to `write` as it comes, in parts of lines; None: drop it."""
        self._shown = write

    @contextmanager
    def collected(self) -> Iterator[deque[str]]:
        """The last lines that llama.cpp logs in this thread while the block runs, for the message of an error."""
        one: tuple[int, deque[str]] = (get_ident(), deque(maxlen=KEPT))
        self._collecting.append(one)
        try:
            yield one[1]
        finally:
            self._collecting = [other for other in self._collecting if other is not one]

    def add(self, part: str) -> None:
        """What llama.cpp says now."""
        if self._shown:
            self._shown(part)
        if part.strip(" .\n"):
            for thread, lines in self._collecting:
                if thread == get_ident():
                    lines.append(part.rstrip())


class Guard:
    """What a crash of llama.cpp ends the process with: one line about what it worked on last, and status 1. A damaged
    model makes it run into assertions and bad memory, from which nothing can go on. Whoever handles such signals keeps
    them, and with NOTES_DEBUG nothing is changed."""

    def __init__(self) -> None:
        self._working: list[str] = []  # the latest last

    def add(self, what: str) -> None:
        """From now on `what` is worked on."""
        self._working.append(what)
        self._set()

    def remove(self, what: str) -> None:
        """`what` is no longer worked on."""
        if what in self._working:
            self._working.remove(what)
            self._set()

    def _set(self) -> None:
        if not self._working or os.environ.get("NOTES_DEBUG"):
            native.set_guard(None, None)
        else:
            native.set_guard(f"notes: {self._working[-1]}: llama.cpp failed on this model", _CRASHED)


interrupts, log, guard = Interrupts(), Log(), Guard()


def _on_log(_level: int, text: bytes, _data: object) -> None:
    try:
        log.add(text.decode(errors="replace"))
    except BaseException as error:
        interrupts.keep(error)


log_callback = llama.llama_log_callback(_on_log)  # must live as long as the library
llama.llama_log_set(log_callback, ctypes.c_void_p(0))


def loading(told: Callable[[float], object] | None) -> Any:
    """What llama.cpp calls while it loads a model: `told` gets the part that is there, 0 to 1. An interrupt ends the
    load."""

    @llama.llama_progress_callback  # type: ignore[untyped-decorator]
    def step(part: float, _data: object) -> bool:
        try:
            if told:
                told(part)
        except KeyboardInterrupt as error:
            interrupts.keep(error)
        return not interrupts.came

    return step

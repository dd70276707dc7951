"""A request on its way through the scheduler, and what is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from notes_cli.engine.loop import Running
from notes_cli.engine.pieces import Piece
from notes_cli.errors import NotesError
from notes_cli.runtime.asking import Counts, Request
from notes_cli.serve.answering import TextDelta, Written
from notes_cli.serve.arranging import Arranged
from notes_cli.serve.parsing import Asked
from notes_cli.serve.room import Grant
from notes_cli.sessions.folder import SessionFolder

if TYPE_CHECKING:
    from notes_cli.serve.own import Own

CHUNK = 256  # tokens of prompts that are read at a step


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at a time."""

    parallel: int = 16  # sequences that answer or read at once
    queue: int = 128  # requests that wait
    tokens: int | None = None  # of an answer; None: until the context ends
    chunk: int = CHUNK

    @property
    def requests(self) -> int:
        """Those that are answered and those that wait, at most; each prompt is one."""
        return self.parallel + self.queue


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt was read: its tokens, how many of them were there already, and its pieces."""

    tokens: int
    cached: int
    counts: Counts
    pieces: tuple[Piece, ...]
    seconds: float  # since the request came
    notices: tuple[str, ...] = ()
    saved: float | None = None  # seconds of prefill (runtime/assembling.py)


@dataclass(frozen=True, slots=True)
class Turn:
    """The next turn of a session that is open and locked: it waits for room, or is being answered."""

    stored: SessionFolder
    request: Request
    room: int  # tokens to write that there is room for when it begins
    cells: int  # that it takes with these at most; the context has as many


Told = Begun | TextDelta | Written | NotesError | None  # None: all is said


@dataclass(slots=True, eq=False)
class Job:
    """A request that is waiting or being answered. `tell` is called in the scheduler's thread, and must not block."""

    asked: Asked
    tell: Callable[[Told], object]
    came: float = field(default_factory=time.perf_counter)
    gone: bool = False  # nobody wants the answer any more
    arranged: Arranged | None = None
    running: Running[None] | None = None
    grants: list[Grant] = field(default_factory=list)
    own: Own | None = None  # of `notes ask`, instead of `asked`
    turn: Turn | None = None  # of a session, once that is open
    held: ExitStack = field(default_factory=ExitStack)  # what it gives up when it is over: its session
    stepped: Callable[[], object] = lambda: None  # a step was made

    @property
    def sequences(self) -> int:
        return self.asked.writing.choices

    def leave(self) -> None:
        """The client has gone: the answer ends at the next step."""
        self.gone = True

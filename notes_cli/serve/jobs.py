"""Jobs: the state of one request in the scheduler, and the events that it emits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from notes_cli.engine.loop import RunningTask
from notes_cli.engine.pieces import Piece
from notes_cli.errors import NotesError
from notes_cli.runtime.request import Counts
from notes_cli.serve.answering import TextDelta, Written
from notes_cli.serve.kv_budget import Reservation
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.questions import Prepared

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
    saved: float | None = None  # seconds of prefill (runtime/assemble.py)


JobEvent = Begun | TextDelta | Written | NotesError | None  # None: all is said


@dataclass(slots=True, eq=False)
class Job:
    """A request that is prepared, waits or is answered. `on_event` is called in threads of the scheduler, and must not
    block."""

    request: ChatRequest
    on_event: Callable[[JobEvent], object]
    came: float = field(default_factory=time.perf_counter)
    gone: bool = False  # nobody wants the answer any more
    prepared: Prepared | None = None  # None: not yet
    running: RunningTask[None] | None = None
    reservations: list[Reservation] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)  # what it gives up when it is over: its session
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def sequences(self) -> int:
        return self.request.params.choices

    def leave(self) -> None:
        """The client has gone: the answer ends at the next step."""
        self.gone = True

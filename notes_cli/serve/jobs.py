"""Holds the state of one request in the scheduler, and the events that it emits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from notes_cli.engine.pieces import Piece
from notes_cli.errors import NotesError
from notes_cli.runtime.request import Counts
from notes_cli.runtime.scheduler import Job
from notes_cli.serve.generation import AnswerDone, TextDelta
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.questions import Prepared

CHUNK = 256  # prompt tokens that are prefilled per step


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the scheduler."""

    parallel: int = 16  # sequences in prefill or decode
    queue: int = 128  # waiting requests
    tokens: int | None = None  # of an answer; None: until the context is full
    chunk: int = CHUNK
    cache_ram: int | None = None  # bytes for evicted prefixes; None: a share of the free memory

    @property
    def requests(self) -> int:
        """Most requests that run or wait, each with one prompt."""
        return self.parallel + self.queue


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The end of a prefill: token counts and pieces of the prompt."""

    tokens: int
    cached: int
    counts: Counts
    pieces: tuple[Piece, ...]
    seconds: float  # since the request arrived
    notices: tuple[str, ...] = ()
    saved: float | None = None  # seconds of prefill (runtime/assemble.py)


JobEvent = PrefillDone | TextDelta | AnswerDone | NotesError | None  # None: the request is answered


@dataclass(slots=True, eq=False)
class ServerJob:
    """A request of a client. `on_event` is called in the server's threads and must not block."""

    request: ChatRequest
    on_event: Callable[[JobEvent], object]
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    prepared: Prepared | None = None
    work: Job[None] | None = None  # in the scheduler, once it is prepared
    resources: ExitStack = field(default_factory=ExitStack)  # closed when the job finishes: its session
    finished: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Have generation end at the next step."""
        self.cancelled = True
        if self.work is not None:
            self.work.cancelled = True

"""The scheduler: one thread that has the context, and what it does next.

Each step decodes a token of every sequence that answers and a chunk of those that read; between steps skills are
spliced, requests taken in and given up, and whatever else needs the context is done. Nobody else touches the context:
requests are put into a queue, and what comes of them is told to whoever asked.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

from notes_cli import output
from notes_cli.engine.loop import Loop, Running, Task
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.pieces import Piece
from notes_cli.errors import EngineError, NotesError
from notes_cli.runtime.asking import Counts
from notes_cli.runtime.assembling import assembling
from notes_cli.runtime.prefixes import Kept, Layout, Prefixes
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.answering import Words, Written, writing
from notes_cli.serve.laying import Laid, lay
from notes_cli.serve.parsing import DRAWN, Asked
from notes_cli.serve.refusals import Refused, ServerError
from notes_cli.serve.room import GRANT, Grant, Room
from notes_cli.serve.shelf import Shelf

T = TypeVar("T")

CHUNK = 256  # tokens of prompts that are read at a step
SOON = 16  # tokens of a prompt that others are reading, and that are worth waiting for
IDLE = 32  # notebooks that are kept beside those that are being answered


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at a time."""

    parallel: int = 16  # sequences that answer or read at once
    queue: int = 128  # requests that wait
    tokens: int = 2048  # of an answer
    chunk: int = CHUNK


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt was read: its tokens, how many of them were there already, and its pieces."""

    tokens: int
    cached: int
    counts: Counts
    pieces: tuple[Piece, ...]
    seconds: float  # since the request came
    notices: tuple[str, ...] = ()


Told = Begun | Words | Written | NotesError | None  # None: all is said


@dataclass(slots=True, eq=False)
class Job:
    """A request that is waiting or being answered. `tell` is called in the scheduler's thread, and must not block."""

    asked: Asked
    tell: Callable[[Told], object]
    came: float = field(default_factory=time.perf_counter)
    gone: bool = False  # nobody wants the answer any more
    laid: Laid | None = None
    running: Running[None] | None = None
    grants: list[Grant] = field(default_factory=list)

    @property
    def sequences(self) -> int:
        return self.asked.writing.choices

    def leave(self) -> None:
        """The client has gone: the answer ends at the next step."""
        self.gone = True


class Scheduler:
    """Start it, and close it; every method may be called from any thread."""

    def __init__(
        self,
        workspace: Callable[[], contextlib.AbstractContextManager[Workspace]],
        limits: Limits | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """`workspace` is opened in the thread that uses it. `names`: what clients may call its model, too."""
        self.limits = limits or Limits()
        self.ready: Future[Workspace] = Future()  # raises what went wrong where the model cannot be opened
        self.names = tuple(names)
        self.started = int(time.time())
        self.decoded = self.spliced = self.reused = self.steps = 0
        self._open = workspace
        self._arrivals: queue.SimpleQueue[Job | Callable[[], object] | None] = queue.SimpleQueue()
        self._count = 0  # jobs that have come and not ended
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._loop: Loop[None] = Loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="scheduler")

    # For everybody.

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End what is being answered, and give the model back."""
        self._arrivals.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def load(self) -> int:
        """Requests that wait or are being answered."""
        return self._count

    def submit(self, asked: Asked, tell: Callable[[Told], object]) -> Job:
        """Have a request answered. Raise Refused where too many wait already."""
        with self._lock:
            if self._count >= self.limits.parallel + self.limits.queue:
                raise Refused(429, "too many requests are waiting: try again later", code="queue_full", wait=1)
            self._count += 1
        job = Job(asked, tell)
        self._arrivals.put(job)
        return job

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called between two steps, where the context may be used."""
        future: Future[T] = Future()

        def called() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._arrivals.put(called)
        return future

    # In the thread.

    def _run(self) -> None:
        try:
            with self._open() as self.workspace:
                self._begin()
                self.ready.set_result(self.workspace)
                while not self._closing:
                    self._turn()
                self._end()
        except BaseException as error:
            if self.ready.done():
                output.say(f"the scheduler failed: {traceback.format_exc()}")
            else:
                self.ready.set_exception(error)

    def _begin(self) -> None:
        workspace = self.workspace
        self.names = names_of(workspace, self.names)
        self.prefixes = Prefixes()
        self.shelf = Shelf(workspace)
        self.room = Room(workspace, self.prefixes)
        beside = 2 if workspace.model.recurrent else IDLE  # each state takes memory
        with contextlib.suppress(EngineError):  # fewer at a time, then
            workspace.make_way(0, self.limits.parallel + beside)

    def _end(self) -> None:
        for job in [*self._waiting, *self._jobs]:
            job.tell(Refused(503, "the server ends", code="shutting_down"))
        self._loop.close()
        self.prefixes.close()

    def _turn(self) -> None:
        """Take in what has come, and go a step."""
        self._arrive()
        self._drop()
        self._admit()
        if self._loop.running:
            self._step()

    def _arrive(self) -> None:
        """What has come, if need be what comes next."""
        idle = not self._loop.running and not self._waiting
        while idle or not self._arrivals.empty():
            one = self._arrivals.get()
            idle = False
            if one is None:
                self._closing = True
            elif isinstance(one, Job):
                self._waiting.append(one)
            else:
                one()

    def _drop(self) -> None:
        """Give up what nobody waits for any more."""
        for job in [job for job in self._jobs if job.gone]:
            if job.running is not None:
                self._loop.drop(job.running)
            self._forget(job)
        for job in [job for job in self._waiting if job.gone]:
            self._waiting.remove(job)
            self._over(job)

    def _admit(self) -> None:
        """Begin with those for whom there is room, in the order in which they came. One that waits for what another is
        reading does not stop those after it; one that waits for room does."""
        for job in list(self._waiting):
            if self._busy + job.sequences > self.limits.parallel and self._jobs:
                return
            try:
                begun = self._begun(job)
            except Exception as error:
                self._waiting.remove(job)
                self._fail(job, error)
                continue
            if begun is None:
                return
            if begun:
                self._waiting.remove(job)

    @property
    def _busy(self) -> int:
        return sum(job.sequences for job in self._jobs)

    def _begun(self, job: Job) -> bool | None:
        """Begin, if there is room (else None), and nothing of it is about to be there (else False)."""
        if job.laid is None:
            job.laid = lay(self.workspace, self.shelf, self.prefixes, job.asked, self.names, self.limits.tokens)
        laid, layout, salt = job.laid, job.laid.layout, job.asked.notes.cache_salt
        kept, length, coming = self.prefixes.find(layout, salt)
        if coming > length + SOON:
            return False
        first = min(laid.room, GRANT)
        cells = len(layout) - length + job.sequences * first
        least = len(layout) + 1
        if not self.room.could(least):
            raise Refused(
                400,
                f"the context is too small: {least:,} tokens do not fit {self.room.cells:,}",
                param="messages",
                code="context_length_exceeded",
            )
        was, idle = kept, bool(kept and kept.idle)
        if kept is not None:
            kept.idle = False  # not to be given up for this
        made = self.room.make(cells, job.sequences)
        if not made and not self._jobs:  # alone: as much of it as there can be
            first = max(1, self.room.cells - self.workspace.context.used - len(layout) + length)
            made = first >= 1
        if was is not None:
            was.idle = idle
        if not made:
            return None
        notebook = self.prefixes.begin(kept, length) if kept and length else self.workspace.notebook()
        notebook.bound = min(len(layout) + laid.room, self.workspace.context.n_ctx)
        held = self.prefixes.add(notebook, layout, salt)
        job.grants = [self.room.grant(notebook, len(layout) + first, (job.sequences - 1) * first)]
        self._jobs.append(job)
        job.running = self._loop.begin(self._answer(job, laid, held, length, first))
        return True

    def _answer(self, job: Job, laid: Laid, held: Kept, live: int, first: int) -> Task[None]:
        """Read the prompt, write the answers, and leave the first one's notebook to others."""
        layout, notebook = laid.layout, held.notebook
        books: list[Notebook] = []
        try:
            yield from self._reading(layout, notebook)
            yield [notebook]
            counts = replace(Counts.of(notebook), shared=live)
            cached = live + sum(piece.tokens for piece in notebook.pieces if piece.how == "spliced")
            self.decoded += len(layout) - cached
            self.spliced += cached - live
            self.reused += live
            job.tell(Begun(len(layout), cached, counts, tuple(notebook.pieces), time.perf_counter() - job.came))
            books = [notebook.share() for _ in range(job.sequences - 1)]
            job.grants[0].more = 0
            for book in books:
                book.bound = notebook.bound
                job.grants.append(self.room.grant(book, len(layout) + first))
            seed = laid.asked.writing.sampling.seed
            seed = time.time_ns() & 0xFFFFFFFF if seed == DRAWN else seed
            for written in (yield from writing(self.workspace, laid, [notebook, *books], seed, job.tell)):
                job.tell(written)
        except NotesError:
            raise
        except Exception as error:
            output.say(traceback.format_exc())
            raise ServerError(f"a fault of the server: {type(error).__name__}") from error
        finally:
            for book in books:
                book.close()
            self._leave(held)

    def _reading(self, layout: Layout, notebook: Notebook) -> Task[None]:
        if layout.prompt.conversation is None:
            notebook.append(layout.tokens[len(notebook) :])
            return
        yield from assembling(
            *(self.workspace, layout.prompt, layout.parts),
            seam=layout.seam,
            splice=layout.splice,
            begun=notebook,
        )

    def _leave(self, held: Kept) -> None:
        """A notebook that nobody works on any more: others may go on from it, if it is sound."""
        try:
            self.prefixes.rest(held)
        except NotesError:
            self.prefixes.drop(held)
        while sum(1 for _ in self.prefixes.resting()) > IDLE:
            self.prefixes.evict()

    def _step(self) -> None:
        self.steps += 1
        held = self.room.held()
        answering = sum(len(running.looks) for running in self._loop.running)
        self._loop.step(self.limits.chunk + answering, held)
        for running in self._loop.ended():
            job = next(job for job in self._jobs if job.running is running)
            if isinstance(running.outcome, NotesError):
                self._fail(job, running.outcome)
            else:
                job.tell(None)
                self._forget(job)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, NotesError):
            output.say("".join(traceback.format_exception(error)))
            error = ServerError(f"a fault of the server: {type(error).__name__}")
        job.tell(error)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        self.room.end(job.grants)
        self._over(job)

    def _over(self, job: Job) -> None:
        with self._lock:
            self._count -= 1


@contextlib.contextmanager
def running(scheduler: Scheduler) -> Iterator[Scheduler]:
    """A scheduler that is started, and closed afterwards."""
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()


def names_of(workspace: Workspace, given: Sequence[str]) -> tuple[str, ...]:
    """What clients may call the model: what its user does, its own name, its file's."""
    model = workspace.model
    return tuple(dict.fromkeys(one for one in (*given, model.path.stem, model.name, model.path.name) if one))

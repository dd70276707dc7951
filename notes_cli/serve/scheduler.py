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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from notes_cli import output
from notes_cli.engine.loop import Loop, Task
from notes_cli.engine.notebook import Notebook
from notes_cli.errors import EngineError, NotesError
from notes_cli.library.standing import StandingErrata
from notes_cli.library.store import Library
from notes_cli.runtime.prefixes import Prefixes
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.arranging import Desk, arrange, check_bias, turn_of
from notes_cli.serve.conversations import Conversations
from notes_cli.serve.jobs import Job, Limits, Told, Turn
from notes_cli.serve.own import Own
from notes_cli.serve.parsing import Asked
from notes_cli.serve.refusals import Refused, too_long
from notes_cli.serve.room import GRANT, TURN, Room, turn_of_session
from notes_cli.serve.shelf import Shelf
from notes_cli.serve.tally import Tally
from notes_cli.serve.turns import IDLE, Turns, fault
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session

T = TypeVar("T")

LONG = 8  # compiles that wait at most
SOON = 16  # tokens of a prompt that others are reading, and that are worth waiting for


@dataclass(frozen=True, slots=True)
class _Work:
    """What takes long."""

    function: Callable[[], object]


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
        self.over: Future[None] = Future()  # raises what it failed by
        self.names = tuple(names)
        self.started = int(time.time())
        self.tally = Tally()
        self.longest: int | None = None  # tokens that a prompt and its answer may ever have; None: any number
        self._open = workspace
        self._arrivals: queue.SimpleQueue[Job | _Work | Callable[[], object] | None] = queue.SimpleQueue()
        self._works: deque[_Work] = deque()
        self._long = 0  # works that have come and not ended
        self._count = 0  # jobs that have come and not ended
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._loop: Loop[None] = Loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # For everybody.

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End what is being answered, and give the model back. One that is being loaded is not waited for."""
        self._arrivals.put(None)
        if self._thread.ident is not None and not self.loading:
            self._thread.join()

    @property
    def loading(self) -> bool:
        """Whether the model is not there yet."""
        return self._thread.is_alive() and not self.ready.done()

    @property
    def ended(self) -> bool:
        """Whether nobody is answered any more."""
        return self.over.done() or (self.ready.done() and self.ready.exception() is not None)

    @property
    def load(self) -> int:
        """Requests that wait or are being answered."""
        return self._count

    def submit(self, asked: Asked, tell: Callable[[Told], object], own: Own | None = None) -> Job:
        """Have a request answered, or `own` instead. Raise Refused where too many wait already."""
        if self.ended:
            raise Refused(503, "the server has failed", code="failed")
        with self._lock:
            if self._count >= self.limits.requests:
                self.tally.outcomes["refused"] += 1
                raise Refused(429, "too many requests are waiting: try again later", code="queue_full", wait=1)
            self._count += 1
        job = Job(asked, tell, own=own)
        self._arrivals.put(job)
        if self.ended:
            self._turn_away()
        return job

    def call(self, function: Callable[[], T], *, long: bool = False) -> Future[T]:
        """Have a function called between two steps, where the context may be used. `long`: it takes its time, and
        calls `between` now and then; one of these is done at a time. Raise Refused where too many of them wait."""
        future: Future[T] = Future()
        if long:
            with self._lock:
                if self._long == LONG:
                    raise Refused(429, "too many compiles are waiting", code="queue_full", wait=5)
                self._long += 1
            future.add_done_callback(self._long_ended)

        def called() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    if self.ended:
                        raise Refused(503, "the server has ended", code="shutting_down")
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._arrivals.put(_Work(called) if long else called)
        if self.ended:
            self._turn_away()
        return future

    def _long_ended(self, _: Future[T]) -> None:
        with self._lock:
            self._long -= 1

    # In the thread.

    def gauges(self) -> dict[str, float]:
        """How full everything is."""
        context = self.workspace.context
        resting = sum(1 for _ in self.prefixes.resting())
        return {
            "requests_running": len(self._jobs),
            "requests_waiting": len(self._waiting),
            "cells": context.cells,
            "cells_used": context.used,
            "cells_promised": self.room.promised,
            "sequences_free": context.free,
            "prefixes_idle": resting,
        }

    def _run(self) -> None:
        try:
            with self._open() as self.workspace:
                self._begin()
                self.ready.set_result(self.workspace)
                try:
                    while not self._closing:
                        self._turn()
                finally:
                    self._end()
            self.over.set_result(None)
        except BaseException as error:
            (self.over if self.ready.done() else self.ready).set_exception(error)
        self._turn_away()

    def _turn_away(self) -> None:
        """Whoever came when all was over, in any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                one = self._arrivals.get_nowait()
                if isinstance(one, Job):
                    one.tell(Refused(503, "the server has ended", code="shutting_down"))
                elif one is not None:
                    (one.function if isinstance(one, _Work) else one)()

    def _begin(self) -> None:
        workspace = self.workspace
        self.names = names_of(workspace, self.names)
        self.prefixes = Prefixes()
        self.shelf = Shelf(workspace)
        errata = StandingErrata(workspace.library.folder) if isinstance(workspace.library, Library) else None
        self.desk = Desk(
            *(workspace, self.shelf, self.prefixes, Conversations(), errata, self.names, self.limits.tokens)
        )
        self.room = Room(workspace, self.prefixes)
        self.turns = Turns(self.desk, self.room, self.tally)
        beside = 2 if workspace.model.recurrent else IDLE  # each state takes memory
        with contextlib.suppress(EngineError):  # fewer at a time, then
            workspace.make_way(0, self.limits.parallel + beside)
        given = None if workspace.grows else workspace.context.cells
        self.longest = min((one for one in (workspace.longest, given) if one is not None), default=None)

    def _end(self) -> None:
        self._closing = True
        self._arrive(wait=False)
        for job in [*self._waiting, *self._jobs]:
            if job.running is None:
                job.held.close()
            job.tell(Refused(503, "the server ends", code="shutting_down"))
        for work in self._works:
            work.function()
        self._loop.close()
        self.prefixes.close()

    def _turn(self) -> None:
        """Take in what has come, and go a step."""
        self._arrive(wait=not (self._loop.running or self._waiting or self._works))
        self._go_on()
        if self._works and not self._closing:
            self._works.popleft().function()

    def between(self) -> None:
        """For what takes long: others go on for a step. Raise Refused where the server ends."""
        self._arrive(wait=False)
        if self._closing:
            raise Refused(503, "the server ends", code="shutting_down")
        self._go_on()

    def rest(self) -> None:
        """For what waits for others than us: a moment, if nobody is answered meanwhile."""
        if not self._loop.running:
            time.sleep(0.02)

    def _go_on(self) -> None:
        self._drop()
        self._admit()
        if self._loop.running:
            self._step()

    def _arrive(self, *, wait: bool) -> None:
        """What has come; `wait`: what comes next. What comes meanwhile is for after the next step: who asks again and
        again must not keep others from theirs."""
        for _ in range(max(self._arrivals.qsize(), int(wait))):
            one = self._arrivals.get()
            if one is None:
                self._closing = True
            elif isinstance(one, Job):
                self._waiting.append(one)
            elif isinstance(one, _Work):
                self._works.append(one)
            else:
                one()

    def _drop(self) -> None:
        """Give up what nobody waits for any more."""
        for job in [job for job in self._jobs if job.gone]:
            if job.running is not None:
                try:
                    self._loop.drop(job.running)
                except Exception as error:  # of its end: nobody else is to suffer from it
                    output.say(f"a request that was given up: {type(error).__name__}: {error}")
            self._forget(job, "gone")
        for job in [job for job in self._waiting if job.gone]:
            self._waiting.remove(job)
            self._over(job, "gone")

    def _admit(self) -> None:
        """Begin with those for whom there is room, in the order in which they came. One that waits for what another is
        reading does not stop those after it; one that waits for room does."""
        for job in sorted(self._jobs, key=lambda job: job.came):
            if any(grant.aside for grant in job.grants) and not self.room.resume(job.grants):
                if any(not any(grant.aside for grant in other.grants) for other in self._jobs):
                    return  # until those that go on have ended
                if self.room.resume(job.grants, 1):
                    continue
                assert job.running is not None
                job.running.fail(Refused(503, "there is no room for the rest of this answer", code="no_room", wait=1))
                self._ended()
        for job in list(self._waiting):
            if self._busy + job.sequences > self.limits.parallel and self._jobs:
                return
            try:
                begun = self._begun(job)
            except Exception as error:
                self._waiting.remove(job)
                self._fail(job, error)
                continue
            if begun is None and self._jobs:
                return
            if begun is None:
                self._waiting.remove(job)
                self._fail(job, Refused(503, "there is no room for this request", code="no_room", wait=1))
            elif begun:
                self._waiting.remove(job)

    @property
    def _busy(self) -> int:
        return sum(job.sequences for job in self._jobs)

    def _begun(self, job: Job) -> bool | None:
        """Begin, if there is room (else None), and nothing of it is about to be there (else False)."""
        if job.own is not None:
            task = job.own.begin(self.desk, self.room, self.tally, job)
            return None if task is None else self._answer(job, task)
        if job.asked.notes.session is not None:
            return self._go_on_with_session(job, job.asked.notes.session)
        if job.arranged is None:
            job.arranged = arrange(self.desk, job.asked)
        arranged, layout, salt = job.arranged, job.arranged.layout, job.asked.notes.cache_salt
        least = len(layout) + 1
        if not self.room.could(least):
            raise too_long(self.room.cells, f"needs {least} tokens")
        if not self.room.make(0, job.sequences):
            return None
        kept, length, coming = self.prefixes.find(layout, salt)  # after room was made: that takes idle ones away
        if coming > length + SOON:
            return False
        notebook = self.prefixes.begin(kept, length, layout) if kept and length else self.workspace.notebook()
        first = self._room_for(job, len(layout) - len(notebook), min(arranged.room, GRANT))
        if first is None:
            self.prefixes.undo(kept, notebook)
            return None
        needed = min(1 + (arranged.kept if arranged.think else 0), arranged.room)
        if first < needed:
            notebook.close()
            tokens = len(layout) + needed * job.sequences
            raise too_long(self.room.cells, f"needs {tokens} tokens")
        notebook.bound = self._bounded(len(layout) + arranged.room)
        held = self.prefixes.add(notebook, layout, salt)
        others, spare = job.sequences - 1, max(0, min(arranged.kept, first - 1))
        job.grants = [self.room.grant(notebook, len(layout) + first, others * first, others, spare)]
        return self._answer(job, self.turns.answer(job, arranged, held, length, first))

    def _bounded(self, tokens: int) -> int:
        """So many tokens, or as many as one sequence may ever have, if these are fewer."""
        return tokens if self.longest is None else min(tokens, self.longest)

    def _answer(self, job: Job, task: Task[None]) -> bool:
        """Begin to answer."""
        self._jobs.append(job)
        self.tally.queued.add(time.perf_counter() - job.came)
        job.running = self._loop.begin(task)
        return True

    def _room_for(self, job: Job, prompt: int, first: int) -> int | None:
        """Room for so many tokens of a prompt, and `first` of each answer, fewer where it is alone. None: not now."""
        if self.room.make(prompt + job.sequences * first):
            return first
        if self._jobs:
            return None
        return (self.room.cells - self.workspace.context.used - prompt) // job.sequences

    def _go_on_with_session(self, job: Job, name: str) -> bool | None:
        """A turn of a session on disk, if there is room for it (else None)."""
        turn = job.turn = job.turn or self._turn_of(job, name)
        if not self.room.make(turn.cells, 1):
            return None
        session = job.held.enter_context(Session(self.workspace, turn.stored))
        return self._answer(job, self.turns.session(job, session, turn))

    def _turn_of(self, job: Job, name: str) -> Turn:
        """Open a session, once, and hold it until the job is over. Raise NotesError for what cannot be its turn."""
        stored = job.held.enter_context(Sessions(self.workspace.paths.sessions).locked(name, new=True))
        request = turn_of(self.shelf, job.asked, self.names, self.limits.tokens, begun=bool(stored.state.live))
        check_bias(self.workspace, job.asked)
        told, spare = turn_of_session(self.workspace, stored.state, request)
        if not self.room.could(told + 1):
            raise too_long(self.room.cells, f"needs {told + 1} tokens")
        room = spare - request.room + min(request.room, TURN)
        return Turn(stored, request, room, self._bounded(told + room))

    def _step(self) -> None:
        self.tally.steps += 1
        held = self._held()
        looks = [look for running in self._loop.running for look in running.looks]
        # One that reads alone is decoded in the batches of `notes ask`.
        alone = len(looks) == 1
        self._loop.step(self.workspace.context.n_ubatch if alone else self.limits.chunk + len(looks), held)
        for job in self._jobs:
            job.stepped()
        self._ended()

    def _ended(self) -> None:
        for running in self._loop.ended():
            job = next(job for job in self._jobs if job.running is running)
            if isinstance(running.outcome, NotesError):
                self._fail(job, running.outcome)
            else:
                self._forget(job, "answered")
                job.tell(None)

    def _held(self) -> list[Notebook]:
        """Notebooks that wait at this step, as there is no room for another token of theirs. If all do, the request
        that came last makes room for those before it: it is read again when they are done. Where none can, the one
        that came first goes on with what is left, each of its answers with its part; with nothing left they end."""
        while True:
            held = self.room.held()
            waiting = [look.notebook for one in self._loop.running for look in one.looks if look.pending]
            if not held or any(book not in held for book in waiting):
                return held
            going = [job for job in self._jobs if any(not one.aside for one in job.grants)]
            movable = [job for job in going if job.arranged and self.room.could_resume(job.grants)]
            if len(going) < 2 or not movable:
                first = min(going, key=lambda job: job.came).grants if going else []
                self.room.divide(first)
                return [book for book in held if not any(grant.notebook is book for grant in first)]
            last = max(movable, key=lambda job: job.came)
            assert last.arranged is not None and last.running is not None
            self.tally.aside += 1
            try:
                self.room.set_aside(last.grants, max((end for _, end in last.arranged.layout.splices), default=0))
            except EngineError:  # a state cannot go back
                last.running.fail(Refused(503, "there is no room for the rest of this answer", code="no_room", wait=1))
                self._ended()

    def _fail(self, job: Job, error: Exception) -> None:
        self._forget(job, "failed")
        job.tell(fault(error))

    def _forget(self, job: Job, outcome: str) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        self.room.end(job.grants)
        self._over(job, outcome)

    def _over(self, job: Job, outcome: str) -> None:
        """It is counted here, once: its client may go while its last step is made."""
        job.held.close()
        self.tally.outcomes[outcome] += 1
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

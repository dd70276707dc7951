"""The scheduler: one thread decodes all sequences, others prepare the requests for it.

Each step decodes a token of every sequence that answers and a chunk of those that are prefilled; between steps skills
are spliced, requests admitted and cancelled, and other work on K/V is done. The context belongs to this thread alone.

A request arrives there prepared (prepare.py): segments open, prompt tokenised, limits checked. A preparation thread
may wait for the decode thread, to have an image compiled; the decode thread never waits for preparation, but at its
end, when it refuses all that the others still want of it. Results of preparation stay valid: segments keep the files
that they were opened from, and the decode thread checks them against the context again. It looks for prefixes itself.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from notes_cli import output
from notes_cli.engine.loop import Loop, Task
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, NotesError
from notes_cli.library.global_errata import GlobalErrata
from notes_cli.library.store import Library
from notes_cli.runtime.prefix_cache import PrefixCache
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.conversations import Conversations
from notes_cli.serve.jobs import Job, JobEvent, Limits
from notes_cli.serve.kv_budget import GRANT, KVBudget
from notes_cli.serve.metrics import Metrics
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.prepare import PreparedRequest, ServerState
from notes_cli.serve.questions import PreparedTurn, Question, prepare
from notes_cli.serve.refusals import Refused, too_long
from notes_cli.serve.segment_cache import SegmentCache
from notes_cli.serve.turns import IDLE, Turns, fault
from notes_cli.sessions.session import Session

T = TypeVar("T")

PREPARING = 4  # threads that prepare: each has its share of Python's one interpreter
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
        self.metrics = Metrics()
        self._open = workspace
        self._arrivals: queue.SimpleQueue[Job | _Work | Callable[[], object] | None] = queue.SimpleQueue()
        self._works: deque[_Work] = deque()
        self._long = 0  # works that have come and not ended
        self._count = 0  # jobs that have come and not ended
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PREPARING, "prepare")
        self._preparing = 0  # calls of `prepare` that have not returned
        self._prepared: set[Job] = set()  # that are prepared and not over
        self._waiting: list[Job] = []  # in the order in which they came
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

    def submit(self, request: ChatRequest, on_event: Callable[[JobEvent], object]) -> Job:
        """Have a request prepared and answered. Raise Refused where too many wait already, and where the model is not
        there."""
        if self.ended:
            raise Refused(503, "the server has failed", code="failed")
        with self._lock:
            if self._count >= self.limits.requests:
                self.metrics.outcomes["refused"] += 1
                raise Refused(429, "too many requests are waiting: try again later", code="queue_full", wait=1)
            self._count += 1
            leaving = [job for job in self._prepared if job.gone]
        job = Job(request, on_event)
        try:
            self.prepare(lambda: self._prepare(job, leaving))
        except Refused:
            self._over(job, "failed")
            raise
        return job

    def prepare(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called in a preparation thread. It may use the model, the library and `state`, and wait for
        the decode thread by `compute`. Raise Refused where the model is not there."""
        with self._lock:
            if self._closing or self.ended:
                raise Refused(503, "the server has ended", code="shutting_down")
            if not self.ready.done():
                raise Refused(503, "the model is being loaded", code="loading", wait=5)
            self._preparing += 1
        future = self._pool.submit(function)
        future.add_done_callback(self._has_prepared)
        return future

    def _has_prepared(self, _: Future[T]) -> None:
        with self._lock:
            self._preparing -= 1
        self._arrivals.put(lambda: None)  # the decode thread may wait for that, at its end

    def _prepare(self, job: Job, leaving: Sequence[Job]) -> None:
        """In a preparation thread. `leaving`: jobs whose clients had gone when this one came. It may be the next turn
        of their conversations, which are kept when they are over."""
        try:
            for other in leaving:
                other.over.wait()
            if self._closing:
                raise Refused(503, "the server ends", code="shutting_down")
            if job.gone:
                self._over(job, "gone")
                return
            prepared = prepare(self.state, job.request, job.held)
        except Exception as error:
            self._over(job, "failed")
            job.on_event(fault(error))
            return
        with self._lock:
            job.prepared = prepared
            self._prepared.add(job)
        self._arrivals.put(job)

    def compute(self, function: Callable[[], T]) -> T:
        """For a preparation thread: have a function called in the decode thread, between two steps, and wait for it."""
        return self.call(function).result()

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
                    if self._closing or self.ended:
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
        resting = sum(1 for _ in self.prefixes.idle_prefixes())
        return {
            "requests_running": len(self._jobs),
            "requests_waiting": len(self._waiting),
            "cells": context.cells,
            "cells_used": context.used,
            "cells_promised": self.budget.promised,
            "sequences_free": context.n_free,
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
        self._pool.shutdown(wait=False)
        self._turn_away()

    def _turn_away(self) -> None:
        """Whoever came when all was over, in any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                one = self._arrivals.get_nowait()
                if isinstance(one, Job):
                    one.on_event(Refused(503, "the server has ended", code="shutting_down"))
                elif one is not None:
                    (one.function if isinstance(one, _Work) else one)()

    def _begin(self) -> None:
        workspace = self.workspace
        self.names = names_of(workspace, self.names)
        beside = 2 if workspace.model.recurrent else IDLE  # each state takes memory
        with contextlib.suppress(EngineError):  # fewer at a time, then
            workspace.reserve(0, self.limits.parallel + beside)
        self.prefixes = PrefixCache()
        self.segment_cache = SegmentCache(workspace, self.compute)
        errata = GlobalErrata(workspace.library.folder) if isinstance(workspace.library, Library) else None
        given = None if workspace.grows else workspace.context.cells
        longest = min((one for one in (workspace.longest, given) if one is not None), default=None)
        self.state = ServerState(
            *(
                workspace,
                self.segment_cache,
                self.prefixes,
                Conversations(),
                errata,
                self.names,
                self.limits.tokens,
                longest,
            )
        )
        self.budget = KVBudget(workspace, self.prefixes)
        self.turns = Turns(self.state, self.budget, self.metrics)

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        try:
            self._arrive(wait=False)
            self._refuse()
            self._loop.close()
        finally:
            for job in self._jobs:
                self._over(job, "failed")
            self._jobs.clear()
            while self._preparing:  # the model must not be closed under it
                self._arrive(wait=True)
                self._refuse()
            self._arrive(wait=False)  # of the last ones
            self._refuse()
        self.prefixes.close()

    def _refuse(self) -> None:
        """Refuse all requests, at the end of the server."""
        for work in self._works:
            work.function()
        self._works.clear()
        for job in [*self._waiting, *self._jobs]:
            job.on_event(Refused(503, "the server ends", code="shutting_down"))
        for job in self._waiting:
            self._over(job, "failed")
        self._waiting.clear()

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
                insort(self._waiting, one, key=lambda job: job.came)
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
            if any(reservation.preempted for reservation in job.reservations) and not self.budget.resume(
                job.reservations
            ):
                if any(not any(reservation.preempted for reservation in other.reservations) for other in self._jobs):
                    return  # until those that go on have ended
                if self.budget.resume(job.reservations, 1):
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
        if isinstance(job.prepared, PreparedTurn):
            return self._go_on_with_session(job, job.prepared)
        if isinstance(job.prepared, Question):
            return self._ask(job, job.prepared)
        assert job.prepared is not None
        prepared, layout, salt = job.prepared, job.prepared.layout, job.request.notes.cache_salt
        least = len(layout) + 1
        if not self.budget.can_allocate(least):
            raise too_long(self.budget.cells, f"needs {least} tokens")
        if not self.budget.make_room(0, job.sequences):
            return None
        kept, length, coming = self.prefixes.find(layout, salt)  # after room was made: that takes idle ones away
        if coming > length + SOON:
            return False
        sequence = self.prefixes.begin(kept, length, layout) if kept and length else self.workspace.sequence()
        first = self._room_for(job, len(layout) - len(sequence), min(prepared.room, GRANT))
        if first is None:
            self.prefixes.undo(kept, sequence)
            return None
        needed = min(1 + (prepared.kept if prepared.think else 0), prepared.room)
        if first < needed:
            sequence.close()
            tokens = len(layout) + needed * job.sequences
            raise too_long(self.budget.cells, f"needs {tokens} tokens")
        sequence.token_limit = self._bounded(len(layout) + prepared.room)
        held = self.prefixes.add(sequence, layout, salt)
        others, spare = job.sequences - 1, max(0, min(prepared.kept, first - 1))
        job.reservations = [self.budget.reserve(sequence, len(layout) + first, others * first, others, spare)]
        return self._answer(job, self.turns.answer(job, prepared, held, length, first))

    def _bounded(self, tokens: int) -> int:
        """So many tokens, or as many as one sequence may ever have, if these are fewer."""
        longest = self.state.longest
        return tokens if longest is None else min(tokens, longest)

    def _answer(self, job: Job, task: Task[None]) -> bool:
        """Begin to answer."""
        self._jobs.append(job)
        self.metrics.queued.add(time.perf_counter() - job.came)
        job.running = self._loop.begin(task)
        return True

    def _room_for(self, job: Job, prompt: int, first: int) -> int | None:
        """Room for so many tokens of a prompt, and `first` of each answer, fewer where it is alone. None: not now."""
        if self.budget.make_room(prompt + job.sequences * first):
            return first
        if self._jobs:
            return None
        return (self.budget.cells - self.workspace.context.used - prompt) // job.sequences

    def _ask(self, job: Job, question: Question) -> bool | None:
        """A question in a sequence of its own, if there is room for it (else None)."""
        cells = self._cells(question.tokens, question.room, question.lookahead)
        if not self.budget.make_room(cells + question.lookahead, 2):
            return None
        return self._answer(job, self.turns.question(job, question, cells))

    def _go_on_with_session(self, job: Job, turn: PreparedTurn) -> bool | None:
        """A turn of a session on disk, if there is room for it (else None)."""
        cells = self._cells(turn.tokens, turn.room, turn.lookahead)
        if not self.budget.make_room(cells + turn.lookahead, 1 + int(turn.lookahead > 0)):
            return None
        session = job.held.enter_context(Session(self.workspace, turn.stored))
        return self._answer(job, self.turns.session(job, session, turn, cells))

    def _cells(self, tokens: int, room: int, lookahead: int) -> int:
        """Cells for a prompt of so many tokens and the beginning of an answer, beside those to look ahead in. Raise
        Refused for a prompt that is too long."""
        if not self.budget.can_allocate(tokens + 1 + lookahead):
            raise too_long(self.budget.cells, f"needs {tokens + 1 + lookahead} tokens")
        cells = self._bounded(tokens + room)
        return cells if self.budget.can_allocate(cells + lookahead) else self.budget.cells - lookahead

    def _step(self) -> None:
        self.metrics.steps += 1
        held = self._held()
        awaited = [logits for running in self._loop.running for logits in running.awaited]
        # One that reads alone is decoded in the batches of `notes ask`.
        alone = len(awaited) == 1
        self._loop.step(self.workspace.context.n_ubatch if alone else self.limits.chunk + len(awaited), held)
        self._ended()

    def _ended(self) -> None:
        for running in self._loop.ended():
            job = next(job for job in self._jobs if job.running is running)
            if isinstance(running.outcome, NotesError):
                self._fail(job, running.outcome)
            else:
                self._forget(job, "answered")
                job.on_event(None)

    def _held(self) -> list[KVSequence]:
        """Sequences that wait at this step, as there is no room for another token of theirs. If all do, the request
        that came last makes room for those before it: it is read again when they are done. Where none can, the one
        that came first goes on with what is left, each of its answers with its part; with nothing left they end."""
        while True:
            held = self.budget.held()
            waiting = [look.sequence for one in self._loop.running for look in one.awaited if look.pending]
            if not held or any(seq not in held for seq in waiting):
                return held
            going = [job for job in self._jobs if any(not one.preempted for one in job.reservations)]
            movable = [
                job
                for job in going
                if isinstance(job.prepared, PreparedRequest) and self.budget.can_resume(job.reservations)
            ]
            if len(going) < 2 or not movable:
                first = min(going, key=lambda job: job.came).reservations if going else []
                self.budget.divide(first)
                return [seq for seq in held if not any(reservation.sequence is seq for reservation in first)]
            last = max(movable, key=lambda job: job.came)
            assert isinstance(last.prepared, PreparedRequest) and last.running is not None
            self.metrics.preempted += 1
            try:
                self.budget.preempt(last.reservations, max((end for _, end in last.prepared.layout.splices), default=0))
            except EngineError:  # a state cannot go back
                last.running.fail(Refused(503, "there is no room for the rest of this answer", code="no_room", wait=1))
                self._ended()

    def _fail(self, job: Job, error: Exception) -> None:
        self._forget(job, "failed")
        job.on_event(fault(error))

    def _forget(self, job: Job, outcome: str) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        self.budget.end(job.reservations)
        self._over(job, outcome)

    def _over(self, job: Job, outcome: str) -> None:
        """It is counted here, once: its client may go while its last step is made."""
        job.held.close()
        with self._lock:
            self.metrics.outcomes[outcome] += 1
            self._prepared.discard(job)
            self._count -= 1
        job.over.set()


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

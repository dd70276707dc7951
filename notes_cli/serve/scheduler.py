"""Schedules requests with continuous batching: one thread decodes all sequences, others prepare requests for it.

Each step decodes one token of every sequence in decode and a chunk of those in prefill. Between steps skills are
spliced, requests admitted and cancelled, and other work on K/V is done. Only this thread uses the context.

Requests arrive prepared (prepare.py): segments open, prompt tokenised, limits checked. A preparation thread may wait
for the decode thread to compile an image; the decode thread waits for preparation only at the end of the server.
Prepared requests stay valid: segments keep their files open, and the decode thread checks them against the context
again. It looks prefixes up itself.
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
from notes_cli.serve.answer_tasks import IDLE, AnswerTasks, client_error
from notes_cli.serve.conversations import Conversations
from notes_cli.serve.jobs import Job, JobEvent, Limits
from notes_cli.serve.kv_budget import GRANT, KVBudget
from notes_cli.serve.metrics import Metrics
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.prepare import PreparedRequest, ServerState
from notes_cli.serve.questions import PreparedTurn, Question, prepare
from notes_cli.serve.refusals import Refused, too_long
from notes_cli.serve.segment_cache import SegmentCache
from notes_cli.sessions.session import Session

T = TypeVar("T")

PREPARING = 4  # preparation threads, which share Python's interpreter lock
LONG = 8  # most waiting compiles
SOON = 16  # prefix tokens that are worth waiting for while another request prefills them


@dataclass(frozen=True, slots=True)
class _LongCall:
    """A call that takes many steps' time."""

    function: Callable[[], object]


class Scheduler:
    """Prepares, admits, decodes and finishes requests, between `start` and `close`. Any thread may use it."""

    def __init__(
        self,
        workspace: Callable[[], contextlib.AbstractContextManager[Workspace]],
        limits: Limits | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """`workspace` is opened in the decode thread. `names`: further names of its model."""
        self.limits = limits or Limits()
        self.ready: Future[Workspace] = Future()  # done once the model is loaded
        self.over: Future[None] = Future()  # done once the decode thread has ended
        self.names = tuple(names)
        self.started = int(time.time())
        self.metrics = Metrics()
        self._open = workspace
        self._arrivals: queue.SimpleQueue[Job | _LongCall | Callable[[], object] | None] = queue.SimpleQueue()
        self._long_calls: deque[_LongCall] = deque()
        self._long = 0  # unfinished long calls
        self._count = 0  # unfinished jobs
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PREPARING, "prepare")
        self._preparing = 0  # calls of `prepare` that have not returned
        self._prepared: set[Job] = set()  # and not finished
        self._waiting: list[Job] = []  # by arrival
        self._jobs: list[Job] = []  # admitted
        self._loop: Loop[None] = Loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # In any thread.

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Cancel all requests and close the model, without waiting for one that is still being loaded."""
        self._arrivals.put(None)
        if self._thread.ident is not None and not self.loading:
            self._thread.join()

    @property
    def loading(self) -> bool:
        """True while the model is being loaded."""
        return self._thread.is_alive() and not self.ready.done()

    @property
    def ended(self) -> bool:
        """True if the decode thread has ended or failed to load the model."""
        return self.over.done() or (self.ready.done() and self.ready.exception() is not None)

    @property
    def load(self) -> int:
        """Number of unfinished requests."""
        return self._count

    def submit(self, request: ChatRequest, on_event: Callable[[JobEvent], object]) -> Job:
        """Prepare and answer a request. Raises Refused if too many are waiting or the model is not loaded."""
        if self.ended:
            raise Refused(503, "the server has failed", code="failed")
        with self._lock:
            if self._count >= self.limits.requests:
                self.metrics.outcomes["refused"] += 1
                raise Refused(429, "too many requests are waiting: try again later", code="queue_full", wait=1)
            self._count += 1
            cancelled = [job for job in self._prepared if job.cancelled]
        job = Job(request, on_event)
        try:
            self.prepare(lambda: self._prepare(job, cancelled))
        except Refused:
            self._finish(job, "failed")
            raise
        return job

    def prepare(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in a preparation thread. It may use the model, the library and `state`, and wait for the
        decode thread by `compute`. Raises Refused if the model is not loaded."""
        with self._lock:
            if self._closing or self.ended:
                raise Refused(503, "the server has ended", code="shutting_down")
            if not self.ready.done():
                raise Refused(503, "the model is being loaded", code="loading", wait=5)
            self._preparing += 1
        future = self._pool.submit(function)
        future.add_done_callback(self._prepare_returned)
        return future

    def _prepare_returned(self, _: Future[T]) -> None:
        with self._lock:
            self._preparing -= 1
        self._arrivals.put(lambda: None)  # wakes the decode thread, which waits for this at its end

    def _prepare(self, job: Job, cancelled: Sequence[Job]) -> None:
        """Prepare a job in a preparation thread, once the `cancelled` ones are finished: it may be the next turn of
        their conversations, which are remembered then."""
        try:
            for other in cancelled:
                other.finished.wait()
            if self._closing:
                raise Refused(503, "the server ends", code="shutting_down")
            if job.cancelled:
                self._finish(job, "gone")
                return
            prepared = prepare(self.state, job.request, job.resources)
        except Exception as error:
            self._finish(job, "failed")
            job.on_event(client_error(error))
            return
        with self._lock:
            job.prepared = prepared
            self._prepared.add(job)
        self._arrivals.put(job)

    def compute(self, function: Callable[[], T]) -> T:
        """Call a function in the decode thread, and wait for its result."""
        return self.call(function).result()

    def call(self, function: Callable[[], T], *, long: bool = False) -> Future[T]:
        """Call a function in the decode thread between two steps, where it may use the context. `long`: one at a time,
        and the function calls `yield_to_others` often. Raises Refused if too many long calls are waiting."""
        future: Future[T] = Future()
        if long:
            with self._lock:
                if self._long == LONG:
                    raise Refused(429, "too many compiles are waiting", code="queue_full", wait=5)
                self._long += 1
            future.add_done_callback(self._long_ended)

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    if self._closing or self.ended:
                        raise Refused(503, "the server has ended", code="shutting_down")
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._arrivals.put(_LongCall(run) if long else run)
        if self.ended:
            self._refuse_arrivals()
        return future

    def _long_ended(self, _: Future[T]) -> None:
        with self._lock:
            self._long -= 1

    # In the decode thread.

    def gauges(self) -> dict[str, float]:
        """Return the gauges for /metrics."""
        context = self.workspace.context
        return {
            "requests_running": len(self._jobs),
            "requests_waiting": len(self._waiting),
            "cells": context.cells,
            "cells_used": context.used,
            "cells_promised": self.budget.promised,
            "sequences_free": context.n_free,
            "prefixes_idle": sum(1 for _ in self.prefixes.idle_prefixes()),
        }

    def _run(self) -> None:
        try:
            with self._open() as self.workspace:
                self._begin()
                self.ready.set_result(self.workspace)
                try:
                    while not self._closing:
                        self._iterate()
                finally:
                    self._end()
            self.over.set_result(None)
        except BaseException as error:
            (self.over if self.ready.done() else self.ready).set_exception(error)
        self._pool.shutdown(wait=False)
        self._refuse_arrivals()

    def _refuse_arrivals(self) -> None:
        """Refuse all arrivals after the end; in any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                arrival = self._arrivals.get_nowait()
                if isinstance(arrival, Job):
                    arrival.on_event(Refused(503, "the server has ended", code="shutting_down"))
                elif arrival is not None:
                    (arrival.function if isinstance(arrival, _LongCall) else arrival)()

    def _begin(self) -> None:
        workspace = self.workspace
        self.names = model_names(workspace, self.names)
        idle = 2 if workspace.model.recurrent else IDLE  # each recurrent state takes memory
        with contextlib.suppress(EngineError):  # then fewer run at a time
            workspace.reserve(0, self.limits.parallel + idle)
        self.prefixes = PrefixCache()
        self.segment_cache = SegmentCache(workspace, self.compute)
        errata = GlobalErrata(workspace.library.folder) if isinstance(workspace.library, Library) else None
        cells = None if workspace.grows else workspace.context.cells
        longest = min((limit for limit in (workspace.longest, cells) if limit is not None), default=None)
        conversations, max_tokens = Conversations(), self.limits.tokens
        self.state = ServerState(
            *(workspace, self.segment_cache, self.prefixes, conversations, errata, self.names, max_tokens, longest)
        )
        self.budget = KVBudget(workspace, self.prefixes)
        self.tasks = AnswerTasks(self.state, self.budget, self.metrics)

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        try:
            self._take_arrivals(wait=False)
            self._refuse_all()
            self._loop.close()
        finally:
            for job in self._jobs:
                self._finish(job, "failed")
            self._jobs.clear()
            while self._preparing:  # preparation uses the model, which must not be closed before
                self._take_arrivals(wait=True)
                self._refuse_all()
            self._take_arrivals(wait=False)
            self._refuse_all()
        self.prefixes.close()

    def _refuse_all(self) -> None:
        """Refuse all requests, at the end of the server."""
        for call in self._long_calls:
            call.function()
        self._long_calls.clear()
        for job in [*self._waiting, *self._jobs]:
            job.on_event(Refused(503, "the server ends", code="shutting_down"))
        for job in self._waiting:
            self._finish(job, "failed")
        self._waiting.clear()

    def _iterate(self) -> None:
        self._take_arrivals(wait=not (self._loop.running or self._waiting or self._long_calls))
        self._serve()
        if self._long_calls and not self._closing:
            self._long_calls.popleft().function()

    def yield_to_others(self) -> None:
        """Run a step of the other requests, during a long call. Raises Refused at the end of the server."""
        self._take_arrivals(wait=False)
        if self._closing:
            raise Refused(503, "the server ends", code="shutting_down")
        self._serve()

    def _serve(self) -> None:
        self._drop()
        self._admit()
        if self._loop.running:
            self._step()

    def _take_arrivals(self, *, wait: bool) -> None:
        """Take the arrivals so far; `wait` for at least one. Later ones have to wait for the next step, so that many
        calls do not delay decoding."""
        for _ in range(max(self._arrivals.qsize(), int(wait))):
            arrival = self._arrivals.get()
            if arrival is None:
                self._closing = True
            elif isinstance(arrival, Job):
                insort(self._waiting, arrival, key=lambda job: job.arrived)
            elif isinstance(arrival, _LongCall):
                self._long_calls.append(arrival)
            else:
                arrival()

    def _drop(self) -> None:
        """Drop cancelled jobs."""
        for job in [job for job in self._jobs if job.cancelled]:
            if job.running is not None:
                try:
                    self._loop.drop(job.running)
                except Exception as error:  # in its cleanup: must not end other requests
                    output.say(f"a request that was given up: {type(error).__name__}: {error}")
            self._release(job, "gone")
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._finish(job, "gone")

    def _admit(self) -> None:
        """Resume preempted jobs, then admit waiting ones, by arrival. A job that waits for cells blocks later ones; a
        job that waits for another's prefill of the same prefix does not."""
        for job in sorted(self._jobs, key=lambda job: job.arrived):
            if _is_preempted(job) and not self.budget.resume(job.reservations):
                if not all(map(_is_preempted, self._jobs)):
                    return  # until the running ones have finished
                if self.budget.resume(job.reservations, 1):
                    continue
                assert job.running is not None
                job.running.fail(Refused(503, "there is no room for the rest of this answer", code="no_room", wait=1))
                self._finish_ended()
        for job in list(self._waiting):
            if self._n_sequences + job.sequences > self.limits.parallel and self._jobs:
                return
            try:
                started = self._try_start(job)
            except Exception as error:
                self._waiting.remove(job)
                self._fail(job, error)
                continue
            if started is None and self._jobs:
                return
            if started is None:
                self._waiting.remove(job)
                self._fail(job, Refused(503, "there is no room for this request", code="no_room", wait=1))
            elif started:
                self._waiting.remove(job)

    @property
    def _n_sequences(self) -> int:
        return sum(job.sequences for job in self._jobs)

    def _try_start(self, job: Job) -> bool | None:
        """Start a job. Returns None if there are too few cells or sequences, False if another request is prefilling a
        prefix of its prompt."""
        if isinstance(job.prepared, PreparedTurn):
            return self._try_start_turn(job, job.prepared)
        if isinstance(job.prepared, Question):
            return self._try_start_question(job, job.prepared)
        assert job.prepared is not None
        prepared, layout, salt = job.prepared, job.prepared.layout, job.request.notes.cache_salt
        least = len(layout) + layout.temporary + 1
        if not self.budget.can_allocate(least):
            raise too_long(self.budget.cells, f"needs {least} tokens")
        if not self.budget.ensure_free(0, job.sequences):
            return None
        cached, length, coming = self.prefixes.find(layout, salt)  # after `ensure_free`, which evicts prefixes
        if coming > length + SOON:
            return False
        sequence = self.prefixes.begin(cached, length, layout) if cached and length else self.workspace.sequence()
        prompt = len(layout) + layout.temporary
        first = self._first_tokens(job, prompt - len(sequence), min(prepared.max_new, GRANT))
        if first is None:
            self.prefixes.undo(cached, sequence)
            return None
        needed = min(1 + (prepared.reasoning_end if prepared.think else 0), prepared.max_new)
        if first < needed:
            sequence.close()
            tokens = prompt + needed * job.sequences
            raise too_long(self.budget.cells, f"needs {tokens} tokens")
        sequence.token_limit = self._bounded(len(layout) + prepared.max_new)
        prefix = self.prefixes.add(sequence, layout, salt)
        forks, reasoning_end = job.sequences - 1, max(0, min(prepared.reasoning_end, first - 1))
        job.reservations = [self.budget.reserve(sequence, prompt + first, forks * first, forks, reasoning_end)]
        return self._start(job, self.tasks.answer(job, prepared, prefix, length, first))

    def _bounded(self, tokens: int) -> int:
        """Limit a number of tokens to those that a sequence may have."""
        longest = self.state.longest
        return tokens if longest is None else min(tokens, longest)

    def _start(self, job: Job, task: Task[None]) -> bool:
        self._jobs.append(job)
        self.metrics.queued.add(time.perf_counter() - job.arrived)
        job.running = self._loop.begin(task)
        return True

    def _first_tokens(self, job: Job, prompt: int, first: int) -> int | None:
        """Free cells for `prompt` tokens and `first` tokens of each answer, fewer if no other job runs. Returns the
        tokens of each answer; None if there are too few cells now."""
        if self.budget.ensure_free(prompt + job.sequences * first):
            return first
        if self._jobs:
            return None
        return (self.budget.cells - self.workspace.context.used - prompt) // job.sequences

    def _try_start_question(self, job: Job, question: Question) -> bool | None:
        """As `_try_start`, in a sequence of its own."""
        cells = self._cells(question.tokens, question.first_tokens, question.lookahead)
        if not self.budget.ensure_free(cells + question.lookahead, 2):
            return None
        return self._start(job, self.tasks.question(job, question, cells))

    def _try_start_turn(self, job: Job, turn: PreparedTurn) -> bool | None:
        """As `_try_start`, for a turn of a session on disk."""
        cells = self._cells(turn.tokens, turn.first_tokens, turn.lookahead)
        if not self.budget.ensure_free(cells + turn.lookahead, 1 + int(turn.lookahead > 0)):
            return None
        session = job.resources.enter_context(Session(self.workspace, turn.stored))
        return self._start(job, self.tasks.session(job, session, turn, cells))

    def _cells(self, tokens: int, first_tokens: int, lookahead: int) -> int:
        """Return the cells for a prompt and the first tokens of its answer, without those for lookahead. Raises Refused
        for a prompt that is too long."""
        if not self.budget.can_allocate(tokens + 1 + lookahead):
            raise too_long(self.budget.cells, f"needs {tokens + 1 + lookahead} tokens")
        cells = self._bounded(tokens + first_tokens)
        return cells if self.budget.can_allocate(cells + lookahead) else self.budget.cells - lookahead

    def _step(self) -> None:
        self.metrics.steps += 1
        blocked = self._blocked()
        awaited = [logits for running in self._loop.running for logits in running.awaited]
        # A single prefill has the same batches as in `notes ask`.
        alone = len(awaited) == 1
        self._loop.step(self.workspace.context.n_ubatch if alone else self.limits.chunk + len(awaited), blocked)
        self._finish_ended()

    def _finish_ended(self) -> None:
        for running in self._loop.ended():
            job = next(job for job in self._jobs if job.running is running)
            if isinstance(running.outcome, NotesError):
                self._fail(job, running.outcome)
            else:
                self._release(job, "answered")
                job.on_event(None)

    def _blocked(self) -> list[KVSequence]:
        """Return the sequences that wait at this step, as there is no cell for their next token. If all would wait, the
        job that arrived last is preempted, and decoded again later. If none can be, the job that arrived first gets the
        remaining cells, divided among its answers; without any they end."""
        while True:
            blocked = self.budget.blocked()
            waiting = [logits.sequence for task in self._loop.running for logits in task.awaited if logits.pending]
            if not blocked or any(seq not in blocked for seq in waiting):
                return blocked
            running = [job for job in self._jobs if not all(each.preempted for each in job.reservations)]
            preemptible = [
                job
                for job in running
                if isinstance(job.prepared, PreparedRequest) and self.budget.can_resume(job.reservations)
            ]
            if len(running) < 2 or not preemptible:
                first = min(running, key=lambda job: job.arrived).reservations if running else []
                self.budget.divide(first)
                return [seq for seq in blocked if not any(reservation.sequence is seq for reservation in first)]
            last = max(preemptible, key=lambda job: job.arrived)
            assert isinstance(last.prepared, PreparedRequest) and last.running is not None
            self.metrics.preempted += 1
            try:
                self.budget.preempt(last.reservations, max((end for _, end in last.prepared.layout.splices), default=0))
            except EngineError:  # a recurrent state cannot be truncated
                last.running.fail(Refused(503, "there is no room for the rest of this answer", code="no_room", wait=1))
                self._finish_ended()

    def _fail(self, job: Job, error: Exception) -> None:
        self._release(job, "failed")
        job.on_event(client_error(error))

    def _release(self, job: Job, outcome: str) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        self.budget.release(job.reservations)
        self._finish(job, outcome)

    def _finish(self, job: Job, outcome: str) -> None:
        """Close a job's resources and count it, once: its client may cancel it during its last step."""
        job.resources.close()
        with self._lock:
            self.metrics.outcomes[outcome] += 1
            self._prepared.discard(job)
            self._count -= 1
        job.finished.set()


def _is_preempted(job: Job) -> bool:
    return any(reservation.preempted for reservation in job.reservations)


@contextlib.contextmanager
def run_scheduler(scheduler: Scheduler) -> Iterator[Scheduler]:
    """Start a scheduler, and close it at the end of the block."""
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()


def model_names(workspace: Workspace, aliases: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the model for clients: aliases, its file's stem, its own name, its file's name."""
    model = workspace.model
    return tuple(dict.fromkeys(name for name in (*aliases, model.path.stem, model.name, model.path.name) if name))

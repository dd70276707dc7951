"""Runs the scheduler (runtime/scheduler.py) in the server's decode thread; other threads prepare requests for it.

Only the decode thread uses the context. Between steps, other work on K/V is done there.

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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from notes_cli.errors import EngineError
from notes_cli.library.global_errata import GlobalErrata
from notes_cli.library.store import Library
from notes_cli.runtime.prefix_cache import default_budget
from notes_cli.runtime.scheduler import Job, Scheduler
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.answer_tasks import JobEvent, ServerJob, client_error, job_of
from notes_cli.serve.conversations import Conversations
from notes_cli.serve.idle_work import IdleWork
from notes_cli.serve.learned import LearnedBlocks
from notes_cli.serve.metrics import Metrics
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.prepare import Options, ServerState, prepare
from notes_cli.serve.refusals import Refused
from notes_cli.serve.segment_cache import SegmentCache
from notes_cli.serve.system_texts import SystemTexts

T = TypeVar("T")

PREPARING = 4  # preparation threads, which share Python's interpreter lock
LARGE = 1 << 18  # bytes of a request above which it is prepared in a thread of its own, one after the other
LONG = 8  # most waiting compiles
IDLE = 32  # idle prefixes that are kept


class DecodeThread:
    """Prepares requests and runs them in the scheduler, between `start` and `close`. Any thread may use it."""

    def __init__(self, workspace: Callable[[], contextlib.AbstractContextManager[Workspace]], options: Options) -> None:
        """`workspace` is opened in the decode thread."""
        self.options = options
        self.ready: Future[Workspace] = Future()  # done once the model is loaded
        self.over: Future[None] = Future()  # done once the decode thread has ended
        self.names = options.names
        self.splice = options.splice  # names, once the model is loaded and texts among them are compiled
        self.started = int(time.time())
        self.metrics = Metrics()
        self._open = workspace
        self._arrivals: queue.SimpleQueue[ServerJob | Callable[[], object] | None] = queue.SimpleQueue()
        self._long_calls: deque[Callable[[], object]] = deque()  # each takes many steps' time
        self._long = 0  # unfinished long calls
        self._count = 0  # unfinished jobs
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PREPARING, "prepare")
        self._large_pool = ThreadPoolExecutor(1, "prepare-large")
        self._preparing = 0  # calls of `prepare` that have not returned
        self._prepared: set[ServerJob] = set()  # and not finished
        self.idle_work: IdleWork | None = None  # set in the decode thread, as is the next
        self.system_texts: SystemTexts | None = None  # of a model with recurrent layers
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # In any thread.

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Cancel all requests and close the model, without waiting for one that is still being loaded."""
        self._arrivals.put(None)
        self._end_idle()
        if self._thread.ident is not None and not self.loading:
            self._thread.join()

    @property
    def loading(self) -> bool:
        return self._thread.is_alive() and not self.ready.done()

    @property
    def ended(self) -> bool:
        """True if the decode thread has ended or failed to load the model."""
        return self.over.done() or (self.ready.done() and self.ready.exception() is not None)

    @property
    def load(self) -> int:
        return self._count

    def submit(self, request: ChatRequest, on_event: Callable[[JobEvent], object]) -> ServerJob:
        """Prepare and answer a request. Raises Refused if too many are waiting or the model is not loaded."""
        if self.ended:
            raise Refused(503, "the server has failed", code="failed")
        with self._lock:
            if self._count >= self.options.requests:
                self.metrics.outcomes["refused"] += 1
                raise Refused(429, "too many requests are waiting: try again later", code="queue_full", wait=1)
            self._count += 1
            self._end_idle()
            cancelled = [job for job in self._prepared if job.cancelled]
        job = ServerJob(request, on_event)
        try:
            self.prepare(lambda: self._prepare(job, cancelled), size=request.size)
        except Refused:
            self._finish(job, "failed")
            raise
        return job

    def prepare(self, function: Callable[[], T], *, size: int = 0) -> Future[T]:
        """Call a function in a preparation thread. It may use the model, the library and `state`, and wait for the
        decode thread by `compute`. `size`: bytes of its request; large ones take turns, so that small ones find a free
        thread and processor. Raises Refused if the model is not loaded."""
        with self._lock:
            if self._closing or self.ended:
                raise Refused(503, "the server has ended", code="shutting_down")
            if not self.ready.done():
                raise Refused(503, "the model is being loaded", code="loading", wait=5)
            self._preparing += 1

        def returned(_: Future[T]) -> None:
            with self._lock:
                self._preparing -= 1
            self._arrivals.put(lambda: None)  # wakes the decode thread, which waits for this at its end

        future = (self._large_pool if size > LARGE else self._pool).submit(function)
        future.add_done_callback(returned)
        return future

    def _prepare(self, job: ServerJob, cancelled: Sequence[ServerJob]) -> None:
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
            self._end_idle()
            future.add_done_callback(self._long_ended)

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    if self._closing or self.ended:
                        raise Refused(503, "the server has ended", code="shutting_down")
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._arrivals.put(partial(self._long_calls.append, run) if long else run)
        if self.ended:
            self._refuse_arrivals()
        return future

    def _long_ended(self, _: Future[T]) -> None:
        with self._lock:
            self._long -= 1

    # In the decode thread.

    def gauges(self) -> dict[str, float]:
        context, store = self.workspace.context, self.prefixes.store
        return {
            "requests_running": sum(job.stop is None for job in self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "cells": context.cells,
            "cells_used": context.used,
            "cells_promised": self.budget.promised,
            "sequences_free": context.n_free,
            "prefixes_idle": sum(1 for _ in self.prefixes.idle_prefixes()),
            "cache_ram_bytes": store.nbytes + store.live_bytes if store else 0,
            "cache_ram_blocks": store.count if store else 0,
            "cache_ram_states": store.states_kept if store else 0,
        }

    def _run(self) -> None:
        try:
            with self._open() as self.workspace:
                self._begin()
                self.ready.set_result(self.workspace)
                try:
                    while not self._closing:
                        busy = self.scheduler.running or self.scheduler.waiting or self._long_calls
                        self._take_arrivals(wait=not (busy or self._begin_idle()))
                        self._serve()
                        if self._long_calls and not self._closing:
                            self._end_idle()
                            self._serve()  # drops it
                            self._long_calls.popleft()()
                finally:
                    self._end()
            self.over.set_result(None)
        except BaseException as error:
            (self.over if self.ready.done() else self.ready).set_exception(error)
        self._pool.shutdown(wait=False)
        self._large_pool.shutdown(wait=False)
        self._refuse_arrivals()

    def _begin_idle(self) -> bool:
        """Begin work that any request ends, if there is some."""
        if self._count or not self._arrivals.empty():
            return False
        if self.system_texts is not None:
            self.system_texts.keep()
        if self.idle_work is None or not self.idle_work.begin():
            return False
        with self._lock:
            if self._count:  # since then
                self.idle_work.end()
        return True

    def _end_idle(self) -> None:
        if self.idle_work is not None:
            self.idle_work.end()

    def _refuse_arrivals(self) -> None:
        """Refuse all arrivals after the end; in any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                arrival = self._arrivals.get_nowait()
                if isinstance(arrival, ServerJob):
                    arrival.on_event(Refused(503, "the server has ended", code="shutting_down"))
                elif arrival is not None:
                    arrival()
        self._refuse_long_calls()

    def _refuse_long_calls(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._long_calls.popleft()()

    def _begin(self) -> None:
        workspace, options = self.workspace, self.options
        model = workspace.model  # clients may name it by an alias, its file's stem, its own name, or its file's name
        names = (*self.names, model.path.stem, model.name, model.path.name)
        self.names = tuple(dict.fromkeys(filter(None, names)))
        idle = 2 if model.recurrent else IDLE  # each recurrent state takes memory
        with contextlib.suppress(EngineError):  # then fewer run at a time
            workspace.reserve(0, options.parallel + idle)
        cache_ram = default_budget() if options.cache_ram is None else options.cache_ram
        learned = None
        if options.reuse == "learned" and not model.recurrent:
            learned = LearnedBlocks(workspace, cache_ram // 4)
            cache_ram -= cache_ram // 4
        self.scheduler = Scheduler(workspace, options.parallel, chunk=options.chunk, idle=IDLE, cache_ram=cache_ram)
        self.prefixes, self.budget = self.scheduler.prefixes, self.scheduler.budget
        self.idle_work = IdleWork(self.scheduler, learned) if learned else None
        store, library = self.prefixes.store, workspace.library
        if options.reuse == "learned" and store and store.keeps_states and isinstance(library, Library):
            self.system_texts = SystemTexts(workspace, library, self.prefixes, store)
        self.segment_cache = SegmentCache(workspace, self.compute)
        errata = GlobalErrata(workspace.library.folder) if isinstance(workspace.library, Library) else None
        cells = None if workspace.grows else workspace.context.cells
        longest = min((limit for limit in (workspace.longest, cells) if limit is not None), default=None)
        self.state = ServerState(
            *(workspace, self.segment_cache, self.scheduler, Conversations(), errata, self.names),
            *(longest, options, self.metrics, learned),
        )
        self.splice = tuple(map(self.segment_cache.compiled, self.splice))

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        try:
            self._take_arrivals(wait=False)
        finally:
            self._refuse_all()
            while self._preparing:  # preparation uses the model, which must not be closed before
                self._take_arrivals(wait=True)
                self._refuse_all()
            self._take_arrivals(wait=False)
            self._refuse_all()
            for files in (self.state.learned, self.system_texts):
                if files is not None:
                    files.close()

    def _refuse_all(self) -> None:
        """Refuse all requests, at the end of the server."""
        self._refuse_long_calls()
        self.scheduler.close()

    def yield_to_others(self) -> None:
        """Run a step of the other requests, during a long call. Raises Refused at the end of the server."""
        self._take_arrivals(wait=False)
        if self._closing:
            raise Refused(503, "the server ends", code="shutting_down")
        self._serve()

    def _serve(self) -> None:
        self.metrics.steps += self.scheduler.step()
        self.metrics.preempted = self.scheduler.preempted
        if store := self.prefixes.store:
            self.metrics.restored, self.metrics.restored_tokens = store.hits, store.restored

    def _take_arrivals(self, *, wait: bool) -> None:
        """Take the arrivals so far; `wait` for at least one. Later ones have to wait for the next step, so that many
        calls do not delay decoding."""
        for _ in range(max(self._arrivals.qsize(), int(wait))):
            arrival = self._arrivals.get()
            if arrival is None:
                self._closing = True
            elif isinstance(arrival, ServerJob):
                arrival.work = job_of(self.state, arrival)
                arrival.work.cancelled = arrival.cancelled  # it may have been cancelled before
                arrival.work.on_end = partial(self._job_ended, arrival)
                self.scheduler.submit(arrival.work)
            else:
                arrival()

    def _job_ended(self, job: ServerJob, work: Job[None]) -> None:
        error = work.outcome
        if isinstance(error, Exception):
            self._finish(job, "failed")
            job.on_event(client_error(error))
        elif work.dropped and self._closing:
            job.on_event(Refused(503, "the server ends", code="shutting_down"))
            self._finish(job, "failed")
        elif work.dropped:
            self._finish(job, "gone")
        else:
            self._finish(job, "answered")
            job.on_event(None)

    def _finish(self, job: ServerJob, outcome: str) -> None:
        """Close a job's resources and count it, once: its client may cancel it during its last step."""
        job.resources.close()
        with self._lock:
            self.metrics.outcomes[outcome] += 1
            self._prepared.discard(job)
            self._count -= 1
        job.finished.set()

"""Schedules requests with continuous batching: admits them by KV cells, decodes all of them in joint batches, preempts.

One question, a batch, a turn of a session and a server run here; a server's requests arrive over time
(serve/scheduler.py). Each step decodes one token of every sequence in decode and a chunk of those in prefill. Use it
from one thread.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from notes_cli.engine.interrupts import Cancelled, Stop
from notes_cli.engine.sequence import KVSequence, Task, decode, throw
from notes_cli.errors import ContextLengthError, EngineError, Help, NotesError
from notes_cli.runtime.workspace import Workspace

if TYPE_CHECKING:
    from notes_cli.runtime.kv_budget import Reservation
    from notes_cli.runtime.prefix_cache import CachedPrefix, Layout
    from notes_cli.runtime.token_runs import PlacedRun

T = TypeVar("T")

SOON = 16  # prefix tokens that are worth waiting for while another request prefills them


class NoRoomError(EngineError):
    """There are too few cells at the moment."""


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """A request in the scheduler: the cells that it needs, and the task that answers it."""

    task: Callable[[Job[T]], Task[T]]  # makes the task, when it is admitted
    tokens: int = 0  # of its prompt at most, with temporary ones
    first: int = 0  # tokens of each answer that have cells when it is admitted
    least: int = 0  # of these, the tokens without which it cannot begin
    answers: int = 1
    lookahead: int = 0  # more cells, to score its longest choice
    reasoning_end: int = 0  # of `first`, tokens for the end of the reasoning
    limit: int | None = None  # most tokens of its sequence; None: those of the context
    layout: Layout | None = None  # of its prompt, to share prefixes
    salt: str = ""  # only prompts with the same one share prefixes
    # Tokens of a prefix that is kept for others when it is decoded; None: all of its sequence may be shared.
    boundary: int | None = None
    preemptible: bool = False  # its K/V after the last splice may be dropped and decoded again
    own: bool = False  # its task leases a sequence by itself
    stop: Stop | None = None  # of one that runs alone, for `cancel`
    on_end: Callable[[Job[T]], object] = lambda job: None
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    # Set by the scheduler:
    sequence: KVSequence | None = None  # begins with a cached prefix of `live` tokens
    runs: list[PlacedRun] = field(default_factory=list)  # of its prompt after that prefix
    live: int = 0
    difference: int | None = None  # first token of its prompt that the most similar cached one does not have
    prefix: CachedPrefix | None = None
    reservations: list[Reservation] = field(default_factory=list)
    awaited: Sequence[KVSequence] = ()  # whose tokens its task needs decoded
    ended: bool = False
    dropped: bool = False  # ended without an outcome: cancelled, or the scheduler was closed
    outcome: T | Exception | None = None  # once it has ended
    running: Task[T] | None = None

    def cancel(self) -> None:
        """End it at the next step, or within the batch if it has a `stop`. In any thread."""
        self.cancelled = True
        if self.stop is not None:
            self.stop.ask()

    @property
    def preempted(self) -> bool:
        return any(reservation.preempted for reservation in self.reservations)

    @property
    def result(self) -> T:
        """The result. Raises the error that ended it."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None and not self.dropped
        return self.outcome


class Scheduler(AbstractContextManager["Scheduler"]):
    """Admits, decodes and finishes requests. Close it, or use it as a context manager."""

    def __init__(
        self,
        workspace: Workspace,
        parallel: int | None = None,
        *,
        chunk: int | None = None,
        idle: int = 0,
        grow_first: bool = False,
        cache_ram: int = 0,
    ) -> None:
        """`parallel`: most sequences in prefill or decode; None: a single request, which has the context to itself.
        `chunk`: most prompt tokens in a step with several sequences. `idle`: idle prefixes that are kept. `grow_first`:
        enlarge the context before idle prefixes are evicted. `cache_ram`: bytes for the K/V of evicted ones."""
        self.workspace, self.parallel, self.idle = workspace, parallel, idle
        if parallel:
            from notes_cli.runtime.kv_budget import KVBudget  # a single question needs neither
            from notes_cli.runtime.prefix_cache import PrefixCache, PrefixStore

            self.prefixes = PrefixCache(PrefixStore(workspace, cache_ram) if cache_ram else None)
            self.budget = KVBudget(workspace, self.prefixes)
        self.waiting: list[Job[Any]] = []  # by arrival
        self.running: list[Job[Any]] = []
        self.preempted = 0  # number of jobs so far
        self._chunk, self._grow_first = chunk, grow_first

    def close(self) -> None:
        """Close all tasks that have not ended, and drop all prefixes."""
        for job in [*self.running, *self.waiting]:
            self._drop(job)
        if self.parallel:
            self.prefixes.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, job: Job[Any]) -> None:
        """Add a job, which waits until it is admitted."""
        insort(self.waiting, job, key=lambda job: job.arrived)

    def step(self) -> bool:
        """Drop cancelled jobs, admit waiting ones, and decode one batch. Returns False if there is none."""
        for job in [job for job in (*self.running, *self.waiting) if job.cancelled]:
            self._drop(job)
        self._admit()
        decoded = bool(self.running) and self._decode(self._blocked())
        if self.parallel:
            self.prefixes.bound_states()
        return decoded

    def fail(self, job: Job[T], error: NotesError) -> None:
        """Raise an error in the task of a job, which ends it."""
        try:
            assert job.running is not None
            throw(job.running, error)
        except StopIteration as done:
            self._end(job, done.value)
        except Exception as raised:
            self._end(job, raised)

    def _drop(self, job: Job[Any]) -> None:
        job.dropped = True
        self._end(job, None)

    def _end(self, job: Job[T], outcome: T | Exception | None) -> None:
        for jobs in (self.running, self.waiting):
            if job in jobs:
                jobs.remove(job)
        try:
            if job.running is not None:
                job.running.close()
            elif job.sequence is not None:  # its admission failed
                job.sequence.close()
        except Exception as error:  # must not end other jobs
            outcome = error
        if self.parallel:
            self.budget.release(job.reservations)
            if job.prefix is not None and not job.prefix.idle:  # its K/V may be incomplete
                self.prefixes.drop(job.prefix)
            self.prefixes.evict_beyond(self.idle)
        job.outcome, job.ended = outcome, True
        job.on_end(job)

    # Admission.

    def _admit(self) -> None:
        """Resume preempted jobs, then admit waiting ones, by arrival. A job that waits for cells blocks later ones; a
        job that waits for another's prefill of the same prefix does not."""
        for job in sorted(self.running, key=lambda job: job.arrived):
            if job.reservations and job.preempted and not self.budget.resume(job.reservations):
                if not all(job.preempted for job in self.running):
                    return  # until the running ones have finished
                if not self.budget.resume(job.reservations, 1):
                    self.fail(job, NoRoomError("there is no room for the rest of this answer"))
        for job in list(self.waiting):
            if self.running and sum(job.answers for job in self.running) + job.answers > (self.parallel or 1):
                return
            try:
                started = self._try_start(job)
            except Exception as error:
                self._end(job, error)
                continue
            if started is None and self.running:
                return
            if started is None:
                self._end(job, NoRoomError("there is no room for this request"))
            elif started:
                self.waiting.remove(job)
                self.running.append(job)
                self._resume(job)

    def _try_start(self, job: Job[Any]) -> bool | None:
        """Make the task of a job. Returns None if there are too few cells or sequences, False if another request is
        prefilling a prefix of its prompt."""
        if self.parallel is None:
            if not job.own:
                self.workspace.make_room(job.tokens, job.first)
                job.sequence = self.workspace.sequence()
        elif not (started := self._reserve(job)):
            return started
        job.running = job.task(job)
        return True

    def _reserve(self, job: Job[Any]) -> bool | None:
        """Reserve cells for a job, whose sequence begins with the longest cached prefix. Returns as `_try_start`."""
        layout, cached, length = job.layout, None, 0
        if not job.own:  # its tokens are an upper bound
            self.workspace.check_fits(job.tokens + job.lookahead + max(0, job.least - 1), job.first)
        if not self.budget.ensure_free(0, 1 + self._forks(job)):
            return None
        if layout is not None:  # after `ensure_free`, which evicts prefixes
            cached, length, coming = self.prefixes.find(layout, job.salt)
            if coming > length + SOON:
                return False
            if layout.prompt.exact and not self.running:
                self.prefixes.make_exact(cached if length else None)
            job.difference = self.prefixes.difference(layout, job.salt)
            layout, job.runs = self.prefixes.plan(self.workspace, layout, job.salt, cached, length)
            if cached and length:
                job.sequence = self.prefixes.begin(cached, length, layout, fork=job.boundary is not None)
        if job.sequence is None and not job.own:
            job.sequence = self.workspace.sequence()
        first = self._first_tokens(job, length)
        if first is None or first < job.least:
            if job.sequence is not None:
                self.prefixes.undo(cached, job.sequence)
                job.sequence = None
            if first is None:
                return None
            tokens, cells = job.tokens + job.lookahead + job.answers * job.least, self.budget.cells
            message = f"the context is too small: {tokens} tokens do not fit {cells}"
            raise ContextLengthError(message, Help.LARGER_CONTEXT(tokens=tokens), tokens=tokens, longest=cells)
        job.first, job.live, job.layout = first, length, layout
        if job.sequence is not None:
            self.reserve(job, job.sequence)
            if layout is not None:
                job.live = self.prefixes.restore(job.sequence, layout, job.salt)
                job.runs = [placed for placed in job.runs if placed.run.first >= job.live]
            if layout is not None and (job.boundary is None or length < job.boundary):
                job.prefix = self.prefixes.add(job.sequence, layout, job.salt, job.boundary)
        return True

    def reserve(self, job: Job[Any], sequence: KVSequence) -> None:
        """Reserve the cells that were found for a job, for this sequence and those that will be forked from it."""
        sequence.token_limit, cells = job.limit, (job.answers - 1) * job.first
        tokens, reasoning_end = job.tokens + job.lookahead + job.first, max(0, min(job.reasoning_end, job.first - 1))
        job.reservations = [self.budget.reserve(sequence, tokens, cells, self._forks(job), reasoning_end)]

    def _forks(self, job: Job[Any]) -> int:
        """Return the number of sequences that may be forked from a job's."""
        ahead = job.lookahead > 0 and self.workspace.model.recurrent  # of others the sequence itself is rolled back
        return job.answers - 1 + int(ahead) + int(job.live < (job.boundary or 0))

    def _first_tokens(self, job: Job[Any], length: int) -> int | None:
        """Free cells for a prompt of which `length` tokens are there, and the first tokens of each answer, fewer if no
        other job runs. Returns the tokens of each answer; None if there are too few cells now."""
        prompt, spare = job.tokens - length + job.lookahead, None
        if self._grow_first and self.parallel:  # for as many jobs like this one as may run
            each = job.tokens - (job.boundary or 0) + job.lookahead + job.first
            spare = (self.parallel - len(self.running) - 1) * each
        if self.budget.ensure_free(prompt + job.answers * job.first, spare=spare):
            return job.first
        if self.running:
            return None
        return max(0, (self.budget.cells - self.workspace.context.used - prompt) // job.answers)

    def keep_prefix(self, job: Job[Any]) -> None:
        """Keep a fork of a job's sequence, which ends at its boundary, for prompts that begin alike."""
        if job.prefix is not None:
            self.prefixes.fork(job.prefix)
            job.reservations[0].forks -= 1

    # Decoding.

    def _decode(self, blocked: Sequence[KVSequence]) -> bool:
        """Decode one batch for all jobs; if that fails, one for each, so that only the failing ones fail. Returns False
        if there is nothing to decode."""
        awaited = {job: [seq for seq in job.awaited if seq.pending and seq not in blocked] for job in self.running}
        sequences = [sequence for own in awaited.values() for sequence in own]
        if not sequences:
            return False
        limit = None if self._chunk is None else self._chunk + len(sequences)
        if len(sequences) == 1:  # a single prefill has the same batches everywhere
            limit = self.workspace.context.n_ubatch
        stop = next((job.stop for job in awaited if job.stop), None)
        try:
            with stop or nullcontext():
                decode(sequences, limit)
        except Cancelled:
            if stop is None:  # it is that of a program
                raise
            return True
        except NotesError:
            for job, own in awaited.items():
                try:
                    for sequence in own:
                        decode([sequence], limit)
                except NotesError as error:
                    self.fail(job, error)
        for job, own in awaited.items():
            if own and not job.ended:
                self._resume(job)
        return True

    def _resume(self, job: Job[T]) -> None:
        """Run the task of a job until it needs another batch, or ends."""
        try:
            assert job.running is not None
            job.awaited = next(job.running)
            while not any(sequence.pending for sequence in job.awaited):  # there is nothing to decode for it
                job.awaited = next(job.running)
        except StopIteration as done:
            self._end(job, done.value)
        except Exception as error:
            self._end(job, error)

    def _blocked(self) -> list[KVSequence]:
        """Return the sequences that wait at this step, as there is no cell for their next token. If all would wait, the
        job that arrived last is preempted, and decoded again later. If none can be, the job that arrived first gets the
        remaining cells, divided among its answers; without any they end."""
        while self.parallel:
            blocked = self.budget.blocked()
            waiting = [sequence for job in self.running for sequence in job.awaited if sequence.pending]
            if not blocked or any(sequence not in blocked for sequence in waiting):
                return blocked
            running = [job for job in self.running if not all(each.preempted for each in job.reservations)]
            preemptible = [job for job in running if job.preemptible and self.budget.can_resume(job.reservations)]
            if len(running) < 2 or not preemptible:
                first = min(running, key=lambda job: job.arrived).reservations if running else []
                self.budget.divide(first)
                return [seq for seq in blocked if not any(reservation.sequence is seq for reservation in first)]
            last = max(preemptible, key=lambda job: job.arrived)
            assert last.layout is not None
            self.preempted += 1
            try:
                self.budget.preempt(last.reservations, max((end for _, end in last.layout.splices), default=0))
            except EngineError:  # a recurrent state cannot be truncated
                self.fail(last, NoRoomError("there is no room for the rest of this answer"))
        return []


def run(workspace: Workspace, job: Job[T]) -> T:
    """Run one job to its end, as if it had the context to itself, and return its result."""
    scheduler = Scheduler(workspace)
    scheduler.submit(job)
    try:
        while not job.ended:
            scheduler.step()
    finally:
        scheduler.close()
    return job.result

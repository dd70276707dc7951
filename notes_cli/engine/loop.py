"""Runs tasks that need logits, and serves the requests of all of them with one llama.cpp batch per step.

A task is a generator. It yields a list of LogitsRequests, sequences or lookaheads, and is sent the logits of each. The
same code runs alone (`run`) or with others (`serve`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from itertools import count
from typing import Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.sequence import KVSequence, decode
from notes_cli.errors import EngineError, NotesError

AHEAD = 16  # lookaheads in flight at a time

T = TypeVar("T")
Logits = NDArray[np.float32]


class Lookahead(NamedTuple):
    """A request for the logits after each of these tokens if they followed the sequence, [len(tokens), n_vocab]."""

    sequence: KVSequence
    tokens: Sequence[int]


LogitsRequest = KVSequence | Lookahead  # a sequence: the logits after its last token, [n_vocab]
Task = Generator[Sequence[LogitsRequest], list[Logits], T]


def run(task: Task[T]) -> T:
    """Run one task to its end and return its result. Errors are raised in the task at its yield."""
    pauses = run_stepwise(task)
    try:
        while True:
            next(pauses)
    except StopIteration as done:
        result: T = done.value
        return result


def run_stepwise(task: Task[T]) -> Generator[None, None, T]:
    """As `run`, pausing at every request; closing this closes the task."""
    try:
        requests = next(task)
        while True:
            yield
            try:
                logits = [_compute_alone(request) for request in requests]
            except NotesError as error:
                _throw_into(task, error)
            requests = task.send(logits)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        task.close()


def join_tasks(tasks: Sequence[Task[T]]) -> Task[list[T]]:
    """Combine several tasks into one that requests the logits of all of them. If one fails, all do."""
    results: dict[int, T] = {}
    waiting: dict[int, Sequence[LogitsRequest]] = {}

    def resume(number: int, logits: list[Logits] | None) -> None:
        try:
            waiting[number] = next(tasks[number]) if logits is None else tasks[number].send(logits)
        except StopIteration as done:
            results[number] = done.value

    try:
        for number in range(len(tasks)):
            resume(number, None)
        while waiting:
            requested, waiting = waiting, {}
            logits = iter((yield [request for requests in requested.values() for request in requests]))
            for number, requests in requested.items():
                resume(number, [next(logits) for _ in requests])
    finally:
        for task in tasks:
            task.close()
    return [results[number] for number in range(len(tasks))]


def one_request_at_a_time(task: Task[T]) -> Task[T]:
    """Make a task request one item at a time, as `run` does: a joint batch would round differently."""
    try:
        requests = next(task)
        while True:
            logits: list[Logits] = []
            for request in requests:
                logits += yield [request]
            requests = task.send(logits)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        task.close()


def _compute_alone(request: LogitsRequest) -> Logits:
    return request.logits() if isinstance(request, KVSequence) else request.sequence.lookahead(request.tokens)


def _throw_into(task: Task[T], error: NotesError) -> NoReturn:
    """Raise an error in a task at its yield. The task may raise or return, but not request more."""
    task.throw(error)
    raise EngineError("a task went on after an error")


class _PendingLogits:
    """A request and its sequence; for a lookahead a temporary fork."""

    def __init__(self, request: LogitsRequest) -> None:
        self.request = request
        self.ahead = not isinstance(request, KVSequence)
        self.sequence: KVSequence | None = request if isinstance(request, KVSequence) else None
        self._rows: list[Logits] = []  # logits of a lookahead so far
        self._found: Logits | EngineError | None = None

    @property
    def started(self) -> bool:
        return self.sequence is not None or self._found is not None

    def begin(self) -> None:
        """Fork the sequence for a lookahead."""
        assert isinstance(self.request, Lookahead)
        self.sequence = self.request.sequence.share()
        self.sequence.append(self.request.tokens)
        if not self.request.tokens:
            self.take([])

    @property
    def pending(self) -> bool:
        return self.sequence is not None and bool(self.sequence.pending)

    def take(self, rows: list[Logits] | EngineError) -> None:
        """Take logits of a lookahead; the last of them closes its fork."""
        if isinstance(rows, EngineError):
            self._found = rows
        else:
            self._rows += rows
            width = self.request.sequence.context.model.n_vocab if isinstance(self.request, Lookahead) else 0
            self._found = None if self.pending else np.array(self._rows, np.float32).reshape(len(self._rows), width)
        if self._found is not None:
            self.close()

    @property
    def result(self) -> Logits | None:
        """The logits, if complete. Raises EngineError if they cannot be computed."""
        if isinstance(self._found, EngineError):
            raise self._found
        return self._found if self.ahead or self.sequence is None else self.sequence.try_logits()

    def close(self) -> None:
        if self.ahead and self.sequence is not None:
            self.sequence.close()
            self.sequence = None


class RunningTask(Generic[T]):
    """A task that was started, and its requests."""

    outcome: T | NotesError  # once it has ended

    def __init__(self, task: Task[T]) -> None:
        self._task = task
        self.awaited: list[_PendingLogits] = []
        self.ended = False
        self._begun = False

    def resume(self) -> None:
        """Resume the task for as long as its requests are complete."""
        try:
            while (logits := self._found()) is not None:
                requests = self._task.send(logits) if self._begun else next(self._task)
                self._begun = True
                self._forget()
                self.awaited = [_PendingLogits(request) for request in requests]
        except StopIteration as done:
            self._end(done.value)
        except NotesError as error:
            self._end(error)

    def _found(self) -> list[Logits] | None:
        """Return the logits of all requests, or None while some are missing; an error is raised in the task."""
        try:
            result = [item.result for item in self.awaited]
        except NotesError as error:
            _throw_into(self._task, error)
        complete = [one for one in result if one is not None]
        return complete if len(complete) == len(result) else None

    def fail(self, error: NotesError) -> None:
        """Raise an error in the task in place of its logits."""
        try:
            _throw_into(self._task, error)
        except StopIteration as done:
            self._end(done.value)
        except NotesError as raised:
            self._end(raised)

    def _end(self, outcome: T | NotesError) -> None:
        self.outcome, self.ended = outcome, True
        self.close()

    def close(self) -> None:
        """End the task, finished or not."""
        self._forget()
        self._task.close()

    def _forget(self) -> None:
        for item in self.awaited:
            item.close()
        self.awaited = []


class Loop(Generic[T]):
    """Drives tasks together. All their sequences belong to one context."""

    def __init__(self) -> None:
        self.running: list[RunningTask[T]] = []

    def begin(self, task: Task[T]) -> RunningTask[T]:
        """Add a task and run it to its first request."""
        entry = RunningTask(task)
        self.running.append(entry)
        entry.resume()
        return entry

    def ended(self) -> list[RunningTask[T]]:
        """Remove the tasks that have ended and return them."""
        done = [one for one in self.running if one.ended]
        self.running = [one for one in self.running if not one.ended]
        return done

    def drop(self, entry: RunningTask[T]) -> None:
        """Cancel a task."""
        self.running.remove(entry)
        entry.close()

    def close(self) -> None:
        for entry in self.running:
            entry.close()
        self.running = []

    def step(self, limit: int | None = None, held: Collection[KVSequence] = ()) -> None:
        """Decode one batch for all tasks, of at most `limit` tokens; if that fails, one for each task, so that only the
        failing ones fail. Sequences in `held` are skipped."""
        _start_lookaheads(self.running)

        def waiting(entry: RunningTask[T]) -> list[_PendingLogits]:
            return [item for item in entry.awaited if item.pending and item.sequence not in held]

        try:
            _decode([item for entry in self.running for item in waiting(entry)], limit)
        except NotesError:
            for entry in self.running:
                try:
                    for item in waiting(entry):
                        _decode([item], limit)
                except NotesError as error:
                    entry.fail(error)
        for entry in self.running:
            if not entry.ended:
                entry.resume()


def serve(tasks: Iterable[Task[T] | None], width: int) -> Generator[tuple[int, T | NotesError], None, None]:
    """Run at most `width` tasks together; yield (index from 0, result or error) as they end. An error ends only its own
    task. A task is started when a slot is free, so an iterator may create them lazily; it may yield None to wait until
    a running task ends. All sequences belong to one context."""
    waiting, loop = iter(tasks), Loop[T]()
    numbers: dict[RunningTask[T], int] = {}

    def outcomes() -> Iterator[tuple[int, T | NotesError]]:
        for entry in loop.ended():
            yield numbers.pop(entry), entry.outcome

    number = count()
    try:
        while True:
            while len(loop.running) < width and (following := next(waiting, None)):
                numbers[loop.begin(following)] = next(number)
                yield from outcomes()
            if not loop.running:
                return
            loop.step()
            yield from outcomes()
    finally:
        loop.close()


def _start_lookaheads(running: Sequence[RunningTask[T]]) -> None:
    """Start lookaheads up to the limit: each takes a sequence."""
    free = AHEAD - sum(item.ahead and item.pending for entry in running for item in entry.awaited)
    for entry in running:
        try:
            for item in [item for item in entry.awaited if not item.started][: max(0, free)]:
                item.begin()
                free -= 1
        except NotesError as error:
            entry.fail(error)


def _decode(awaited: Sequence[_PendingLogits], limit: int | None) -> None:
    seqs = {seq.seq_id: seq for item in awaited if (seq := item.sequence)}
    ahead = {item.sequence.seq_id: item for item in awaited if item.ahead and item.sequence}
    if not seqs:
        return
    for seq_id, rows in decode(list(seqs.values()), limit, every=ahead).items():
        if seq_id in ahead:
            ahead[seq_id].take(rows)

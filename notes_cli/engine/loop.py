"""The loop: tasks that need logits say so, and one call of llama.cpp serves all of them.

A task is a generator. It yields what it waits for, sequences and looks ahead, and is sent the logits of each. Driven by
itself (`run`) or with others (`serve`) it is the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from itertools import count
from typing import Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.decoding import decode
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, NotesError

AHEAD = 16  # looks ahead that are under way at a time

T = TypeVar("T")
Logits = NDArray[np.float32]


class Lookahead(NamedTuple):
    """A wish for the logits after each of these tokens if they came next in the sequence, [len(tokens), n_vocab]."""

    sequence: KVSequence
    tokens: Sequence[int]


LogitsRequest = KVSequence | Lookahead  # of a sequence: the logits after its last token, [n_vocab]
Task = Generator[Sequence[LogitsRequest], list[Logits], T]


def run(task: Task[T]) -> T:
    """Drive one task by itself. What fails is raised where the task waits for it."""
    going = run_stepwise(task)
    try:
        while True:
            next(going)
    except StopIteration as done:
        result: T = done.value
        return result


def run_stepwise(task: Task[T]) -> Generator[None, None, T]:
    """`run`, pausing whenever the task waits for something; closing this closes the task."""
    try:
        requests = next(task)
        while True:
            yield
            try:
                found = [_alone(request) for request in requests]
            except NotesError as error:
                _throw(task, error)
            requests = task.send(found)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        task.close()


def join_tasks(tasks: Sequence[Task[T]]) -> Task[list[T]]:
    """Several tasks as one, which waits for what all of them wait for. Where one fails, all do."""
    results: dict[int, T] = {}
    waiting: dict[int, Sequence[LogitsRequest]] = {}

    def go_on(number: int, found: list[Logits] | None) -> None:
        try:
            waiting[number] = next(tasks[number]) if found is None else tasks[number].send(found)
        except StopIteration as done:
            results[number] = done.value

    try:
        for number in range(len(tasks)):
            go_on(number, None)
        while waiting:
            asked, waiting = waiting, {}
            found = iter((yield [request for requests in asked.values() for request in requests]))
            for number, requests in asked.items():
                go_on(number, [next(found) for _ in requests])
    finally:
        for task in tasks:
            task.close()
    return [results[number] for number in range(len(tasks))]


def one_request_at_a_time(task: Task[T]) -> Task[T]:
    """A task that waits for one thing at a time, as it does where it is driven by itself: what it looks ahead for is
    not decoded together, which would round otherwise."""
    try:
        requests = next(task)
        while True:
            found: list[Logits] = []
            for request in requests:
                found += yield [request]
            requests = task.send(found)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        task.close()


def _alone(request: LogitsRequest) -> Logits:
    return request.logits() if isinstance(request, KVSequence) else request.sequence.lookahead(request.tokens)


def _throw(task: Task[T], error: NotesError) -> NoReturn:
    """Raise an error where a task waits. It may raise another one, or come to an end, but not ask for more: nothing was
    sent to it."""
    task.throw(error)
    raise EngineError("a task went on after an error")


class _PendingLogits:
    """A wish, and what is decoded for it: its sequence, or for a look ahead one that goes on from there and is
    forgotten afterwards."""

    def __init__(self, request: LogitsRequest) -> None:
        self.request = request
        self.ahead = not isinstance(request, KVSequence)
        self.sequence: KVSequence | None = request if isinstance(request, KVSequence) else None
        self._rows: list[Logits] = []  # of a look ahead, as they come
        self._found: Logits | EngineError | None = None

    @property
    def begun(self) -> bool:
        return self.sequence is not None or self._found is not None

    def begin(self) -> None:
        """A look ahead takes a sequence."""
        assert isinstance(self.request, Lookahead)
        self.sequence = self.request.sequence.share()
        self.sequence.append(self.request.tokens)
        if not self.request.tokens:
            self.take([])

    @property
    def pending(self) -> bool:
        return self.sequence is not None and bool(self.sequence.pending)

    def take(self, rows: list[Logits] | EngineError) -> None:
        """What a look ahead was after, or some of it; with the last of it the sequence is given back."""
        if isinstance(rows, EngineError):
            self._found = rows
        else:
            self._rows += rows
            width = self.request.sequence.context.model.n_vocab if isinstance(self.request, Lookahead) else 0
            self._found = None if self.pending else np.array(self._rows, np.float32).reshape(len(self._rows), width)
        if self._found is not None:
            self.close()

    @property
    def found(self) -> Logits | None:
        """The logits, if they are there. Raise EngineError where there cannot be any."""
        if isinstance(self._found, EngineError):
            raise self._found
        return self._found if self.ahead or self.sequence is None else self.sequence.try_logits()

    def close(self) -> None:
        if self.ahead and self.sequence is not None:
            self.sequence.close()
            self.sequence = None


class RunningTask(Generic[T]):
    """A task that has begun, and what it waits for."""

    outcome: T | NotesError  # when it has ended

    def __init__(self, task: Task[T]) -> None:
        self._task = task
        self.awaited: list[_PendingLogits] = []
        self.ended = False
        self._begun = False

    def resume(self) -> None:
        """As far as it comes with what is there."""
        try:
            while (found := self._found()) is not None:
                requests = self._task.send(found) if self._begun else next(self._task)
                self._begun = True
                self._forget()
                self.awaited = [_PendingLogits(request) for request in requests]
        except StopIteration as done:
            self._end(done.value)
        except NotesError as error:
            self._end(error)

    def _found(self) -> list[Logits] | None:
        """All that it waits for, if it is there. What of it cannot be had is raised where it waits."""
        try:
            found = [look.found for look in self.awaited]
        except NotesError as error:
            _throw(self._task, error)
        there = [one for one in found if one is not None]
        return there if len(there) == len(found) else None

    def fail(self, error: NotesError) -> None:
        """What it waits for cannot be had."""
        try:
            _throw(self._task, error)
        except StopIteration as done:
            self._end(done.value)
        except NotesError as raised:
            self._end(raised)

    def _end(self, outcome: T | NotesError) -> None:
        self.outcome, self.ended = outcome, True
        self.close()

    def close(self) -> None:
        """Whether it has ended or not."""
        self._forget()
        self._task.close()

    def _forget(self) -> None:
        for look in self.awaited:
            look.close()
        self.awaited = []


class Loop(Generic[T]):
    """Tasks that are driven together, for as long as there are any. All sequences are of one context."""

    def __init__(self) -> None:
        self.running: list[RunningTask[T]] = []

    def begin(self, task: Task[T]) -> RunningTask[T]:
        """Take a task in, and let it come as far as it does without logits."""
        one = RunningTask(task)
        self.running.append(one)
        one.resume()
        return one

    def ended(self) -> list[RunningTask[T]]:
        """Those that have ended, with their outcomes; they are taken out."""
        found = [one for one in self.running if one.ended]
        self.running = [one for one in self.running if not one.ended]
        return found

    def drop(self, one: RunningTask[T]) -> None:
        """Nobody wants what comes of it any more."""
        self.running.remove(one)
        one.close()

    def close(self) -> None:
        for one in self.running:
            one.close()
        self.running = []

    def step(self, limit: int | None = None, held: Collection[KVSequence] = ()) -> None:
        """One call for all, of at most `limit` tokens; where that fails, one for each, so that only those fail that
        must. Sequences that are `held` wait for another step."""
        _look_ahead(self.running)

        def waiting(one: RunningTask[T]) -> list[_PendingLogits]:
            return [look for look in one.awaited if look.pending and look.sequence not in held]

        try:
            _decode([look for one in self.running for look in waiting(one)], limit)
        except NotesError:
            for one in self.running:
                try:
                    for look in waiting(one):
                        _decode([look], limit)
                except NotesError as error:
                    one.fail(error)
        for one in self.running:
            if not one.ended:
                one.resume()


def serve(tasks: Iterable[Task[T] | None], width: int) -> Generator[tuple[int, T | NotesError], None, None]:
    """Drive tasks together, at most `width` at a time; yield the number of each, counted from 0, and its result or
    its error, as they end. One that fails does not stop the others.

    A task is begun when there is a place for it, so an iterator may make them lazily. It may also give None: none can
    begin before one of those that run has ended. All sequences are of one context.
    """
    waiting, loop = iter(tasks), Loop[T]()
    numbers: dict[RunningTask[T], int] = {}

    def outcomes() -> Iterator[tuple[int, T | NotesError]]:
        for one in loop.ended():
            yield numbers.pop(one), one.outcome

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


def _look_ahead(running: Sequence[RunningTask[T]]) -> None:
    """Begin as many looks ahead as may be under way at a time: each takes a sequence."""
    free = AHEAD - sum(look.ahead and look.pending for one in running for look in one.awaited)
    for one in running:
        try:
            for look in [look for look in one.awaited if not look.begun][: max(0, free)]:
                look.begin()
                free -= 1
        except NotesError as error:
            one.fail(error)


def _decode(looks: Sequence[_PendingLogits], limit: int | None) -> None:
    seqs = {seq.seq_id: seq for look in looks if (seq := look.sequence)}
    ahead = {look.sequence.seq_id: look for look in looks if look.ahead and look.sequence}
    if not seqs:
        return
    for seq_id, rows in decode(list(seqs.values()), limit, every=ahead).items():
        if seq_id in ahead:
            ahead[seq_id].take(rows)

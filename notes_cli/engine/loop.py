"""The loop: tasks that need logits say so, and one call of llama.cpp serves all of them.

A task is a generator. It yields what it waits for, notebooks and looks ahead, and is sent the logits of each. Driven by
itself (`run`) or with others (`serve`) it is the same code.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.decoding import decode
from notes_cli.engine.notebook import Notebook
from notes_cli.errors import EngineError, NotesError

T = TypeVar("T")
Logits = NDArray[np.float32]


class Ahead(NamedTuple):
    """A wish for the logits after each of these tokens if they came next in the notebook, [len(tokens), n_vocab]."""

    notebook: Notebook
    tokens: Sequence[int]


Wish = Notebook | Ahead  # of a notebook: the logits after its last token, [n_vocab]
Task = Generator[Sequence[Wish], list[Logits], T]


def run(task: Task[T]) -> T:
    """Drive one task by itself."""
    try:
        wishes = next(task)
        while True:
            wishes = task.send([_alone(wish) for wish in wishes])
    except StopIteration as done:
        result: T = done.value
        return result


def _alone(wish: Wish) -> Logits:
    return wish.logits() if isinstance(wish, Notebook) else wish.notebook.lookahead(wish.tokens)


class _Look:
    """A wish, and what is decoded for it: its notebook, or one that goes on from there and is forgotten afterwards."""

    def __init__(self, wish: Wish) -> None:
        self.ahead = not isinstance(wish, Notebook)
        self.rows: list[Logits] = []  # of a look ahead, as they come
        if isinstance(wish, Notebook):
            self.notebook = wish
        else:
            self.notebook = wish.notebook.share()
            self.notebook.append(wish.tokens)

    @property
    def found(self) -> Logits | None:
        """The logits, if they are there. Raise EngineError where there cannot be any."""
        if not self.ahead:
            return self.notebook.ask()
        return None if self.notebook.pending else np.stack(self.rows)

    def close(self) -> None:
        if self.ahead:
            self.notebook.close()


class _Running(Generic[T]):
    """A task that has begun, and what it waits for."""

    def __init__(self, number: int, task: Task[T]) -> None:
        self.number, self._task = number, task
        self.looks: list[_Look] = []
        self.outcome: T | NotesError | None = None
        self.ended = False

    def go_on(self) -> None:
        """As far as it comes with what is there."""
        try:
            found = [look.found for look in self.looks]
            while not self.ended and not any(one is None for one in found):
                wishes = self._task.send([one for one in found if one is not None] if found else None)  # type: ignore[arg-type]
                self._forget()
                for wish in wishes:
                    self.looks.append(_Look(wish))
                found = [look.found for look in self.looks]
        except StopIteration as done:
            self._end(done.value)
        except NotesError as error:
            self._end(error)

    def fail(self, error: NotesError) -> None:
        """What it waits for cannot be had."""
        try:
            self._task.throw(error)
            raise EngineError("a task went on after an error")  # it must not: nothing was sent to it
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
        for look in self.looks:
            look.close()
        self.looks = []


def serve(tasks: Iterable[Task[T]], width: int) -> Iterator[tuple[int, T | NotesError]]:
    """Drive tasks together, at most `width` at a time; yield the number of each, counted from 0, and its result or
    its error, as they end. One that fails does not stop the others.

    A task is begun when there is a place for it, so an iterator may make them lazily. All notebooks are of one context.
    """
    waiting = enumerate(tasks)
    running: list[_Running[T]] = []
    try:
        while True:
            while len(running) < width and (following := next(waiting, None)):
                running.append(_Running(*following))
                running[-1].go_on()
                yield from _outcomes(running)
            if not running:
                return
            _step(running)
            yield from _outcomes(running)
    finally:
        for one in running:
            one.close()


def _outcomes(running: list[_Running[T]]) -> Iterator[tuple[int, T | NotesError]]:
    """Those that have ended, which are taken out."""
    for one in [one for one in running if one.ended]:
        running.remove(one)
        assert one.outcome is not None
        yield one.number, one.outcome


def _step(running: Sequence[_Running[T]]) -> None:
    """One call for all; where that fails, one for each, so that only those fail that must."""
    looks = [look for one in running for look in one.looks if look.notebook.pending]
    try:
        _decode(looks)
    except NotesError:
        for one in running:
            try:
                for look in one.looks:
                    if look.notebook.pending:
                        _decode([look])
            except NotesError as error:
                one.fail(error)
    for one in running:
        if not one.ended:
            one.go_on()


def _decode(looks: Sequence[_Look]) -> None:
    books = {look.notebook.sequence: look.notebook for look in looks}
    ahead = {look.notebook.sequence: look for look in looks if look.ahead}
    for sequence, rows in decode(list(books.values()), every=ahead).items():
        ahead[sequence].rows += rows

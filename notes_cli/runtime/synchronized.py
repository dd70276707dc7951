"""One thread at a time: what a program asks of a model in one thread waits for what it asks of it in another.

A context, its sequences and the logits of its last batch belong to whoever computes. Methods that are `alone` hold the
lock of their workspace while they run, generators from one text to the next; several may be alive at once. What they
call a listener has to be one: else the first notice would be an error in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

from notes_cli.runtime.keywords import check_keywords

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    from notes_cli.runtime.workspace import Workspace

    P = ParamSpec("P")

T = TypeVar("T")
R = TypeVar("R")


class Computing(Protocol):
    """What computes in a workspace."""

    @property
    def workspace(self) -> Workspace: ...


C = TypeVar("C", bound=Computing)


def synchronized(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """The method, while no other thread computes in the workspace."""

    @wraps(method)
    def held(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(method, kwargs)
        with self.workspace.lock:
            return method(self, *args, **kwargs)

    return held


@overload
def synchronized_steps(  # type: ignore[overload-overlap]  # a generator is an iterator, too
    method: Callable[Concatenate[C, P], Generator[T, None, R]],
) -> Callable[Concatenate[C, P], Generator[T, None, R]]: ...
@overload
def synchronized_steps(
    method: Callable[Concatenate[C, P], Iterator[T]],
) -> Callable[Concatenate[C, P], Generator[T, None, None]]: ...
def synchronized_steps(
    method: Callable[Concatenate[C, P], Iterator[T] | Generator[T, None, R]],
) -> Callable[Concatenate[C, P], Generator[T, None, R]]:
    """The same of a generator: from one of its values to the next. In between others may compute."""

    @wraps(method)
    def held(self: C, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, R]:
        check_keywords(method, kwargs)
        return _each(self, method(self, *args, **kwargs))  # of a generator nothing is computed before it is asked

    return held


def _each(self: Computing, going: Iterator[T]) -> Generator[T, None, R]:
    try:
        while True:
            with self.workspace.lock:
                try:
                    value = next(going)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
            yield value
    finally:
        if isinstance(going, Generator):
            with self.workspace.lock:
                going.close()

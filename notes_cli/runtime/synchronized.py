"""Serialises computation: methods decorated with `synchronized` hold their workspace's lock while they run.

A context, its sequences and the logits of its last batch belong to one thread at a time. A decorated generator holds
the lock from one value to the next, so that several may be alive. `callbacks` arguments are checked here, as a wrong
one would fail in the middle of a computation.
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
    """An object that computes in a workspace."""

    @property
    def workspace(self) -> Workspace: ...


C = TypeVar("C", bound=Computing)


def synchronized(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Decorate a method to hold the workspace's lock."""

    @wraps(method)
    def wrapper(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(method, kwargs)
        with self.workspace.lock:
            return method(self, *args, **kwargs)

    return wrapper


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
    """Decorate a generator method to hold the lock while it computes a value, but not in between."""

    @wraps(method)
    def wrapper(self: C, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, R]:
        check_keywords(method, kwargs)
        return _locked_steps(self, method(self, *args, **kwargs))  # computes nothing before the first `next`

    return wrapper


def _locked_steps(self: Computing, values: Iterator[T]) -> Generator[T, None, R]:
    try:
        while True:
            with self.workspace.lock:
                try:
                    value = next(values)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
            yield value
    finally:
        if isinstance(values, Generator):
            with self.workspace.lock:
                values.close()

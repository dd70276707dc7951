"""Decorators of the Python API: they refuse unknown keywords, and hold the workspace's lock while a method runs.

A context, its sequences and the logits of its last batch belong to one thread at a time. A decorated generator holds
the lock from one value to the next, so that several may be alive.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import cache, wraps
from inspect import signature
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    from notes_cli.runtime.workspace import Workspace

    P = ParamSpec("P")

T = TypeVar("T")
R = TypeVar("R")

# Names in other programs that are not similar to ours.
OTHERS = {
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "n_gpu": "n_gpu_layers",
    "response_format": "json_schema",
    "skill": "splice",
    "skills": "splice",
    "temp": "temperature",
}


@cache
def keywords(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the parameters of a function in the order of its signature."""
    return tuple(name for name in signature(function).parameters if name != "self")


def check_keywords(
    function: Callable[..., object], keywords_: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for an unknown keyword. `elsewhere`: replacements for names that the function takes in another
    form."""
    known = keywords(function)
    for word in keywords_:
        if word in known:
            continue
        from difflib import get_close_matches

        forms = {**(elsewhere or {}), **{name: name for name in known}}
        own_name = OTHERS.get(word, word)
        close = [own_name] if own_name in forms else get_close_matches(word, forms, 1)
        advice = f"Did you mean {forms[close[0]]}?" if close else f"Its options: {', '.join(known)}"
        raise TypeError(f"{function.__name__}() has no option {word!r}. {advice}")


def checked(elsewhere: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that its keywords are checked."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            check_keywords(function, kwargs, elsewhere)
            return function(*args, **kwargs)

        return wrapper

    return decorate


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

"""Gives the Python API one thread at a time: a lock that methods hold, and a worker thread per model for asyncio.

A context, its sequences and the logits of its last batch belong to one thread at a time. A decorated generator holds
the lock from one value to the next, so that several may be alive. Unknown keywords are refused. An answer is stopped
when the asyncio task that waits for it is cancelled.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from inspect import signature
from typing import TYPE_CHECKING, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary

from notes_cli.engine.interrupts import Stop
from notes_cli.runtime.request import Answer, Stream
from notes_cli.runtime.workspace import Workspace

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

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


# workspace -> (process id, thread)
_threads: WeakKeyDictionary[Workspace, tuple[int, ThreadPoolExecutor]] = WeakKeyDictionary()


def _thread_of(workspace: Workspace) -> ThreadPoolExecutor:
    """Return the workspace's worker thread, which runs calls in order. A forked process creates its own."""
    process, thread = _threads.get(workspace, (0, None))
    if thread is None or process != os.getpid():
        thread = ThreadPoolExecutor(1, thread_name_prefix="notes")
        _threads[workspace] = os.getpid(), thread
    return thread


async def answer_in_thread(
    workspace: Workspace, start: Callable[[], Stream], on_text: Callable[[str], object] = lambda text: None
) -> Answer:
    """Start and drain a stream in the workspace's thread without interleaving other calls. `on_text` is called there
    with each text. Cancelling the task closes the stream, within a batch if need be."""
    import asyncio  # not needed by others

    stop = Stop()

    def compute() -> Answer:
        with workspace.lock, stop:
            stream = start()
            try:
                while True:
                    on_text(next(stream))
            except StopIteration as end:
                result: Answer = end.value
                return result
            finally:
                stream.close()

    context = contextvars.copy_context()
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread_of(workspace), context.run, compute)
    finally:
        stop.ask()


async def texts_from_thread(workspace: Workspace, start: Callable[[], Stream]) -> AsyncGenerator[str, None]:
    """Yield the texts of a stream as they are generated. A slow reader does not block it; closing the generator ends
    it."""
    import asyncio

    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[str | None] = asyncio.Queue()
    task = loop.create_task(
        answer_in_thread(workspace, start, lambda text: loop.call_soon_threadsafe(waiting.put_nowait, text))
    )
    task.add_done_callback(lambda _: waiting.put_nowait(None))
    try:
        while (text := await waiting.get()) is not None:
            yield text
        await task
    finally:
        task.cancel()

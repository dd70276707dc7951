"""asyncio: compute answers in one worker thread for each model, and stop when the task is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from notes_cli.engine.interrupts import Stop
from notes_cli.runtime.answering import Answer, Stream
from notes_cli.runtime.workspace import Workspace

_threads: WeakKeyDictionary[Workspace, tuple[int, ThreadPoolExecutor]] = WeakKeyDictionary()  # with their processes


def _thread_of(workspace: Workspace) -> ThreadPoolExecutor:
    """The worker thread of a workspace, which answers in the order of the calls. A forked process makes its own."""
    process, thread = _threads.get(workspace, (0, None))
    if thread is None or process != os.getpid():
        thread = ThreadPoolExecutor(1, thread_name_prefix="notes")
        _threads[workspace] = os.getpid(), thread
    return thread


async def answer(
    workspace: Workspace, begin: Callable[[], Stream], on_text: Callable[[str], object] = lambda text: None
) -> Answer:
    """The answer of a stream, begun and driven in the workspace's thread, without others in between. `on_text` is
    called there with each text. When the task is cancelled, the stream is closed, in the middle of a batch if need be.
    """
    stop = Stop()

    def compute() -> Answer:
        with workspace.lock, stop:
            stream = begin()
            try:
                while True:
                    on_text(next(stream))
            except StopIteration as end:
                found: Answer = end.value
                return found
            finally:
                stream.close()

    context = contextvars.copy_context()
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread_of(workspace), context.run, compute)
    finally:
        stop.ask()


async def texts(workspace: Workspace, begin: Callable[[], Stream]) -> AsyncGenerator[str, None]:
    """The texts of a stream as they come. It is not held up by a slow reader; closing the generator ends it."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[str | None] = asyncio.Queue()
    task = loop.create_task(answer(workspace, begin, lambda text: loop.call_soon_threadsafe(waiting.put_nowait, text)))
    task.add_done_callback(lambda _: waiting.put_nowait(None))
    try:
        while (text := await waiting.get()) is not None:
            yield text
        await task
    finally:
        task.cancel()

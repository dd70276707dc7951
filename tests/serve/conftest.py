"""Runs a server on the shipped model in this process: real sockets, a real client, compiled skills."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
import pytest
from samples import SAMPLES

from notes_cli import config
from notes_cli.api import Model
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.app import Service
from notes_cli.serve.prepare import Options
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.serve.server import listen, serve

SKILLS = ("returns", "support")
QUESTION = "May I return this?"
NO_TLS = False  # loading certificates takes longer than starting a server
Json = dict[str, Any]


@dataclass
class Served:
    """A server, and clients of it."""

    service: Service
    scheduler: DecodeThread
    url: str
    http: httpx.Client
    client: openai.OpenAI
    home: Path

    def ask(self, question: str = QUESTION, **notes: Any) -> Json:
        return self.chat([{"role": "user", "content": question}], notes={"explain": True, **notes})

    def chat(self, messages: list[Json], status: int = 200, **more: Any) -> Json:
        """Return the reply to these messages, or the error."""
        reply = self.http.post("/v1/chat/completions", json={"messages": messages, **more})
        assert reply.status_code == status, reply.text
        found: Json = reply.json()
        return found if status == 200 else found["error"]

    def at_context(self, function: Callable[[], Any]) -> Any:
        """Call a function in the decode thread, between two steps."""
        return self.scheduler.call(function).result(30)


def reply_text(reply: Json) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


def pieces(reply: Json) -> list[tuple[str, str, int]]:
    """Return kind, how and tokens of the prompt's pieces."""
    return [(one["kind"], one["how"], one["tokens"]) for one in reply["notes"]["pieces"]]


COMPILED = TemporaryDirectory(prefix="notes-serve-")


@cache
def compiled(name: str) -> Path:
    """Compile a sample skill, once per run; returns its home."""
    home = Path(COMPILED.name, name)
    with Model(Workspace(config.shipped_model(), ContextOptions(n_threads=1), paths=Paths.under(home))) as model:
        model.compile(str(SAMPLES / name))
    return home


def compile_into(home: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(compiled(name), home, dirs_exist_ok=True)


@contextmanager
def started(
    home: Path,
    options: Options | None = None,
    context: ContextOptions | None = None,
    model: Path | None = None,
    names: Sequence[str] = ("tiny",),
    drain: float = 5,
    **workspace: Any,
) -> Iterator[Served]:
    """Run a server in a thread for the duration of the block. `drain`: seconds for running answers at its end."""

    def opened() -> Workspace:
        given = context or ContextOptions(n_threads=1)
        return Workspace(model or config.shipped_model(), given, paths=Paths.under(home), **workspace)

    scheduler = DecodeThread(opened, replace(options or Options(), names=tuple(names)))
    service = Service(scheduler)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            serve(service, listening, lambda: None, drain)
        except BaseException as error:
            failed.append(error)

    with ExitStack() as stack:
        listening = stack.enter_context(listen("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=run, name="server")
        thread.start()
        http = stack.enter_context(httpx.Client(base_url=url, timeout=60, verify=NO_TLS))
        inner = httpx.Client(timeout=60, verify=NO_TLS)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=inner)
        stack.enter_context(client)
        scheduler.ready.result(30)
        try:
            yield Served(service, scheduler, url, http, client, home)
        finally:
            service.end()
            thread.join(30)
            assert not thread.is_alive() and not failed, failed


@pytest.fixture(scope="package")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the shipped skills compiled."""
    home = tmp_path_factory.mktemp("served")
    compile_into(home, *SKILLS)
    return home


@pytest.fixture(scope="module")
def served(library: Path) -> Iterator[Served]:
    """A server for the tests of a module."""
    with started(library) as found:
        yield found


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Served]:
    """A server with its own library."""
    compile_into(tmp_path, "returns")
    with started(tmp_path) as found:
        yield found

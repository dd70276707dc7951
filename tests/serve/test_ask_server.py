"""Tests `notes ask --server`: choice of the server, sessions, printed output, and answers that are cut off.

tests/test_interfaces.py compares the answers to all options with those of the other interfaces.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from samples import SAMPLES

from notes_cli.engine import model as engine
from notes_cli.library import safe_files
from notes_cli.serve import client
from notes_cli.serve.client import Server, address, registered, running
from notes_cli.sessions.folder import Sessions

from ..commands.conftest import Outcome, command_line, on_a_terminal, run_here
from .conftest import NO_TLS, QUESTION, Json, compile_into
from .test_robust import wait

LATE = "--erratum=date=2026-07-01"
DOCUMENT = ("--json", "--seed", "3")
ENDLESS = "import notes_cli.engine.model as m; m.Model.ends = lambda self, token: False"


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str
    home: Path

    @property
    def file(self) -> Path:
        return self.home / "servers" / f"{self.url.rpartition(':')[2]}-{self.process.pid}.json"

    def counted(self) -> float:
        found = httpx.get(f"{self.url}/metrics", verify=NO_TLS).text
        line = next((line for line in found.splitlines() if 'outcome="answered"' in line), "0")
        return float(line.split()[-1])


@contextmanager
def serving(home: Path, *options: str, code: str = "", **environment: str) -> Iterator[Running]:
    start = [sys.executable, "-c", f"{code}\nfrom notes_cli.__main__ import main; main()"]
    with subprocess.Popen(
        [*start, "serve", "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NOTES_HOME": str(home), "NOTES_THREADS": "1", **environment},
    ) as process:
        assert process.stderr
        try:
            line = next(line for line in process.stderr if "http://" in line)
            yield Running(process, line.split()[-1], home)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("warm")
    compile_into(home, "returns", "support")
    with serving(home) as found:
        yield found


@pytest.fixture(autouse=True)
def at_home(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES_HOME", str(server.home))
    monkeypatch.setenv("NOTES_THREADS", "1")


def comparable(found: Outcome) -> tuple[int, Any, str]:
    """Remove times and the server's URL."""
    if not found.out.startswith("{"):
        return found.code, found.out, found.err
    document = json.loads(found.out)
    return found.code, {key: value for key, value in document.items() if key not in ("ms", "server")}, found.err


def both(server: Running, *arguments: object, stdin: str = "") -> tuple[Outcome, Outcome]:
    """Return the results without a server, and with this one."""
    cold = run_here("ask", *arguments, "--server", "off", stdin=stdin)
    return cold, run_here("ask", *arguments, "--server", server.url, stdin=stdin)


def test_the_context_of_the_server(tmp_path: Path, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer prompt is refused, and a longer answer is cut."""
    monkeypatch.setenv("NOTES_HOME", str(tmp_path / "small"))
    monkeypatch.setattr(engine.Model, "ends", lambda self, token: False)
    with serving(tmp_path / "small", "-c", "256", code=ENDLESS) as found:
        cold, warm = both(found, "-c", "256", "so " * 300)
        assert (cold.code, warm.code) == (1, 1) and "256" in warm.err and "256" in cold.err
        cold, warm = both(found, "-c", "256", QUESTION, "-n", "1000", *DOCUMENT)
        assert comparable(warm)[:2] == comparable(cold)[:2] and warm.json["stopped"] == "context"
        assert "context of the server is full" in warm.err
        cold, warm = both(found, "-c", "256", QUESTION, "--choices", "yes,no", "-n", "1000", *DOCUMENT)
        assert comparable(warm) == comparable(cold)


TURNS = [
    ([QUESTION, "--splice", "returns", "--field", "date=2026-07-01"], 0),
    (["And now?", "--splice", "returns"], 1),  # the session has it already
    ([QUESTION, LATE, "--think"], 0),
    ([QUESTION, "--system", "Be brief."], 1),  # only at the first turn
    ([QUESTION, "--choices", "accepted,refused", *DOCUMENT], 0),
    ([f"{QUESTION} Think first.", "--splice", "support", *DOCUMENT], 0),
]
OF_MEMORY = [([QUESTION, "--memory", "returns", *DOCUMENT], 0), (["Now?", LATE, *DOCUMENT], 0), ([QUESTION], 0)]


@pytest.mark.parametrize("turns", [TURNS, OF_MEMORY], ids=["skills", "memory"])
def test_a_session_differs_with_a_server(server: Running, turns: list[tuple[list[str], int]]) -> None:
    """Turns of the server and of this process are answered as in a session of either alone; states are equal."""
    before, name = server.counted(), f"of-{len(turns)}"

    def asked(kind: str, *ways: str) -> list[tuple[int, Any]]:
        servers = itertools.cycle(ways)
        session = ("--session", f"{name}-{kind}")
        done = [run_here("ask", *turn, *session, "--server", next(servers)) for turn, _ in turns]
        assert [one.code for one in done] == [status for _, status in turns]
        return [comparable(Outcome(one.code, one.out.replace(kind, "S"), ""))[:2] for one in done]

    cold = asked("cold", "off")
    assert asked("warm", server.url) == cold and asked("mixed", "off", server.url) == cold
    assert server.counted() == before + [status for _, status in turns].count(0) + 1
    sessions = Sessions(server.home / "sessions")
    first, second = (sessions.find(f"{name}-{kind}") for kind in ("cold", "warm"))
    assert replace(first.state, read_at={}) == replace(second.state, read_at={}) and first.numbers == second.numbers
    with sessions.locked(f"{name}-warm"):
        held = run_here("ask", QUESTION, "--session", f"{name}-warm", "--server", server.url)
    assert held.code == 1 and f"session {name}-warm is open already" in held.err


def test_a_memory_that_is_a_file_is_of_this_process_alone(server: Running, tmp_path: Path) -> None:
    text = tmp_path / "profile.txt"
    text.write_text("diet: vegan\n\nThe user is in Bern.\n")
    assert run_here("ask", "x", "--memory", text, "--session", "of-file", "--server", "auto").code == 0
    found = run_here("ask", "x", "--session", "of-file", "--server", server.url)
    assert found.code == 1 and "the memory of session of-file is a file" in found.err


def test_a_terminal_shows_the_same(server: Running) -> None:
    """The reasoning, dimmed, and the answer as they are streamed, and the time saved."""
    asked = ["ask", f"{QUESTION} Think first.", "--splice", "returns", LATE, "--think"]
    shown = (on_a_terminal([*asked, "--server", which]) for which in ("off", server.url))
    cold, warm = (re.sub(r"read in [\d.]+ s", "read", text) for text in shown)
    assert warm == cold and "\x1b[2m" in cold and "prompt read, saved" in warm


def test_auto_takes_a_server_that_answers_the_same(server: Running) -> None:
    """A server with other settings is not used: this process answers, and -v gives the reason."""
    before = server.counted()

    def asked(*more: object) -> Outcome:
        return run_here("ask", QUESTION, "--splice", "returns", "--json", "-v", *more, "--server", "auto")

    warm = asked()
    assert warm.json["server"] == server.url and f"answered by the server on {server.url}" in warm.err
    assert server.counted() == before + 1
    for more, why in (
        (["-c", "2048"], "its context has other settings (fixed_size, n_ctx)"),
        (["-ctk", "q8_0"], "its context has other settings (type_k)"),
        (["-ub", "32"], "its context has other settings (n_ubatch)"),
        (["--splice", SAMPLES / "support"], f"{SAMPLES / 'support'} is no compiled skill"),
    ):
        cold = asked(*more)
        assert cold.json["server"] is None and f"no server answers this: {why}" in cold.err, cold.err
    assert asked("-t", "2").json["server"] == server.url, "threads change no answer but by rounding"
    wrong = asked("-m", "none.gguf")
    assert wrong.code == 1 and "none.gguf" in wrong.json["error"]["message"]
    assert server.counted() == before + 2


def test_a_setting_asks_for_a_server(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable or a line of config.yaml, below the option; an invalid address is a usage error."""

    def answered_by(*more: str) -> Any:
        found = run_here("ask", QUESTION, "--json", *more)
        return found.json["server"] if found.code == 0 else found.code

    assert answered_by() is None
    monkeypatch.setenv("NOTES_SERVER", "auto")
    assert answered_by() == server.url and answered_by("--server", "off") is None
    monkeypatch.setenv("NOTES_SERVER", "")
    settings = server.home / "config.yaml"
    settings.write_text("ask:\n  server: auto\n")
    try:
        assert answered_by() == server.url
        settings.write_text("server: there\n")
        assert answered_by() == 1
    finally:
        settings.unlink()
    assert answered_by("--server", "there") == 2


def test_a_server_that_is_named_answers_or_it_is_said_why(server: Running, make_model: Callable[..., Path]) -> None:
    """One line and status 1; no other way of answering is tried."""
    port = int(server.url.rpartition(":")[2])
    assert run_here("ask", QUESTION, "--json", "--server", f"http://localhost:{port}/").json["server"] == server.url
    for more, where, why in (
        ([], "http://127.0.0.1:1", "no notes serve of this user is running there"),
        ([], f"http://192.0.2.1:{port}", "no notes serve of this user is running there"),
        (["-m", make_model("llama")], server.url, "it has another model"),
        (["-c", "256"], server.url, "its context has other settings (fixed_size, n_ctx)"),
        (["--splice", "none"], server.url, "none is no compiled skill"),
        (["-n", "-1"], server.url, "-n -1 has no limit"),
    ):
        refusal = run_here("ask", QUESTION, *more, "--server", where).refusal()
        assert refusal.startswith(f"notes: {where} cannot answer this: {why}") and "--server off" in refusal
    whole = run_here("ask", QUESTION, "--splice", "returns", "-n", "-1", "--json", "--server", "auto")
    assert (whole.code, whole.json["server"], whole.json["answer"]) == (0, None, "accepted")
    questions = server.home / "questions.jsonl"
    questions.write_text('"What is 2?"\n')
    batch = run_here("ask", "--batch", questions, "--server", server.url)
    assert batch.code == 1 and batch.out == "" and "--batch is answered here alone" in batch.err
    assert run_here("ask", "--batch", questions, "--server", "auto").code == 0


def test_files_of_servers_that_are_passed_over(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that others could have read or written, of another machine or version (a home may be shared), or invalid.
    The file with the token is private."""
    folder, was = server.file.parent, server.file.read_text()
    found = [one.url for one in running(folder)]
    assert found == [server.url]
    assert (server.file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    for path, shared, private in ((server.file, 0o644, 0o600), (folder, 0o777, 0o700)):
        path.chmod(shared)
        monkeypatch.setattr(safe_files, "_checked", set())  # as in another process
        try:
            assert run_here("ask", QUESTION, "--json", "--server", "auto").json["server"] is None
        finally:
            path.chmod(private)
    changes: list[Json] = [{"machine": "elsewhere"}, {"version": "0.0.1"}, {"protocol": 0}, {"url": None}]
    try:
        for text in (*(json.dumps({**json.loads(was), **other}) for other in changes), "{", "[" * 100_000, "[1]"):
            server.file.write_text(text)
            assert running(folder) == [], text[:99]
        assert run_here("ask", QUESTION, "--json", "--server", "auto").json["server"] is None
    finally:
        server.file.write_text(was)
    assert run_here("ask", QUESTION, "--json", "--server", "auto").json["server"] == server.url


NONSENSE = [
    b"",
    b"\x00\xff" * 1000,
    b"HTTP/1.1 404 Not Found\r\n\r\n<html>",
    b"HTTP/1.1 500 Fault\r\n\r\n[]",
    b'HTTP/1.1 500 Fault\r\n\r\n{"error": 1}',
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\n",
    b"HTTP/1.1 200 OK\r\n\r\ndata: \xff\n\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    None,
]


def test_what_talks_nonsense_or_not_at_all_is_passed_over(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed soon, also if it is stopped (None): this process answers, or one line gives the error."""
    monkeypatch.setattr(client, "BEGIN", 0.2)
    was = json.loads(server.file.read_text())
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as other:

        def talk() -> None:
            for said in NONSENSE:
                for _ in range(2):
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(1 << 16)
                        if said is None:
                            connection.recv(1)  # until the client closes the connection
                        else:
                            connection.sendall(said)

        listening.settimeout(60)
        talked = other.submit(talk)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with registered(server.file.parent, Server(**{**was, "url": url})):
            for said in NONSENSE:
                warm = run_here("ask", QUESTION, "--json", "--server", "auto")
                assert warm.code == 0 and warm.json["server"] is None, said
                named = run_here("ask", QUESTION, "--server", url)
                assert f"{url} cannot answer this: " in named.refusal(), said
        talked.result(10)


def test_a_key_forms_and_another_model_of_the_same_path(
    tmp_path: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token in the file is a key; with --no-forms, this process answers requests with a grammar. A model file that
    changed after the server loaded it is not the server's model. A server that ends removes its file."""
    home, model = tmp_path / "keyed", tmp_path / "model.gguf"
    model.write_bytes(make_model("llama").read_bytes())
    monkeypatch.setenv("NOTES_HOME", str(home))
    auto = ("ask", QUESTION, "--json", "-m", model, "-n", "4", "--server", "auto")
    with serving(home, "--no-forms", "-m", str(model), NOTES_API_KEY="secret") as found:
        assert run_here(*auto).json["server"] == found.url
        held = run_here(*auto, "--grammar", 'root ::= "yes"')
        assert (held.json["server"], held.json["answer"]) == (None, "yes")
        token = json.loads(found.file.read_text())["token"]
        for key, status in (("", 401), ("wrong", 401), (token, 200)):
            headers = {"Authorization": f"Bearer {key}".strip()}
            assert httpx.get(f"{found.url}/v1/models", headers=headers, verify=NO_TLS).status_code == status
        model.write_bytes(make_model("llama", seed=5).read_bytes())
        late = run_here("ask", QUESTION, "-m", model, "-n", "2", "--server", found.url)
        assert late.code == 1 and "it has another model" in late.err
        found.process.terminate()
        assert found.process.wait(20) == 0 and not found.file.exists()


def test_where_a_server_is_found() -> None:
    """Only on loopback, as requests carry its token."""
    hosts = ("localhost", "0.0.0.0", "127.8.9.10", "::", "10.0.0.1", "127.example.com")
    here = "http://127.0.0.1:1"
    assert [address(host, 1) for host in hosts] == [here, here, "http://127.8.9.10:1", "http://[::1]:1", None, None]


@contextmanager
def asking(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A call of `notes ask` that has begun to answer."""
    with subprocess.Popen(
        command_line("ask", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout and process.stdout.read(1)
            yield process
        finally:
            process.kill()


def test_an_answer_that_is_broken_off(tmp_path: Path, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C: 130, else the signal, and the server stops decoding. By the server's death: text that was printed
    stays, one line gives the error, the session has its complete turns, and its file is not believed."""
    home = tmp_path / "stops"
    monkeypatch.setenv("NOTES_HOME", str(home))
    with serving(home, code=ENDLESS) as found:
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)):
            with asking(QUESTION, "-n", "2000", "--server", found.url) as process:
                process.send_signal(number)
                out, err = process.communicate(timeout=120)
                assert process.returncode == status
                assert out.endswith("\n") and err.splitlines()[-1].startswith("notes: ")
            wait(lambda: "notes_requests_running 0" in httpx.get(f"{found.url}/metrics", verify=NO_TLS).text)

        assert run_here("ask", QUESTION, "--session", "mine", "-n", "2", "--server", found.url).code == 0
        left = found.file.read_bytes()
        with asking(QUESTION, "--session", "mine", "-n", "2000", "--server", found.url) as process:
            found.process.kill()
            out, err = process.communicate(timeout=120)
            assert process.returncode == 1 and out.endswith("\n") and "Traceback" not in err
            assert err.splitlines()[-1].startswith(f"notes: the server on {found.url} did not complete the answer")
            assert "notes session show mine" in err
        shown = run_here("session", "show", "mine", "--json").json
        assert shown["turns"] == 1 and shown["pieces"]

        found.process.wait()
        with socket.create_server(("127.0.0.1", int(found.url.rpartition(":")[2]))) as other:
            other.settimeout(0.2)
            assert found.file.read_bytes() == left
            assert run_here("ask", QUESTION, "--json", "--server", "auto").json["server"] is None
            assert not found.file.exists()
            named = run_here("ask", QUESTION, "--server", found.url)
            assert named.code == 1 and "no notes serve of this user is running there" in named.err
            with pytest.raises(TimeoutError):
                other.accept()  # the program that has the port now gets no connection


def test_little_is_loaded_to_ask_a_server(server: Running) -> None:
    """Neither numpy nor llama.cpp; and without a server, nothing of its client."""

    def loaded(*arguments: str) -> set[str]:
        code = "import sys; from notes_cli.cli import run; run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
        command = [sys.executable, "-c", code, "ask", QUESTION, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.stdout.strip() in ("accepted", "") or "answer" in done.stdout, done.stderr
        return set(done.stderr.splitlines()[-1].split())

    heavy = {"numpy", "notes_cli.engine.native", "notes_cli.runtime.answering", "jinja2", "starlette"}
    assert loaded("--splice", "returns", "--json", "--server", server.url) & heavy == set()
    assert "http.client" not in loaded("--splice", "returns", "--server", "off")

"""Tests of layers on an RPC server, over loopback: rows are the same as locally; a lost server gives one line."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from operations import Done, all_operations
from reference import same

import notes_cli as notes
from notes_cli.cli import cli
from notes_cli.engine import devices, limits
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.errors import EngineError, NotesError

from ..conftest import MakeModel
from ..zoo import MODELS

PROGRAM = MODELS.parent / "bin" / "ggml-rpc-server"


class Server:
    """Start llama.cpp's RPC server, of the same sdist, on a free port, with a log of each message."""

    def __init__(self, folder: Path) -> None:
        if not PROGRAM.exists():
            pytest.fail(f"there is no {PROGRAM}. Run: make test")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._log = folder / f"{self.address}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "-H", "127.0.0.1", "-p", self.address.partition(":")[2], "-t", "1"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"GGML_RPC_DEBUG": "1"},
            )
        end = time.monotonic() + 60
        while True:
            try:
                devices.check_server(self.address)
                return
            except EngineError:
                assert self.process.poll() is None and time.monotonic() < end, self._log.read_text()
                time.sleep(0.02)

    def messages(self) -> Counter[str]:
        return Counter(re.findall(r"^\[(\w+)\] (?=buffer|device)", self._log.read_text(errors="replace"), re.M))

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    opened = Server(tmp_path_factory.mktemp("rpc"))
    yield opened
    opened.close()


def options(flash: Any = "on", kv: str = "f16", **more: Any) -> ContextOptions:
    v = kv if flash == "on" else "f16"  # a quantized V needs flash attention
    return ContextOptions(n_ctx=512, n_threads=1, type_k=kv, type_v=v, flash_attention=flash, **more)


CELLS = [
    *(("llama", "f16", "on", -1), ("llama", "f16", "off", 1), ("qwen3", "f32", "off", -1), ("gemma3", "f16", "on", 1)),
    *(("gemma3", "f16", "off", -1), ("qwen3", "q8_0", "on", -1), ("qwen3", "q8_0", "off", 1)),
    *(("lfm2", "f16", "on", -1), ("lfm2", "f16", "off", 1), ("mamba", "f16", "off", -1)),
]


@pytest.mark.parametrize(("kind", "kv", "flash", "layers"), CELLS)
@pytest.mark.patches("speed")
def test_rows_and_logits_are_those_of_this_machine(
    make_model: MakeModel, server: Server, kind: str, kv: str, flash: str, layers: int
) -> None:
    """Whatever is done with rows; all layers there, and some of them."""

    def made(**more: Any) -> Done:
        several = options(flash, kv, n_sequences=3, unified=True)
        with Model(make_model(kind), **more) as model, Context(model, several) as context:
            return all_operations(context)

    before = server.messages()
    logits, rows = made()
    assert server.messages() == before  # the control: this one is not there
    far_logits, far_rows = made(rpc=[server.address], gpu_layers=layers)
    assert server.messages()["graph_compute"] > before["graph_compute"]
    assert all(np.array_equal(a, b) for a, b in zip(far_logits, logits, strict=True))
    assert len(far_rows) == len(rows) and all(map(same, far_rows, rows))


def written(folder: Path, name: str = "skill") -> Path:
    path = folder / f"{name}.txt"
    path.write_text("date: 2026-06-01\n\nThe rest.")
    return path


def test_skills_and_sessions_are_of_the_model(
    make_model: MakeModel, server: Server, home: Path, tmp_path: Path
) -> None:
    """A skill compiled remotely is spliced locally, and vice versa; a session started remotely continues locally.
    Answers are those of one machine."""

    text = written(tmp_path)

    def answers(*places: Sequence[str]) -> list[str]:
        """Compile, start a session and continue it, at these places."""
        first, second, third = places
        with notes.open(make_model(), options(), rpc=first) as model:
            model.compile(text)
        with notes.open(make_model(), options(), rpc=second) as model, model.session("talk") as session:
            asked = session.ask("When?", splice=["skill"], max_tokens=8)
            assert asked.counts.spliced > 0
        with notes.open(make_model(), options(), rpc=third) as model, model.session("talk", new=False) as session:
            found = [asked.text, session.ask("And now?", max_tokens=8).text]
        shutil.rmtree(home)
        return found

    here, there = (), [server.address]
    expected = answers(here, here, here)
    assert answers(there, here, there) == expected
    assert answers(here, there, here) == expected


LOST = """
import os, signal, sys
import notes_cli as notes

address, pid, model, what = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
with notes.open(model, notes.ContextOptions(n_ctx=512, n_threads=1), rpc=[address]) as opened:
    if what == "compile":
        os.kill(pid, signal.SIGKILL)
        opened.compile(sys.argv[5])
    with opened.session("talk") as session:
        print(session.ask("First?", splice=["skill"], max_tokens=4).text, flush=True)
        for text in session.stream("Second?", max_tokens=200):
            if what == "stream":
                os.kill(pid, signal.SIGKILL)
print("not reached")
"""


@pytest.mark.parametrize("what", ["stream", "compile"])
@pytest.mark.patches("fixes")
def test_a_server_that_is_lost_is_one_line(make_model: MakeModel, tmp_path: Path, what: str) -> None:
    """Lost while it answers, or before a compile: exit status 1, and files are intact."""
    path = make_model()
    with notes.open(path, options()) as model:
        model.compile(written(tmp_path))
    own = Server(tmp_path)
    try:
        command = [sys.executable, "-c", LOST, own.address, str(own.process.pid), str(path), what]
        command += [str(written(tmp_path, "other"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    finally:
        own.close()
    line = f"notes: the RPC server {own.address} is lost: it has ended, or the connection to it was cut."
    line += " What is on disk is whole\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert "not reached" not in done.stdout
    with notes.open(path, options()) as model:
        if what == "compile":
            with pytest.raises(NotesError, match="no compiled skill"):
                model.segment("other")
            return
        with model.session("talk", new=False) as session:
            assert session.turns == 1
            assert session.verify().passed
            session.ask("Second?", max_tokens=4)


class Stranger:
    """Something that listens and gives this answer, or none."""

    def __init__(self, answer: bytes | None) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            connection, _ = self._listening.accept()
            with connection:
                connection.recv(64)
                if self._answer is None:
                    connection.recv(64)  # until the other side has enough
                else:
                    connection.sendall(self._answer)

    def close(self) -> None:
        self._listening.close()


def hello(major: int, minor: int) -> bytes:
    return struct.pack("<Q4B", 28, major, minor, 0, 0) + bytes(24)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, r"does not answer within 0\.3 seconds\. It serves one client at a time: perhaps it has another one"),
        (b"", r"is no RPC server of llama\.cpp, or one of a much older version"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, r"is no RPC server of llama\.cpp"),
        (hello(6, 9), r"speaks version 6\.9\.0 of the protocol, notes 7\.0\.0: build the server from the"),
        (hello(7, 1), r"speaks version 7\.1\.0 of the protocol"),
    ],
)
def test_what_is_no_server_of_ours(
    answer: bytes | None, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line with its address, before the model's file is looked at. llama.cpp would end the process, or wait."""
    monkeypatch.setattr(devices, "PATIENCE", 0.3)
    stranger = Stranger(answer)
    try:
        with pytest.raises(EngineError, match=f"{stranger.address} {says}"):
            Model(tmp_path / "no such model.gguf", rpc=[stranger.address])
    finally:
        stranger.close()
    with pytest.raises(EngineError, match=rf"{stranger.address} cannot be reached \(Connection refused\)"):
        Model(tmp_path / "no such model.gguf", rpc=[stranger.address])


def test_a_server_of_two_names_is_one(make_model: MakeModel, server: Server) -> None:
    port = server.address.rpartition(":")[2]
    with Model(make_model(), rpc=[f"127.0.0.1:{port}", f"localhost:{port}", f"127.0.0.1:{port}"]) as model:
        assert model.tokenize("a")
    devices.check_server(server.address)  # and it lives


def test_what_is_no_address() -> None:
    wrong = ["", "host", "host:", ":1", "host:0", "host:65536", "host:1:2", "[::1]:1", "http://host:1", "a b:1", "a:1/"]
    for text in wrong:
        with pytest.raises(EngineError, match="is no address of an RPC server"):
            devices.address(text)


def test_the_protocol_is_that_of_the_library() -> None:
    """A new llama.cpp may have another."""
    header = (MODELS.parent / "llama.cpp" / "ggml" / "include" / "ggml-rpc.h").read_text()
    found = [re.search(rf"RPC_PROTO_{part}_VERSION +(\d+)", header) for part in ("MAJOR", "MINOR")]
    assert tuple(int(match[1]) for match in found if match) == devices.PROTOCOL


def test_the_commands_have_it(make_model: MakeModel, server: Server, home: Path) -> None:
    """Servers from the command line, the environment and config.yaml; `doctor` lists them."""
    runner, before = CliRunner(), server.messages()["graph_compute"]
    ask = ["ask", "Hm?", "-m", str(make_model()), "-n", "2", "-t", "1"]
    home.mkdir(mode=0o700)
    for arguments, environment, config in (
        ([*ask, "--rpc", server.address], {}, ""),
        (ask, {"NOTES_RPC": server.address}, ""),
        (ask, {}, f"rpc: {server.address}"),
    ):
        (home / "config.yaml").write_text(config)
        assert runner.invoke(cli, arguments, env=environment).exit_code == 0
        assert server.messages()["graph_compute"] > before
        before = server.messages()["graph_compute"]
    (home / "config.yaml").unlink()
    done = runner.invoke(cli, ["doctor", "--rpc", server.address])
    assert re.search(rf"^devices +RPC\d: {server.address} \(\d+ of \d+ MiB free\); CPU: ", done.output, re.M)
    done = runner.invoke(cli, ["doctor", "--rpc", "127.0.0.1:1"])
    assert done.output.count("PROBLEM") == 1 and "the RPC server 127.0.0.1:1 cannot be reached" in done.output
    done = runner.invoke(cli, [*ask, "--rpc", f"{server.address},nowhere"])
    assert done.exit_code == 2 and "'nowhere' is no address of an RPC server" in done.output


def test_memory_elsewhere_is_not_this_machines(
    make_model: MakeModel, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context that does not fit here is refused here, although the library could put it elsewhere, and only here."""
    monkeypatch.setattr(limits, "available_memory", lambda: 1000)
    with Model(make_model()) as model, pytest.raises(EngineError, match="of memory is available"):
        Context(model, options())
    with Model(make_model(), rpc=[server.address]) as model, Context(model, options()) as context:
        assert context.n_ctx == 512
